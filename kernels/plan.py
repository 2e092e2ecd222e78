"""The work list of one step: static output buffers of the plan kernels, and `build`, which fills them on the device.

`build` reads only device memory, has fixed launches and never waits for the host: record it in a CUDA graph once, then change lengths,
paths and pages at will. What does not fit leaves an empty list and a bit in `error` (sticky; the host looks when it likes); until the
next good build the merge then writes NaN, so that nothing is lost silently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from askmany.kernels import plan_kernels as kernels
from askmany.kernels.tables import LEVELS, StepLimits, StepTables
from askmany.kernels.tiles import AttentionShape, Tiles

PADDED = (32, 128, 512)


@dataclass(frozen=True, slots=True)
class Chunking:
    """How keys are cut and what is shared.

    Deterministic chunking pins both chunk lengths and shares every node, so that a stream's result depends on its own keys alone,
    bit for bit. Otherwise chunks are as long as keeps all multiprocessors busy, and a node is read once for all its streams only if that
    saves more than `threshold_bytes` a layer (below it the L2 cache already gives what sharing could: 0.5 to 4 MB on an H200). A long node
    of one stream is read in the same way, with the tiles of shared nodes.
    """

    deterministic: bool = False
    threshold_bytes: int = 2_000_000
    shared_tokens: int = 1024
    single_tokens: int = 512


@dataclass(frozen=True, slots=True)
class WorkCapacity:
    """Fixed sizes of the work list: items, and rows of partial results (one a query head, row and split)."""

    items: int
    partials: int


def default_capacity(shape: AttentionShape, tiles: Tiles, limits: StepLimits, chunking: Chunking, slots: int) -> WorkCapacity:
    """Room for every step within `limits`: a few waves of items beyond one for each tile of rows, more with pinned chunks."""
    pairs = shape.kv_heads * (-(-limits.rows * LEVELS * shape.group // tiles.rows) + limits.nodes)
    groups = -(-shape.kv_heads // tiles.single_heads)
    row_tiles = -(-limits.rows * tiles.single_heads * shape.group // tiles.single_rows) + limits.streams
    shared, single = pairs + 4 * slots, groups * row_tiles * (LEVELS + 1) + 4 * slots
    if chunking.deterministic:
        keys = limits.pages * shape.page_size
        shared = pairs * (1 + keys // chunking.shared_tokens)
        single = groups * (
            row_tiles + -(-limits.rows * tiles.single_heads * shape.group // tiles.single_rows) * keys // chunking.single_tokens
        )
    return WorkCapacity(shared + single, shared * tiles.rows + single * tiles.single_rows)


class WorkPlan:
    """Owns the work list and everything `attend_work` and `merge_partials` read besides the tensors of a layer."""

    def __init__(
        self,
        shape: AttentionShape,
        tables: StepTables,
        tiles: Tiles,
        chunking: Chunking,
        slots: int,
        capacity: WorkCapacity | None = None,
        settled_nodes: bool = False,
    ) -> None:
        if shape.page_size != tables.page_size:
            raise ValueError(f"the tables hold pages of {tables.page_size} slots, the attention expects {shape.page_size}")
        self.shape, self.tables, self.tiles, self.chunking, self.slots = shape, tables, tiles, chunking, slots
        self.settled_nodes = settled_nodes
        self.capacity = capacity or default_capacity(shape, tiles, tables.limits, chunking, slots)
        limits = tables.limits

        def buffer(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=tables.device)

        self.items = buffer(self.capacity.items, kernels.FIELDS.value)
        self.item_count, self.status, self.error = buffer(1), buffer(1), buffer(1)
        self.row_list = buffer((LEVELS + 1) * limits.rows)
        self.row_list[LEVELS * limits.rows :] = torch.arange(limits.rows, dtype=torch.int32)
        self.segments = buffer(limits.rows, LEVELS + 1, 3)
        self.node_rows, self.node_streams, self.node_row_start = (buffer(limits.nodes) for _ in range(3))
        self.node_plan, self.segment_plan = buffer(limits.nodes, 4), buffer(limits.streams, LEVELS + 1, 4)
        self.stream_rank = buffer(limits.streams, LEVELS)

    def build(self) -> None:
        """Fill the work list from the tables: four launches, no synchronisation."""
        self._group()
        self._size()
        self._emit()
        kernels.settle[(1,)](self.status)

    def check(self) -> None:
        """Synchronise and raise RuntimeError if any build since the last check did not fit."""
        code = int(self.error.item())
        self.error.zero_()
        if code & kernels.TOO_MANY_ITEMS.value:
            raise RuntimeError(f"the step's attention needs more than the {self.capacity.items} work items reserved")
        if code & kernels.TOO_MANY_PARTIALS.value:
            raise RuntimeError(f"the step's attention needs more than the {self.capacity.partials} partial results reserved")

    def _group(self) -> None:
        t, limits = self.tables, self.tables.limits
        kernels.group_rows[(limits.nodes,)](
            t.stream_row_count, t.stream_path, self.node_rows, self.node_streams, self.node_row_start, self.stream_rank, self.segments,
            R=limits.streams, T=limits.rows, BR=_padded(limits.streams), LEVELS=LEVELS, BT=1024,
        )  # fmt: skip

    def _size(self) -> None:
        t, limits, tiles, chunking = self.tables, self.tables.limits, self.tiles, self.chunking
        pinned = chunking.deterministic
        kernels.size_work[(1,)](
            self.node_rows, self.node_streams, t.node_length, self.node_plan,
            t.stream_row_count, t.stream_path, t.stream_length, self.segment_plan, self.item_count, self.status, self.error,
            self.shape.token_bytes, -1 if pinned else chunking.threshold_bytes, self.slots,
            chunking.shared_tokens if pinned else 0, chunking.single_tokens if pinned else 0,
            self.capacity.items, self.capacity.partials, tiles.overhead,
            N=limits.nodes, R=limits.streams, HKV=self.shape.kv_heads, G=self.shape.group, BM=tiles.rows, BN=tiles.keys,
            HB=tiles.single_heads, BM1=tiles.single_rows, TN1=tiles.single_keys // tiles.single_heads,
            BNODE=_padded(limits.nodes), BR=_padded(limits.streams), LEVELS=LEVELS, C=64, C1=16,
        )  # fmt: skip

    def _emit(self) -> None:
        t, limits, tiles = self.tables, self.tables.limits, self.tiles
        kernels.emit_work[(limits.nodes + limits.streams,)](
            self.items, self.row_list, self.segments, self.status,
            self.node_rows, self.node_row_start, t.node_page_start, t.node_length, self.node_plan,
            t.stream_row, t.stream_row_count, t.stream_path, self.stream_rank, t.stream_page_start, t.stream_length, self.segment_plan,
            N=limits.nodes, T=limits.rows, LEVELS=LEVELS, HKV=self.shape.kv_heads, G=self.shape.group,
            BM=tiles.rows, HB=tiles.single_heads, BM1=tiles.single_rows, FIELDS=kernels.FIELDS.value, BI=128,
            SHARED=kernels.SHARED.value, SINGLE=kernels.SINGLE.value, UNBOUNDED=kernels.UNBOUNDED.value,
        )  # fmt: skip


def _padded(count: int) -> int:
    """A power of two of at least `count`, of few: each is a program of its own to compile."""
    return next((size for size in PADDED if size >= count), triton.next_power_of_2(count))
