"""Both layouts' attention in PyTorch operations, fast where keys are shared: the CPU path, and any other device's until it has kernels.

Equal to `reference` on the same items. Runs the passes that `passes` prepared: a document pass is one product of all its rows x G
queries of a KV head against the document's keys, read through a view; own keys are a causal square, or a padded batch over many streams;
parts are merged by log-sum-exp in fp32. Letters as in `reference`: T rows, S slots, HQ query heads, HKV KV heads, G = HQ // HKV, D head
dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from askmany.kernels.dense import dense_attention
from askmany.kernels.passes import AttentionPlan, CausalPass, OwnPass, PaddedPass, Run, SharedPass, StreamMaskPass

MASK_ROWS = 256  # rows of a stream mask made at once


def planned_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, Tensor]:
    """`q` [T, HQ, D] over caches [S, HKV, D]; the step's own K and V are already stored.

    Returns output [T, HQ, D] and log-sum-exp [T, HQ] in the wider of fp32 and `q`'s dtype. Rows of no pass are 0 and -inf.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    with _one_thread() if plan.row_block is not None and q.device.type == "cpu" else nullcontext():
        for own in plan.own:
            _write(own, q, k_cache, v_cache, scale, out, lse)
        for shared in plan.shared:
            _merge(shared, q, k_cache, v_cache, scale, plan.row_block, out, lse)
    return out, lse


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch's CPU attention in this thread alone: its other threads' buffers are aligned differently, and on some processors (measured on
    an AMD EPYC) the last bit of a matrix product goes by that."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


def _write(own: OwnPass, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    match own:
        case CausalPass():
            out[own.rows], lse[own.rows] = _over_run(q[own.rows], _take(k_cache, own.slots), _take(v_cache, own.slots), scale, causal=True)
        case StreamMaskPass():
            _write_masked(own, q, k_cache, v_cache, scale, out, lse)
        case PaddedPass():
            _write_padded(own, q, k_cache, v_cache, scale, out, lse)


def _write_masked(own: StreamMaskPass, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    k, v = _take(k_cache, own.slots), _take(v_cache, own.slots)
    for start in range(0, own.rows.stop - own.rows.start, MASK_ROWS):
        q_sid = own.q_sid[start : start + MASK_ROWS, None]  # [N, 1]
        rows = slice(own.rows.start + start, own.rows.start + start + len(q_sid))
        seen = own.seen + start + torch.arange(len(q_sid), device=q.device)[:, None]  # [N, 1]
        causal = torch.arange(len(own.key_sid), device=q.device) <= seen  # [N, L]
        visible = causal & ((own.key_sid == -1) | (own.key_sid == q_sid))
        out[rows], lse[rows] = _over_run(q[rows], k, v, scale, visible=visible[None, None])


def _over_run(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Rows `q` [N, HQ, D] over keys [L, HKV, D] with G as the batch, so that keys are read in place. Output [N, HQ, D], lse [N, HQ]."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    grouped = q.view(rows, kv_heads, groups, dim).permute(2, 1, 0, 3)  # [G, HKV, N, D]
    part, part_lse = dense_attention(grouped, _expand(k, groups), _expand(v, groups), scale, visible, causal)
    return part.permute(2, 1, 0, 3).reshape(rows, heads, dim), part_lse.permute(2, 1, 0).reshape(rows, heads)


def _write_padded(own: PaddedPass, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    batch, _, places, _ = own.visible.shape
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    groups = heads // kv_heads
    grouped = _take(q, own.rows).view(batch, places, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)  # [B, HKV, G, N, D]
    grouped = grouped.reshape(batch, kv_heads, groups * places, dim)
    k = k_cache.index_select(0, own.slots).view(batch, -1, kv_heads, dim).transpose(1, 2)  # [B, HKV, L, D]
    v = v_cache.index_select(0, own.slots).view(batch, -1, kv_heads, dim).transpose(1, 2)
    visible = own.visible.expand(-1, -1, groups, -1) if places == 1 else own.visible.repeat(1, 1, groups, 1)
    part, part_lse = dense_attention(grouped, k, v, scale, visible)
    part = part.view(batch, kv_heads, groups, places, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
    part_lse = part_lse.view(batch, kv_heads, groups, places).permute(0, 3, 1, 2).reshape(-1, heads)
    out[own.targets], lse[own.targets] = _take(part, own.kept).to(out.dtype), _take(part_lse, own.kept).to(lse.dtype)


def _merge(
    shared: SharedPass, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, row_block: int | None, out: Tensor, lse: Tensor
) -> None:
    """One document pass, merged into its rows: exp and log only, whose bits do not depend on a value's place in a tensor."""
    part, part_lse = _document_pass(_take(q, shared.rows), _take(k_cache, shared.slots), _take(v_cache, shared.slots), scale, row_block)
    old_out, old_lse = _take(out, shared.rows), _take(lse, shared.rows)
    top = torch.maximum(old_lse, part_lse)
    old_weight, weight = torch.exp(old_lse - top), torch.exp(part_lse - top)
    total = old_weight + weight
    out[shared.rows] = old_out * (old_weight / total)[..., None] + part * (weight / total)[..., None]
    lse[shared.rows] = top + torch.log(total)


def _document_pass(q: Tensor, k: Tensor, v: Tensor, scale: float, row_block: int | None) -> tuple[Tensor, Tensor]:
    """`q` [R, HQ, D] over all of `k`, `v` [L, HKV, D]: R * G query rows a KV head. Output [R, HQ, D], lse [R, HQ]."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    packed = q.view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)  # [1, HKV, R * G, D]
    if row_block is None:
        part, part_lse = dense_attention(packed, _expand(k, 1), _expand(v, 1), scale)
    else:
        part, part_lse = _in_row_blocks(packed[0], k, v, scale, row_block)
    part = part.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads, dim)
    return part, part_lse.view(kv_heads, rows, -1).transpose(0, 1).reshape(rows, heads)


def _in_row_blocks(packed: Tensor, k: Tensor, v: Tensor, scale: float, row_block: int) -> tuple[Tensor, Tensor]:
    """The document pass as a batch of blocks of `row_block` rows: every product has the same shape however many rows there are."""
    kv_heads, count, dim = packed.shape
    blocks = -(-count // row_block)
    padded = packed.new_zeros(kv_heads, blocks * row_block, dim)
    padded[:, :count] = packed
    q = padded.view(kv_heads, blocks, row_block, dim).transpose(0, 1)  # [blocks, HKV, row_block, D]
    part, part_lse = dense_attention(q, _expand(k, blocks), _expand(v, blocks), scale)
    part = part.transpose(0, 1).reshape(kv_heads, -1, dim)[:, :count]
    return part.contiguous(), part_lse.transpose(0, 1).reshape(kv_heads, -1)[:, :count].contiguous()


def _expand(keys: Tensor, batch: int) -> Tensor:
    """[L, HKV, D] -> [batch, HKV, L, D] without a copy."""
    return keys.transpose(0, 1)[None].expand(batch, -1, -1, -1)


def _take(tensor: Tensor, run: Run) -> Tensor:
    return tensor[run] if isinstance(run, slice) else tensor.index_select(0, run)
