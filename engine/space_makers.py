"""Which spaces a layout's steps need: buckets for graphs, one large space for the rest, sized from the engine's limits.

Letters: B requests, P streams of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from askmany.engine.chunk_pass import ChunkPass
from askmany.engine.config import Layout, SchedulerLimits
from askmany.engine.graphs import Bucket, request_buckets, row_buckets
from askmany.engine.kv_pool import KVPool
from askmany.engine.masked_space import MaskedLayout, MaskedSize
from askmany.engine.model import RowModel
from askmany.engine.paged import MaskedStep, PagedRows, PagedStep, masked_step, paged_step
from askmany.engine.space import StepSpace
from askmany.engine.split_space import SplitLayout, SplitSize
from askmany.engine.step import StepPlan
from askmany.kernels.plan import Chunking, default_capacity
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape, Tiles, choose

CHUNKS = 64  # prefix chunks in one step at most
NODES = 128
REQUEST_CONTEXTS = 4  # an interleaved request's KV row at most, in contexts of one stream
EAGER_KEYS = 1 << 23  # cached slots of one interleaved step without a graph at most
MIXED_ROWS = (64, 128, 256, 384, 512)  # rows of a graph for steps with question tails and small document chunks


@dataclass(frozen=True, slots=True)
class KernelSetting:
    """What spaces are made for: the model over its pool, limits, and how attention is cut. `chunk_pass`: prefill of another library;
    `nodes`: prefix nodes in one step at most; `tiles`: the kernel's tiles for a decode step whose nodes are read by so many rows."""

    model: RowModel
    pool: KVPool
    page_size: int
    limits: SchedulerLimits
    context_tokens: int
    chunking: Chunking = field(default_factory=Chunking)
    chunk_pass: ChunkPass | None = None
    nodes: int = NODES
    tiles: Callable[[AttentionShape, int], Tiles] | None = None

    @property
    def shape(self) -> AttentionShape:
        kv = self.pool.shape
        return AttentionShape(self.model.q_heads, kv.kv_heads, kv.head_dim, self.page_size, kv.dtype)


class SpaceMaker(Protocol):
    """The spaces of one layout."""

    @property
    def buckets(self) -> list[Bucket]: ...

    @property
    def most_wanted(self) -> int:
        """Rows of one step that ask for logits at most."""
        ...

    @property
    def empty(self) -> PagedRows:
        """A step without rows."""
        ...

    def sample(self, rows: int) -> PagedRows:
        """What a decode step of `rows` rows looks like, as far as choosing and making a bucket goes."""
        ...

    def read(self, plan: StepPlan) -> Any:
        """The plan as this layout's step."""
        ...

    def fits(self, bucket: Bucket, step: Any) -> bool: ...

    def fits_eager(self, step: Any) -> bool: ...

    def space(self, bucket: Bucket, step: Any, drawn: Tensor) -> StepSpace: ...

    def eager_space(self, drawn: Tensor) -> StepSpace: ...


