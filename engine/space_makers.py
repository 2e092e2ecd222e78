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
from askmany.engine.config import SchedulerLimits
from askmany.engine.graphs import Bucket, request_buckets
from askmany.engine.kv_pool import KVPool
from askmany.engine.masked_space import MaskedLayout, MaskedSize
from askmany.engine.model import RowModel
from askmany.engine.paged import MaskedStep, PagedNode, PagedRows, PagedRun, PagedStep, masked_step, paged_step
from askmany.engine.space import StepSpace
from askmany.engine.split_space import SplitLayout, SplitSize
from askmany.engine.step import StepPlan
from askmany.engine.workspaces import CHUNKS, Processors, WorkRules, all_sizes, bucket_size, eager_size, most_nodes, split_buckets
from askmany.kernels.plan import Chunking
from askmany.kernels.stream_attention import Partials
from askmany.kernels.tiles import AttentionShape, Tiles

REQUEST_CONTEXTS = 4  # an interleaved request's KV row in a graph at most, in contexts of one stream ...
REQUEST_KEYS = 1 << 16  # ... or of so many slots, whichever is more
EAGER_KEYS = 1 << 23  # cached slots of one interleaved step without a graph at most
CAPTURED_CHUNK_ROWS = 512  # rows of prefix chunks in a graph at most; beyond, another library's prefill is worth more than a graph


@dataclass(frozen=True, slots=True)
class KernelSetting:
    """What spaces are made for: the model over its pool, limits, and how attention is cut. `chunk_pass`: prefill of another library;
    `nodes`: prefix nodes in one step at most (default: as the limits make possible); `tiles`: the kernel's tiles for a decode step whose
    nodes are read by so many rows and of about so many tokens, if known."""

    model: RowModel
    pool: KVPool
    page_size: int
    limits: SchedulerLimits
    context_tokens: int
    chunking: Chunking = field(default_factory=Chunking)
    chunk_pass: ChunkPass | None = None
    nodes: int | None = None
    tiles: Callable[[AttentionShape, int, int | None], Tiles] | None = None

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

    def sample(self, rows: int, wanted: int, document_rows: int, document_tokens: int | None = None) -> PagedRows:
        """What a step of `rows` rows, `wanted` of which ask for logits and `document_rows` read one document (of `document_tokens` tokens,
        if known), looks like, as far as choosing and making a bucket goes."""
        ...

    def read(self, plan: StepPlan) -> Any:
        """The plan as this layout's step."""
        ...

    def fits(self, bucket: Bucket, step: Any) -> bool: ...

    def fits_eager(self, step: Any) -> bool: ...

    def stored_elsewhere(self, step: Any) -> None:
        """K and V of this step's rows are stored by others: note what later steps must know of their slots."""
        ...

    def space(self, bucket: Bucket, step: Any, drawn: Tensor) -> StepSpace: ...

    def eager_space(self, drawn: Tensor) -> StepSpace: ...


