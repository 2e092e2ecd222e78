"""What others' kernels do with the same step: stock FA3 and FlashInfer decode, FlashInfer's cascade, SGLang's extend kernel with a mask.

Each builder prepares metadata once, as those engines do outside their graphs, and returns a call for one layer: (k_cache, v_cache) ->
output [P, HQ, D]. None where the package is missing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from askmany.jobs.bench_inputs import PAGE, Inputs
from askmany.kernels import vendor

LayerCall = Callable[[Tensor, Tensor], Tensor]
WORKSPACE_BYTES = 512 * 2**20


def fa3_decode(inputs: Inputs) -> LayerCall | None:
    """Stock decode: one page table a stream, all naming the document's pages, as prefix caching leaves them."""
    attend = vendor.flash_attention()
    if attend is None:
        return None
    cell = inputs.cell
    table = torch.cat([inputs.document_table.expand(cell.streams, -1), inputs.own_table], dim=1).contiguous()
    lengths = torch.full((cell.streams,), cell.document + cell.private, dtype=torch.int32, device=table.device)

    def call(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        k, v = _paged(k_cache), _paged(v_cache)
        out = attend(inputs.q[:, None], k, v, page_table=table, cache_seqlens=lengths, softmax_scale=inputs.scale, causal=True)
        return _first(out)[:, 0]

    return call


def fa3_document_pass(inputs: Inputs) -> LayerCall | None:
    """FA3 over the document alone, the streams as one non-causal block of queries: a part of an answer, so not checked."""
    attend = vendor.flash_attention()
    if attend is None:
        return None
    table = inputs.document_table[None].contiguous()
    lengths = torch.full((1,), inputs.cell.document, dtype=torch.int32, device=table.device)

    def call(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        k, v = _paged(k_cache), _paged(v_cache)
        options = {"softmax_scale": inputs.scale, "causal": False, "return_softmax_lse": True}
        return _first(attend(inputs.q[None], k, v, page_table=table, cache_seqlens=lengths, **options))[0]

    return call


def flashinfer_decode(inputs: Inputs) -> LayerCall | None:
    """Stock decode as SGLang calls it: tensor cores from a group of four query heads on."""
    module = vendor.flashinfer()
    if module is None:
        return None
    cell, device = inputs.cell, inputs.q.device
    table = torch.cat([inputs.document_table.expand(cell.streams, -1), inputs.own_table], dim=1)
    bounds = torch.arange(cell.streams + 1, dtype=torch.int32, device=device) * table.shape[1]
    last = torch.full((cell.streams,), (cell.private - 1) % PAGE + 1, dtype=torch.int32, device=device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(_workspace(device), "NHD", use_tensor_cores=cell.q_heads // cell.kv_heads >= 4)
    wrapper.plan(
        bounds, table.reshape(-1).contiguous(), last, cell.q_heads, cell.kv_heads, cell.head_dim, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=inputs.scale,
    )  # fmt: skip
    return lambda k_cache, v_cache: wrapper.run(inputs.q, (_paged(k_cache), _paged(v_cache)))


def flashinfer_cascade(inputs: Inputs) -> LayerCall | None:
    """FlashInfer's multi-level cascade: the document as level one, private pages as level two."""
    module = vendor.flashinfer()
    if module is None:
        return None
    cell, device = inputs.cell, inputs.q.device

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    each = torch.arange(cell.streams + 1, dtype=torch.int32, device=device)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, _workspace(device), "NHD")
    wrapper.plan(
        [ints(0, cell.streams), each],
        [ints(0, inputs.document_pages), each * inputs.own_pages],
        [inputs.document_table, inputs.own_table.reshape(-1).contiguous()],
        [ints((cell.document - 1) % PAGE + 1), ints(*[(cell.private - 1) % PAGE + 1] * cell.streams)],
        cell.q_heads, cell.kv_heads, cell.head_dim, PAGE, sm_scale=inputs.scale, q_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda k_cache, v_cache: wrapper.run(inputs.q, (_paged(k_cache), _paged(v_cache)))


def sglang_extend_mask(inputs: Inputs) -> LayerCall | None:
    """SGLang's Triton extend kernel over the interleaved row, given the same rule as a dense byte mask over all keys."""
    try:
        from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
    except ImportError:
        return None
    cell, device = inputs.cell, inputs.q.device
    indices, sid = interleaved(inputs)
    mask = (sid[None, :] == -1) | (sid[None, :] == torch.arange(cell.streams, device=device)[:, None])
    fresh = torch.eye(cell.streams, dtype=torch.bool, device=device)
    mask = torch.cat([mask, fresh], dim=1).reshape(-1).to(torch.uint8)
    rows = torch.tensor([0, cell.streams], dtype=torch.int32, device=device)
    keys = torch.tensor([0, indices.shape[0]], dtype=torch.int32, device=device)
    mask_start = torch.zeros(2, dtype=torch.int64, device=device)
    newest = newest_keys(inputs)
    out = torch.empty_like(inputs.q)

    def call(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        k_new, v_new = newest[k_cache.data_ptr()]
        extend_attention_fwd(
            inputs.q, k_new, v_new, out, k_cache, v_cache, rows, keys, indices, mask, True, mask_start, cell.streams,
            1.0, 1.0, sm_scale=inputs.scale, skip_prefix_custom_mask=False,
        )  # fmt: skip
        return out

    return call


def interleaved(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Cached slots of the interleaved row (document, then the streams' tokens in turn, without the newest) and their stream ids."""
    cell = inputs.cell
    cached = inputs.own[:, :-1].T.reshape(-1)  # token by token, stream by stream
    sid = torch.arange(cell.streams, dtype=torch.int32, device=cached.device).repeat(cell.private - 1)
    return torch.cat([inputs.document, cached]), torch.cat([torch.full_like(inputs.document, -1, dtype=torch.int32), sid])


def newest_keys(inputs: Inputs) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values [P, HKV, D] of the streams' newest tokens as a model's projections would give them, by address of the K cache."""
    newest = inputs.own[:, -1]
    caches = [inputs.layer(i) for i in range(inputs.cell.layers)]
    return {k.data_ptr(): (k[newest], v[newest]) for k, v in caches}


def _paged(cache: Tensor) -> Tensor:
    return cache.view(-1, PAGE, *cache.shape[1:])


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
