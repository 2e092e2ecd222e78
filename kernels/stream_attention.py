"""`StreamAttention`: the split layout on a GPU. Every shared document is read once for all its streams, private keys a stream at a time.

Two launches a layer: `attend_work` works through the step's work list, `merge_partials` merges. The list is built once a step:

    attention = StreamAttention(shape, limits, device, node_rows=64)
    attention.tables.load(nodes, streams)       # host, when membership changes
    attention.plan.build()                      # device, every step; may be captured
    attention.run(q, k_cache, v_cache, scale, out)  # every layer; may be captured

Letters: T rows, S slots, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.kernels.attend import attend
from askmany.kernels.layout import SplitBatch
from askmany.kernels.merge import merge
from askmany.kernels.plan import Chunking, WorkCapacity, WorkPlan
from askmany.kernels.tables import StepLimits, StepTables, entries_of
from askmany.kernels.tiles import AttentionShape, Tiles, choose


class Partials:
    """Room for `count` partial results between the two launches of a layer: `o` [count, D] and `lse` [count], fp32."""

    def __init__(self, count: int, head_dim: int, device: torch.device) -> None:
        self.count = count
        self.o = torch.empty(count, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(count, dtype=torch.float32, device=device)


class StreamAttention:
    """Kernel, work list and workspace for one head shape and one bucket of step sizes. Shared by all layers of a model."""

    def __init__(
        self,
        shape: AttentionShape,
        limits: StepLimits,
        device: torch.device,
        *,
        node_rows: int | None = None,
        node_tokens: int | None = None,
        rows_per_stream: int = 1,
        chunking: Chunking | None = None,
        tiles: Tiles | None = None,
        capacity: WorkCapacity | None = None,
        partials: Partials | None = None,
        settled_nodes: bool = False,
    ) -> None:
        """`node_rows`: tokens that typically read one node at once (default: all rows); `node_tokens`: how long it typically is;
        `rows_per_stream`: tokens a stream brings;
        `partials`: a workspace that others use, too, one after the other; `settled_nodes`: no prefix node holds keys that this very step
        stores, so that its copies may begin while the step's store still runs. Raises ValueError if the workspace is too small."""
        chunking = chunking or Chunking()
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self.shape = shape
        self.tiles = tiles or choose(shape, node_rows or limits.rows, rows_per_stream, capability, node_tokens)
        self.tables = StepTables(limits, shape.page_size, device)
        self._overlap = capability is not None and capability[0] >= 9  # programmatic dependent launch
        slots = self.tiles.per_sm * (torch.cuda.get_device_properties(device).multi_processor_count if capability else 2)
        self.plan = WorkPlan(shape, self.tables, self.tiles, chunking, slots, capacity, settled_nodes)
        self._partials = partials or Partials(self.plan.capacity.partials, shape.head_dim, device)
        if self._partials.count < self.plan.capacity.partials:
            raise ValueError(f"a workspace of {self._partials.count} partial results is given, {self.plan.capacity.partials} are needed")

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
        if not len(q):
            return out
        part_o, part_lse = self._partials.o, self._partials.lse
        attend(q, k_cache, v_cache, scale, self.plan, part_o, part_lse, self._overlap)
        merge(part_o, part_lse, self.plan, out, lse, self._overlap)
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
        if self.tiles.groups or self.tiles.descriptors:
            dense = (shape.head_dim, 1)
            if k_cache.stride()[1:] != dense or v_cache.stride()[1:] != dense:
                raise ValueError(f"k_cache {k_cache.stride()} and v_cache {v_cache.stride()} must be dense in their last two dimensions")
        if not scale > 0:
            raise ValueError(f"scale must be positive, not {scale}")
