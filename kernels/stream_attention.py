"""`StreamAttention`: the split layout on a GPU. Every shared document is read once for all its streams, private keys a stream at a time.

Two launches a layer: `attend_work` works through the step's work list, `merge_partials` merges. The list is built once a step:

    attention = StreamAttention(shape, limits, device, node_rows=64)
    attention.tables.load(nodes, streams)       # host, when membership changes
    attention.plan.build()                      # device, every step; may be captured
    attention.run(q, k_cache, v_cache, scale, out)  # every layer; may be captured

Letters: T rows, S slots, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from askmany.kernels.attend_kernels import attend_work
from askmany.kernels.layout import SplitBatch
from askmany.kernels.merge import merge
from askmany.kernels.plan import Chunking, WorkCapacity, WorkPlan
from askmany.kernels.tables import StepLimits, StepTables, entries_of
from askmany.kernels.tiles import AttentionShape, Tiles, choose


class StreamAttention:
    """Kernel, work list and workspace for one head shape and one bucket of step sizes. Shared by all layers of a model."""

    def __init__(
        self,
        shape: AttentionShape,
        limits: StepLimits,
        device: torch.device,
        *,
        node_rows: int | None = None,
        rows_per_stream: int = 1,
        chunking: Chunking | None = None,
        tiles: Tiles | None = None,
        capacity: WorkCapacity | None = None,
    ) -> None:
        """`node_rows`: tokens that typically read one node at once (default: all rows); `rows_per_stream`: tokens a stream brings."""
        chunking = chunking or Chunking()
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self.shape = shape
        self.tiles = tiles or choose(shape, node_rows or limits.rows, rows_per_stream, capability)
        self.tables = StepTables(limits, shape.page_size, device)
        self._overlap = capability is not None and capability[0] >= 9  # programmatic dependent launch
        slots = self.tiles.per_sm * (torch.cuda.get_device_properties(device).multi_processor_count if capability else 2)
        self.plan = WorkPlan(shape, self.tables, self.tiles, chunking, slots, capacity)
        self._part_o = torch.empty(self.plan.capacity.partials, shape.head_dim, dtype=torch.float32, device=device)
        self._part_lse = torch.empty(self.plan.capacity.partials, dtype=torch.float32, device=device)

    def load(self, batch: SplitBatch) -> None:
        """Describe the step by a `SplitBatch` and build its work list (eager use and tests; an engine writes `tables` itself)."""
        self.tables.load(*entries_of(batch, self.shape.page_size))
        self.plan.build()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer: `q` [T, HQ, D] over `k_cache`, `v_cache` [S, HKV, D], as `reference.split_attention`.

        Writes and returns `out` [T, HQ, D] (rows of no stream: 0) and, if given, `lse` [T, HQ] fp32 (natural; -inf).
        """
        out = torch.empty_like(q) if out is None else out
        self._check(q, k_cache, v_cache, scale, out, lse)
        self._attend(q, k_cache, v_cache, scale)
        merge(self._part_o, self._part_lse, self.plan, out, lse, self._overlap)
        return out

    def _check(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor, lse: Tensor | None) -> None:
        shape, rows = self.shape, self.tables.limits.rows
        if q.shape[1:] != (shape.q_heads, shape.head_dim) or q.shape[0] > rows or out.shape != q.shape:
            raise ValueError(f"q {tuple(q.shape)} and out {tuple(out.shape)} must be [at most {rows}, {shape.q_heads}, {shape.head_dim}]")
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.shape[1:] != (shape.kv_heads, shape.head_dim) or cache.shape[0] % shape.page_size:
                raise ValueError(f"{name} {tuple(cache.shape)} must be [pages of {shape.page_size}, {shape.kv_heads}, {shape.head_dim}]")
        if {t.dtype for t in (q, k_cache, v_cache)} != {shape.dtype} or any(t.stride(-1) != 1 for t in (q, k_cache, v_cache, out)):
            raise ValueError(f"q, k_cache and v_cache must be {shape.dtype} and dense in their last dimension")
        if lse is not None and (lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()):
            raise ValueError(f"lse {tuple(lse.shape)} {lse.dtype} must be a contiguous float32 {tuple(q.shape[:2])}")
        if not scale > 0:
            raise ValueError(f"scale must be positive, not {scale}")

    def _descriptors(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Any, Any]:
        if not self.tiles.descriptors:
            return k_cache, v_cache
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape, block = self.shape, [min(self.tiles.keys, self.shape.page_size), triton.next_power_of_2(self.shape.head_dim)]
        width = shape.kv_heads * shape.head_dim
        k_desc, v_desc = (TensorDescriptor(c, [c.shape[0], width], [c.stride(0), 1], block) for c in (k_cache, v_cache))
        return k_desc, v_desc

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> None:
        shape, tiles, plan = self.shape, self.tiles, self.plan
        options = {"maxnreg": tiles.registers} if tiles.registers else {}
        attend_work[(min(plan.slots, plan.capacity.items),)](
            q, k_cache, v_cache, *self._descriptors(k_cache, v_cache), self._part_o, self._part_lse,
            self.tables.page_ids, plan.row_list, plan.items, plan.item_count,
            q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), scale / math.log(2),
            HKV=shape.kv_heads, G=shape.group, D=shape.head_dim, BD=triton.next_power_of_2(shape.head_dim),
            BM=tiles.rows, BN=tiles.keys, STAGES=tiles.stages, TMA=tiles.descriptors,
            HB1=tiles.single_heads, BM1=tiles.single_rows, BN1=tiles.single_keys, STAGES1=tiles.single_stages,
            PAGE=shape.page_size, PRECISION=_precision(q), PDL=self._overlap,
            num_warps=tiles.warps, **options,
        )  # fmt: skip


def _precision(q: Tensor) -> str:
    """How `product` multiplies: exact fp32 products for fp32, the only choice for 16-bit operands, widened in the interpreter."""
    if q.dtype == torch.float32:
        return "ieee"
    return "tf32" if q.is_cuda else "widened"
