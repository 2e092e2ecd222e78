"""Merge one part of attention into accumulators in place: the log-sum-exp merge of runs of rows, one launch a part.

On a CUDA device one Triton kernel, elsewhere PyTorch operations of the same meaning. Parts come as the attention kernels leave them: 16 or
32 bit outputs, the log-sum-exp in any strides. Letters: T rows, R rows of the part, HQ heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.kernels.passes import Run

Part = tuple[Tensor, Tensor]  # output [T, HQ, D] of any float dtype, log-sum-exp [T, HQ] fp32, natural; 0 and -inf where no key was seen
BLOCK_ELEMENTS = 4096  # of an output that one program merges


def merge_into(total: Part, part: Part, rows: Run, first: bool = False) -> None:
    """Add `part` over R rows to `total`, fp32 accumulators [T, HQ, D] and [T, HQ], at `rows`: a slice, or [R] int64 without repeats.

    Rows below 0 are padding and are skipped. With `first` the rows of `total` hold nothing yet and are written. Raises ValueError on
    shapes that do not fit.
    """
    _check(total, part, rows)
    if not part[0].shape[0]:
        return
    if total[0].is_cuda:
        launch_merge(total, part, rows, first)
    else:
        _merge_torch(total, part, rows, first)


def widened(part: Part | None) -> Part | None:
    """The part as accumulators: itself where it is fp32 and dense, else a copy."""
    if part is None:
        return None
    out, lse = part
    return out.float().contiguous(), lse.float().contiguous()


def nothing(like: Tensor, rows: int | None = None) -> Part:
    """Accumulators of rows that saw no key, for queries `like` [T, HQ, D]."""
    count, heads, dim = like.shape
    count = count if rows is None else rows
    out = torch.zeros(count, heads, dim, dtype=torch.float32, device=like.device)
    return out, torch.full((count, heads), float("-inf"), device=like.device)


def launch_merge(total: Part, part: Part, rows: Run, first: bool) -> None:
    """The Triton path of `merge_into`, on its own so that the interpreter can run it on a CPU."""
    import triton

    from askmany.kernels.merge_into_kernels import merge_rows

    (out, lse), (part_out, part_lse) = total, part
    count, heads, dim = part_out.shape
    padded = triton.next_power_of_2(dim)
    block = min(triton.next_power_of_2(heads), max(1, BLOCK_ELEMENTS // padded))
    indexed = isinstance(rows, Tensor)
    start = 0 if isinstance(rows, Tensor) else rows.start
    merge_rows[(count, -(-heads // block))](
        out, lse, part_out, part_lse, rows if indexed else lse, start,
        part_out.stride(0), part_out.stride(1), part_lse.stride(0), part_lse.stride(1),
        HQ=heads, D=dim, BD=padded, BH=block, FIRST=first, INDEXED=indexed, num_warps=4,
    )  # fmt: skip


def _merge_torch(total: Part, part: Part, rows: Run, first: bool) -> None:
    (out, lse), (part_out, part_lse) = total, part
    if not isinstance(rows, slice):
        keep = rows >= 0
        rows, part_out, part_lse = rows[keep].long(), part_out[keep], part_lse[keep]
    if first:
        out[rows], lse[rows] = part_out.to(out.dtype), part_lse.to(lse.dtype)
        return
    before, fresh = lse[rows], part_lse.to(lse.dtype)
    top = torch.maximum(before, fresh)
    safe = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    kept, added = torch.exp(before - safe), torch.exp(fresh - safe)
    weight = kept + added
    share = torch.where(weight == 0, torch.ones_like(weight), weight)
    out[rows] = out[rows] * (kept / share)[..., None] + part_out.to(out.dtype) * (added / share)[..., None]
    lse[rows] = safe + torch.log(weight)


def _check(total: Part, part: Part, rows: Run) -> None:
    (out, lse), (part_out, part_lse) = total, part
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if part_out.shape != (count, *out.shape[1:]) or part_lse.shape != part_out.shape[:2] or lse.shape != out.shape[:2]:
        shapes = [tuple(t.shape) for t in (out, lse, part_out, part_lse)]
        raise ValueError(f"{count} rows of a part [R, HQ, D], [R, HQ] do not fit accumulators [T, HQ, D], [T, HQ]: {shapes}")
    if not (out.is_contiguous() and lse.is_contiguous() and part_out.stride(2) == 1):
        raise ValueError("accumulators must be contiguous, a part dense in its last dimension")