class SplitMaker:
    """Spaces of the split layout."""

    def __init__(self, setting: KernelSetting) -> None:
        self._setting = setting
        self._rules = WorkRules(
            setting.shape, setting.chunking, setting.context_tokens, setting.limits.max_rows, processors_of(setting.pool.device)
        )
        self._nodes = setting.nodes or most_nodes(setting.limits)
        self._partials: Partials | None = None
        self.most_wanted = setting.limits.max_rows
        self.empty = PagedStep()

    @property
    def buckets(self) -> list[Bucket]:
        """Decode steps, and steps with question tails or small chunks, by rows."""
        return split_buckets(self._setting.limits)

    def sample(self, rows: int, wanted: int, document_rows: int, document_tokens: int | None = None) -> PagedStep:
        """See `SpaceMaker`."""
        runs = [PagedRun(0, document_rows, document_rows, [], (0,))]
        nodes = [PagedNode(document_tokens, [])] if document_tokens else []
        return PagedStep(token_ids=[0] * rows, wanted=list(range(wanted)), nodes=nodes, runs=runs)

    def read(self, plan: StepPlan) -> PagedStep:
        return paged_step(plan, self._setting.page_size)

    def fits(self, bucket: Bucket, step: PagedStep) -> bool:
        settled = step.settled or not bucket.decode
        return settled and self._size(bucket).holds(step) and step.chunk_rows <= CAPTURED_CHUNK_ROWS

    def fits_eager(self, step: PagedStep) -> bool:
        return self._eager_size().holds(step) and len(step.wanted) <= self.most_wanted

    def stored_elsewhere(self, step: PagedStep) -> None:
        """Nothing: slots of this layout have no marks."""

    def space(self, bucket: Bucket, step: PagedStep, drawn: Tensor) -> StepSpace:
        layout = self._layout(self._size(bucket), node_use(step), None, settled_nodes=bucket.decode)
        return StepSpace(self._setting.model, self._setting.pool, layout, bucket.rows, bucket.wanted, drawn, bucket.decode)

    def eager_space(self, drawn: Tensor) -> StepSpace:
        size = self._eager_size()
        layout = self._layout(size, NodeUse(), self._setting.chunk_pass)
        return StepSpace(self._setting.model, self._setting.pool, layout, size.rows, self.most_wanted, drawn)

    def _layout(self, size: SplitSize, use: NodeUse, chunk_pass: ChunkPass | None, settled_nodes: bool = False) -> SplitLayout:
        setting, tiles = self._setting, self._tiles(size, use)
        return SplitLayout(
            setting.shape, size, setting.pool.device, chunking=setting.chunking, tiles=tiles,
            capacity=self._rules.capacity(size, tiles), chunk_pass=chunk_pass, partials=self._workspace(), settled_nodes=settled_nodes,
        )  # fmt: skip

    def _tiles(self, size: SplitSize, use: NodeUse) -> Tiles:
        rows, tuned = use.rows or size.rows, self._setting.tiles
        if tuned is not None and size.rows_per_run == 1 and not self._rules.chunking.deterministic:
            return tuned(self._setting.shape, _power_of_two(rows), use.tokens)
        return self._rules.tiles(rows, size.rows_per_run, use.tokens)[0]

    def _workspace(self) -> Partials:
        """Of all spaces together: their steps follow one another on one stream."""
        if self._partials is None:
            limits, shape = self._setting.limits, self._setting.shape
            sizes = all_sizes(limits, self._nodes, self._pages())
            self._partials = Partials(self._rules.most_partials(sizes), shape.head_dim, self._setting.pool.device)
        return self._partials

    def _size(self, bucket: Bucket) -> SplitSize:
        return bucket_size(bucket, self._setting.limits, self._nodes, self._pages())

    def _eager_size(self) -> SplitSize:
        return eager_size(self._setting.limits, self._nodes, self._pages())

    def _pages(self) -> int:
        return 2 * (self._setting.pool.slots // self._setting.page_size)


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

    def sample(self, rows: int, wanted: int, document_rows: int, document_tokens: int | None = None) -> MaskedStep:
        """Full requests, whichever document they read."""
        return MaskedStep(token_ids=[0] * rows, wanted=list(range(wanted)))

    def read(self, plan: StepPlan) -> MaskedStep:
        return masked_step(plan, self._setting.page_size)

    def fits(self, bucket: Bucket, step: MaskedStep) -> bool:
        return self._size(bucket).holds(step)

    def fits_eager(self, step: MaskedStep) -> bool:
        return self._eager_size().holds(step) and len(step.wanted) <= self.most_wanted

    def stored_elsewhere(self, step: MaskedStep) -> None:
        """The streams of the slots that are written."""
        sids = torch.tensor(step.sids, dtype=torch.int32, device=self._slot_sid.device)
        self._slot_sid[torch.tensor(step.slots, device=self._slot_sid.device)] = sids

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
        return min(self._setting.pool.slots, max(REQUEST_KEYS, REQUEST_CONTEXTS * self._setting.context_tokens))


def processors_of(device: torch.device) -> Processors | None:
    """What work lists are sized for; None on a CPU."""
    if device.type != "cuda":
        return None
    return Processors(torch.cuda.get_device_properties(device).multi_processor_count, torch.cuda.get_device_capability(device))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class NodeUse:
    """How a step typically reads a node: by `rows` rows at once, `tokens` tokens of it; None: not known."""

    rows: int | None = None
    tokens: int | None = None


def node_use(step: PagedStep) -> NodeUse:
    """Of the node that costs most: rows times tokens."""
    rows: Counter[int] = Counter()
    for run in step.runs:
        for node in run.path:
            rows[node] += run.rows
    if not rows:
        return NodeUse()
    tokens = {node: step.nodes[node].length for node in rows if node < len(step.nodes)}
    most = max(rows, key=lambda node: rows[node] * tokens.get(node, 1))
    return NodeUse(rows[most], tokens.get(most))
