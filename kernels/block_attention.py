"""Attention inside one rank behind one small interface: prepared once a step from a `SplitBatch` over a block of slots, run in every layer.

    attend = blocks.prepare(batch, rows)     # once a step
    out, lse = attend(q, k, v, scale)        # every layer: q [T, HQ, D] over k, v [S, HKV, D]; log-sum-exp natural, fp32
    attend(q, k, v, scale, (out, lse))       # the same, merged into fp32 accumulators

Rows of no item are 0 and -inf, so that parts over different blocks merge. Outputs are fp32, or a kernel's own 16 bit where they are just
what one call of it gave. `TorchBlocks` runs anywhere; `FlashBlocks` is FlashAttention-3 on Hopper, `block_triton.TritonBlocks` our own
kernels on any GPU. Letters: T rows, S slots, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from askmany.kernels.layout import SplitBatch
from askmany.kernels.merge_into import Part, merge_into
from askmany.kernels.passes import LONG_RUN, Run, as_run, plan_split, sent, to_device
from askmany.kernels.torch_attention import planned_attention
from askmany.kernels.vendor import flash_attention


class Attend(Protocol):
    """A prepared attention."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, into: Part | None = None) -> Part:
        """Output and log-sum-exp; with `into` they are merged into it, in place, and it is returned."""
        ...


class BlockAttention(Protocol):
    """Whatever can attend over a block of keys."""

    def prepare(self, batch: SplitBatch, rows: int) -> Attend | None:
        """The attention of `batch` for a query block of `rows` rows; None when no row sees a key."""
        ...


class TorchBlocks:
    """PyTorch operations, on any device."""

    def __init__(self, device: torch.device, row_block: int | None = None) -> None:
        self._device, self._row_block = device, row_block

    def prepare(self, batch: SplitBatch, rows: int) -> Attend | None:
        """See `BlockAttention`."""
        plan = to_device(plan_split(batch, self._row_block), self._device)
        if not plan.own and not plan.shared:
            return None

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, into: Part | None = None) -> Part:
            return added(planned_attention(q, k, v, plan, scale), into)

        return attend


class FlashBlocks:
    """FlashAttention-3, one call a shared item and a long run of rows. Short runs, of which a step has many, go to `short` together.
    Keys that lie together are read in place, others through a page table of single slots. Where one call is all there is, its result is
    handed on as it is; else the first call to a row writes the accumulators and later ones are merged into them."""

    def __init__(self, device: torch.device, short: BlockAttention) -> None:
        function = flash_attention()
        if function is None:
            raise RuntimeError("FlashAttention-3 is not installed (packages sgl_kernel or flash_attn_interface)")
        self._call, self._device, self._short = function, device, short

    def prepare(self, batch: SplitBatch, rows: int) -> Attend | None:
        """See `BlockAttention`."""
        long = [item for item in batch.private if item.row_count >= LONG_RUN]
        few = tuple(item for item in batch.private if item.row_count < LONG_RUN)
        short = self._short.prepare(SplitBatch((), few), rows) if few else None
        turns = torch.zeros(rows, dtype=torch.int8)  # of a row: 0 until an item has it, 1 where that item writes it, 2 where it merges
        items = [self._item(torch.arange(i.row_start, i.row_start + i.row_count), i.slots, True, turns) for i in long]
        items += [self._item(item.rows, item.slots, False, turns) for item in batch.shared if len(item.rows) and len(item.slots)]
        if not items:
            return short
        if short is None and len(items) == 1 and items[0].rows == slice(0, rows):
            return self._alone(items[0])
        unseen = [_sent(run, self._device) for run in _runs(torch.nonzero(turns != 1)[:, 0])]

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, into: Part | None = None) -> Part:
            fresh = into is None and short is None
            total = added(short(q, k, v, scale), into) if short is not None else into or _unwritten(q, unseen)
            for item in items:
                merge_into(total, self._over(item, q, k, v, scale), item.rows, first=fresh and item.first)
            return total

        return attend

    def _alone(self, item: _FlashItem) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, into: Part | None = None) -> Part:
            return added(self._over(item, q, k, v, scale), into)

        return attend

    def _item(self, rows: Tensor, slots: Tensor, causal: bool, turns: Tensor) -> _FlashItem:
        length = sent(torch.tensor([len(slots)], dtype=torch.int32), self._device)
        row_run, slot_run = as_run(rows), as_run(slots)
        first = not bool(turns[row_run].any())
        turns[row_run] = torch.where(turns[row_run] == 0, 1 if first else 2, turns[row_run])
        keys = slot_run if isinstance(slot_run, slice) else sent(slot_run.to(torch.int32), self._device)[None]
        return _FlashItem(_sent(row_run, self._device), keys, length, causal, first)

    def _over(self, item: _FlashItem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Part:
        options: dict[str, Any] = {"cache_seqlens": item.length, "causal": item.causal, "softmax_scale": scale, "return_softmax_lse": True}
        if isinstance(item.keys, slice):
            out, lse, *_ = self._call(q[item.rows][None], k[item.keys][None], v[item.keys][None], **options)
        else:
            out, lse, *_ = self._call(q[item.rows][None], k[:, None], v[:, None], page_table=item.keys, **options)
        return out[0], lse[0].T


@dataclass(frozen=True, slots=True)
class _FlashItem:
    rows: Run
    keys: Run  # a slice, or a page table [1, L] int32
    length: Tensor  # [1] int32
    causal: bool
    first: bool  # no item before it has one of its rows


def added(part: Part, into: Part | None) -> Part:
    """`part` over all rows by itself, or merged into `into`."""
    if into is None:
        return part
    merge_into(into, part, slice(0, part[0].shape[0]))
    return into


def _unwritten(q: Tensor, unseen: Sequence[Run]) -> Part:
    """Accumulators that hold nothing at `unseen` and are to be written elsewhere."""
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for rows in unseen:
        out[rows], lse[rows] = 0.0, float("-inf")
    return out, lse


def _runs(rows: Tensor) -> list[Run]:
    """`rows` as one run, or none."""
    return [as_run(rows)] if len(rows) else []


def _sent(run: Run, device: torch.device) -> Run:
    return run if isinstance(run, slice) else sent(run, device)


def best_blocks(device: torch.device, dtype: torch.dtype, shape: Any = None) -> BlockAttention:
    """The fastest that runs here: FlashAttention-3 on Hopper in 16 bit, else our kernels on a GPU, else PyTorch.

    `shape`: the model's `tiles.AttentionShape` with pages of one slot; without it our kernels are left out.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and dtype != torch.float32 and flash_attention():
        return FlashBlocks(device, _own_kernels(shape, device) or TorchBlocks(device))
    if device.type == "cuda" and shape is not None:
        return _own_kernels(shape, device) or TorchBlocks(device)
    return TorchBlocks(device)


def _own_kernels(shape: Any, device: torch.device) -> BlockAttention | None:
    if shape is None:
        return None
    from askmany.kernels.block_triton import TritonBlocks

    return TritonBlocks(shape, device)
