"""How much room attention needs between its launches, for the largest of a split layout's spaces: one workspace serves them all, since
steps run one after the other.

Arithmetic over sizes and tiles; allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from askmany.engine.config import Layout, SchedulerLimits
from askmany.engine.graphs import Bucket, request_buckets, row_buckets
from askmany.engine.invariant_rows import whole_blocks
from askmany.engine.prefill import MOST_CHUNKS
from askmany.engine.split_space import SplitSize
from askmany.kernels.plan import Chunking, WorkCapacity, default_capacity
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape, Tiles, candidates

CHUNKS = MOST_CHUNKS
SHARED_NODES = 64  # instructions, and prefixes that are still being stored
CAPTURED_NODES = 128  # of a step with a graph: its work list is sized in registers
MIXED_ROWS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # rows of a graph for steps with question tails and small document chunks
DRAWING_BYTES = 26  # a logit of a row that is drawn, in three fp64 tensors and two of truth values
VENDOR_WORKSPACE_BYTES = 256 << 20
CPU_SLOTS = 2  # programs at once that the interpreter plays


@dataclass(frozen=True, slots=True)
class Processors:
    """A GPU's multiprocessors and compute capability."""

    count: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class WorkRules:
    """How attention cuts its work on one device: `context_tokens` bound every node and run, a decode step has `max_rows` rows at most,
    `gpu` None is a CPU."""

    shape: AttentionShape
    chunking: Chunking
    context_tokens: int
    max_rows: int
    gpu: Processors | None

    def tiles(self, node_rows: int, rows_per_run: int, node_tokens: int | None = None) -> list[Tiles]:
        """What a space may take whose nodes are read by `node_rows` rows and of about `node_tokens` tokens, the best guess first.
        Deterministic mode has one tile for every space: bits must not depend on a step's size."""
        capability = self.gpu.capability if self.gpu else None
        if self.chunking.deterministic:
            return candidates(self.shape, self.max_rows, 1, capability)[:1]
        return candidates(self.shape, node_rows, rows_per_run, capability, node_tokens)

    def capacity(self, size: SplitSize, tiles: Tiles) -> WorkCapacity:
        """Of a space; with pinned chunks there is room for every node and run at its longest."""
        slots = tiles.per_sm * self.gpu.count if self.gpu else CPU_SLOTS * tiles.per_sm
        pages = -(-self.context_tokens // self.shape.page_size) if self.chunking.deterministic else size.pages
        return default_capacity(self.shape, tiles, StepLimits(size.rows, size.runs, size.nodes, pages), self.chunking, slots)

    def most_partials(self, sizes: Iterable[SplitSize]) -> int:
        """Partial results of any space of these sizes, whichever tiles it takes."""
        return max(
            self.capacity(size, tiles).partials
            for size in sizes
            for rows in _powers_of_two(size.rows)
            for tiles in self.tiles(rows, size.rows_per_run)
        )


def most_nodes(limits: SchedulerLimits) -> int:
    """Prefix nodes that one step reads at most: a document for each row, and what documents share."""
    return limits.max_rows + SHARED_NODES


def split_buckets(limits: SchedulerLimits) -> list[Bucket]:
    """Decode steps by rows; steps with question tails or small chunks by rows, too. In deterministic mode whole blocks of products alone:
    fewer rows would be filled up in every layer."""
    most = limits.max_rows
    decode, mixed = row_buckets(most), [rows for rows in MIXED_ROWS if rows <= limits.step_tokens]
    if limits.deterministic:
        decode, mixed = _whole(decode), _whole(mixed)
    return [Bucket(rows, rows, True) for rows in decode] + [Bucket(rows, min(rows, most), False) for rows in mixed]


def _whole(counts: list[int]) -> list[int]:
    """Those in whole blocks, and the largest."""
    return [rows for rows in counts if rows == whole_blocks(rows) or rows == counts[-1]]


def bucket_size(bucket: Bucket, limits: SchedulerLimits, nodes: int, pages: int) -> SplitSize:
    """What a step in `bucket` holds at most."""
    runs = bucket.rows if bucket.decode else min(bucket.rows, limits.max_rows + CHUNKS)
    return SplitSize(bucket.rows, runs, min(nodes, bucket.rows + 8, CAPTURED_NODES), pages)


def eager_size(limits: SchedulerLimits, nodes: int, pages: int) -> SplitSize:
    """What any step holds at most."""
    return SplitSize(limits.step_tokens, min(limits.step_tokens, limits.max_rows + CHUNKS), nodes, pages)


def all_sizes(limits: SchedulerLimits, nodes: int, pages: int) -> list[SplitSize]:
    return [*(bucket_size(bucket, limits, nodes, pages) for bucket in split_buckets(limits)), eager_size(limits, nodes, pages)]


def workspace_bytes(rules: WorkRules, limits: SchedulerLimits, layout: Layout, vocabulary: int) -> int:
    """What graphs and kernels take beside weights, KV pool and activations when every space has been made: partial results of attention,
    the logits that each graph keeps (fp32 at most), what drawing with temperatures needs, another library's workspace."""
    head_dim, most = rules.shape.head_dim, limits.max_rows
    if layout == "interleaved":  # splits times row tiles fill the processors twice
        requests = request_buckets(limits.requests)
        kept = sum(min(count * limits.streams, most) for count in requests)
        processors = rules.gpu.count if rules.gpu else CPU_SLOTS
        partials = 4 * 2 * processors * 128 * head_dim * (1 + len(requests))
    else:
        kept = sum(bucket.wanted for bucket in split_buckets(limits))
        partials = 4 * rules.most_partials(all_sizes(limits, most_nodes(limits), 1)) * (head_dim + 1)
    return 4 * (kept + most) * vocabulary + DRAWING_BYTES * most * vocabulary + partials + VENDOR_WORKSPACE_BYTES


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range((most - 1).bit_length() + 1)]