class SplitMaker:
    """Spaces of the split layout."""

    def __init__(self, setting: KernelSetting) -> None:
        self._setting = setting
        self.most_wanted = setting.limits.max_rows
        self.empty = PagedStep()

    @property
    def buckets(self) -> list[Bucket]:
        """Decode steps, and steps with question tails or small chunks, by rows."""
        return split_buckets(self._setting.limits)

    def sample(self, rows: int) -> PagedStep:
        """Rows of one document."""
        return PagedStep(token_ids=[0] * rows, wanted=list(range(rows)))

    def read(self, plan: StepPlan) -> PagedStep:
        return paged_step(plan, self._setting.page_size)

    def fits(self, bucket: Bucket, step: PagedStep) -> bool:
        return self._size(bucket).holds(step)

    def fits_eager(self, step: PagedStep) -> bool:
        return self._eager_size().holds(step) and len(step.wanted) <= self.most_wanted

    def space(self, bucket: Bucket, step: PagedStep, drawn: Tensor) -> StepSpace:
        layout = self._layout(self._size(bucket), node_rows(step), None)
        return StepSpace(self._setting.model, self._setting.pool, layout, bucket.rows, bucket.wanted, drawn, bucket.decode)

    def eager_space(self, drawn: Tensor) -> StepSpace:
        size = self._eager_size()
        layout = self._layout(size, None, self._setting.chunk_pass)
        return StepSpace(self._setting.model, self._setting.pool, layout, size.rows, self.most_wanted, drawn)

    def _layout(self, size: SplitSize, rows_of_node: int | None, chunk_pass: ChunkPass | None) -> SplitLayout:
        setting = self._setting
        shape, device, rows_per_run = setting.shape, setting.pool.device, max(1, size.rows // size.runs)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if setting.chunking.deterministic:  # one tile for every space: bits must not depend on a step's size
            rows_of_node, rows_per_run = setting.limits.max_rows, 1
        if setting.tiles is not None and rows_per_run == 1:
            tiles = setting.tiles(shape, _power_of_two(rows_of_node or size.rows))
        else:
            tiles = choose(shape, rows_of_node or size.rows, rows_per_run, capability)
        capacity = None
        if setting.chunking.deterministic:  # pinned chunks: room for every node and run at its longest
            slots = tiles.per_sm * (torch.cuda.get_device_properties(device).multi_processor_count if capability else 2)
            pages = -(-setting.context_tokens // shape.page_size)
            capacity = default_capacity(shape, tiles, StepLimits(size.rows, size.runs, size.nodes, pages), setting.chunking, slots)
        return SplitLayout(
            shape, size, device, chunking=setting.chunking, tiles=tiles, node_rows=rows_of_node, capacity=capacity, chunk_pass=chunk_pass
        )

    def _size(self, bucket: Bucket) -> SplitSize:
        runs = bucket.rows if bucket.decode else min(bucket.rows, self._setting.limits.max_rows + CHUNKS)
        return SplitSize(bucket.rows, runs, min(self._setting.nodes, bucket.rows + 8), self._pages())

    def _eager_size(self) -> SplitSize:
        limits = self._setting.limits
        return SplitSize(limits.step_tokens, min(limits.step_tokens, limits.max_rows + CHUNKS), self._setting.nodes, self._pages())

    def _pages(self) -> int:
        return self._setting.pool.slots // self._setting.page_size


class MaskedMaker:
    """Spaces of the interleaved layout: a graph for each B, a power of two, and P."""

    def __init__(self, setting: KernelSetting) -> None:
        self._setting = setting
        self.empty = MaskedStep()
        self._slot_sid = torch.full((setting.pool.slots,), -1, dtype=torch.int32, device=setting.pool.device)

    @property
    def most_wanted(self) -> int:
        return max(self._setting.limits.max_rows, max(bucket.wanted for bucket in self.buckets))

    @property
    def buckets(self) -> list[Bucket]:
        streams = self._setting.limits.streams
        return [Bucket(count * streams, count * streams, True, count) for count in request_buckets(self._setting.limits.requests)]

    def sample(self, rows: int) -> MaskedStep:
        """Full requests."""
        return MaskedStep(token_ids=[0] * rows, wanted=list(range(rows)))

    def read(self, plan: StepPlan) -> MaskedStep:
        return masked_step(plan, self._setting.page_size)

    def fits(self, bucket: Bucket, step: MaskedStep) -> bool:
        return self._size(bucket).holds(step)

    def fits_eager(self, step: MaskedStep) -> bool:
        return self._eager_size().holds(step) and len(step.wanted) <= self.most_wanted

    def space(self, bucket: Bucket, step: MaskedStep, drawn: Tensor) -> StepSpace:
        layout = MaskedLayout(self._setting.shape, self._size(bucket), self._slot_sid, self._typical_keys(step))
        return StepSpace(self._setting.model, self._setting.pool, layout, bucket.rows, bucket.wanted, drawn, bucket.decode)

    def eager_space(self, drawn: Tensor) -> StepSpace:
        size = self._eager_size()
        layout = MaskedLayout(self._setting.shape, size, self._slot_sid, self._setting.context_tokens, self._setting.chunk_pass)
        return StepSpace(self._setting.model, self._setting.pool, layout, size.rows, self.most_wanted, drawn)

    def _typical_keys(self, step: MaskedStep) -> int:
        return step.cached_tokens // max(1, len(step.requests)) or self._setting.context_tokens

    def _size(self, bucket: Bucket) -> MaskedSize:
        return MaskedSize(bucket.rows, bucket.units, bucket.units * self._keys())

    def _eager_size(self) -> MaskedSize:
        limits = self._setting.limits
        requests = min(limits.step_tokens, limits.requests + CHUNKS)
        return MaskedSize(limits.step_tokens, requests, min(requests * self._keys(), EAGER_KEYS))

    def _keys(self) -> int:
        """Cached slots of a request that a graph makes room for: a document with what its streams usually add."""
        return min(self._setting.pool.slots, REQUEST_CONTEXTS * self._setting.context_tokens)


def split_buckets(limits: SchedulerLimits) -> list[Bucket]:
    """Decode steps by rows; steps with question tails or small chunks by rows, too."""
    most = limits.max_rows
    mixed = [rows for rows in MIXED_ROWS if rows <= limits.step_tokens]
    return [Bucket(rows, rows, True) for rows in row_buckets(most)] + [Bucket(rows, min(rows, most), False) for rows in mixed]


def workspace_bytes(
    shape: AttentionShape, limits: SchedulerLimits, layout: Layout, vocabulary: int, capability: tuple[int, int], processors: int
) -> int:
    """What graphs and kernels take beside weights, KV pool and activations when every space has been made: partial results of attention and
    the logits of a step, in fp32."""
    logits = 4 * 2 * limits.max_rows * vocabulary
    if layout == "interleaved":  # splits times row tiles fill the processors twice
        return logits + 4 * 2 * processors * 128 * shape.head_dim * (1 + len(request_buckets(limits.requests)))
    sizes = [(bucket.rows, min(bucket.rows, limits.max_rows + CHUNKS)) for bucket in split_buckets(limits)]
    sizes.append((limits.step_tokens, min(limits.step_tokens, limits.max_rows + CHUNKS)))
    partials = 0
    for rows, runs in sizes:
        tiles = choose(shape, rows, max(1, rows // runs), capability)
        capacity = default_capacity(shape, tiles, StepLimits(rows, runs, NODES, 1), Chunking(), tiles.per_sm * processors)
        partials += capacity.partials
    return logits + 4 * partials * (shape.head_dim + 1)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def node_rows(step: PagedStep) -> int | None:
    """The rows that typically read one node at once; None where the step has no node."""
    counts: Counter[int] = Counter()
    for run in step.runs:
        if run.path:
            counts[run.path[-1]] += run.rows
    return max(counts.values(), default=None)
