"""Attention inside one rank behind one small interface: prepared once a step from a `SplitBatch` over a block of slots, run in every layer.

    attend = blocks.prepare(batch, rows)     # once a step
    out, lse = attend(q, k, v, scale)        # every layer: q [T, HQ, D] over k, v [S, HKV, D]; out fp32, log-sum-exp natural, fp32

Rows of no item are 0 and -inf, so that parts over different blocks merge. `TorchBlocks` runs anywhere; `FlashBlocks` is
FlashAttention-3 on Hopper, `block_triton.TritonBlocks` our own kernels on any GPU. Letters: T rows, S slots, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from askmany.kernels.layout import SplitBatch
from askmany.kernels.passes import LONG_RUN, Run, as_run, plan_split, to_device
from askmany.kernels.torch_attention import planned_attention
from askmany.kernels.vendor import flash_attention

Attend = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


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

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            return planned_attention(q, k, v, plan, scale)

        return attend


class FlashBlocks:
    """FlashAttention-3, one call a shared item and a long run of rows, merged in fp32. Short runs, of which a step has many, go to
    `short` together. Keys that lie together are read in place, others through a page table of single slots."""

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
        items = [self._item(torch.arange(i.row_start, i.row_start + i.row_count), i.slots, True) for i in long]
        items += [self._item(item.rows, item.slots, False) for item in batch.shared if len(item.rows) and len(item.slots)]
        if not items:
            return short

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            out, lse = _nothing(q) if short is None else short(q, k, v, scale)
            for item in items:
                out[item.rows], lse[item.rows] = merge_two(out[item.rows], lse[item.rows], *self._over(item, q, k, v, scale))
            return out, lse

        return attend

    def _item(self, rows: Tensor, slots: Tensor, causal: bool) -> _FlashItem:
        length = torch.tensor([len(slots)], dtype=torch.int32, device=self._device)
        row_run, slot_run = as_run(rows), as_run(slots)
        keys = slot_run if isinstance(slot_run, slice) else slot_run.to(self._device, torch.int32)[None]
        return _FlashItem(row_run if isinstance(row_run, slice) else row_run.to(self._device), keys, length, causal)

    def _over(self, item: _FlashItem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"cache_seqlens": item.length, "causal": item.causal, "softmax_scale": scale, "return_softmax_lse": True}
        if isinstance(item.keys, slice):
            out, lse, *_ = self._call(q[item.rows][None], k[item.keys][None], v[item.keys][None], **options)
        else:
            out, lse, *_ = self._call(q[item.rows][None], k[:, None], v[:, None], page_table=item.keys, **options)
        return out[0].float(), lse[0].T


@dataclass(frozen=True, slots=True)
class _FlashItem:
    rows: Run
    keys: Run  # a slice, or a page table [1, L] int32
    length: Tensor  # [1] int32
    causal: bool


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


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(q.shape, dtype=torch.float32, device=q.device), torch.full(q.shape[:2], float("-inf"), device=q.device)


def merge_two(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from each one's: outputs [T, HQ, D], log-sum-exp [T, HQ]; -inf for a set without keys."""
    out, lse = merge_parts(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]))
    return out, lse


def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The same for R parts: `outs` [R, T, HQ, D], `lses` [R, T, HQ], added in order (merge attention, arXiv 2411.01783, equation 4)."""
    top = lses.amax(dim=0)  # [T, HQ]
    safe = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weights = torch.exp(lses - safe)  # [R, T, HQ]
    total = weights.sum(dim=0)
    share = weights / torch.where(total == 0, torch.ones_like(total), total)
    return (outs * share[..., None]).sum(dim=0), safe + torch.log(total)
