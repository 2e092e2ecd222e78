"""The split layout's part of a `StepSpace`: page tables, work list, and document chunks by the best prefill there is.

Letters: T rows, R runs, N prefix nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.engine.chunk_pass import ChunkPass
from askmany.engine.paged import LEVELS, PagedStep
from askmany.engine.space import Arrays, KernelCall
from askmany.engine.staging import Field
from askmany.kernels.plan import Chunking, WorkCapacity
from askmany.kernels.stream_attention import Partials, StreamAttention
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape, Tiles

_NODE_FIELDS = ("node_page_start", "node_length")
_RUN_FIELDS = ("stream_page_start", "stream_length", "stream_row", "stream_row_count")


@dataclass(frozen=True, slots=True)
class SplitSize:
    """The most that one step holds."""

    rows: int
    runs: int
    nodes: int
    pages: int

    @property
    def rows_per_run(self) -> int:
        return max(1, self.rows // self.runs)

    def holds(self, step: PagedStep) -> bool:
        """Page lists aside: a page is listed once by its holder, and once more where chains of labels follow a tail, so that `pages` of
        two pools hold any step."""
        return step.rows <= self.rows and len(step.runs) <= self.runs and len(step.nodes) <= self.nodes


class SplitLayout:
    """Attention of steps up to `size`. With `chunk_pass`, prefix chunks go through it and not through the work list (not capturable)."""

    def __init__(
        self,
        shape: AttentionShape,
        size: SplitSize,
        device: torch.device,
        *,
        chunking: Chunking | None = None,
        tiles: Tiles | None = None,
        capacity: WorkCapacity | None = None,
        chunk_pass: ChunkPass | None = None,
        partials: Partials | None = None,
        settled_nodes: bool = False,
    ) -> None:
        """`partials`: a workspace that other spaces use, too; `settled_nodes`: what nodes hold was always stored by steps before."""
        self.size = size
        limits = StepLimits(size.rows, size.runs, size.nodes, size.pages)
        self._attention = StreamAttention(
            shape, limits, device, rows_per_stream=size.rows_per_run,
            chunking=chunking, tiles=tiles, capacity=capacity, partials=partials, settled_nodes=settled_nodes,
        )  # fmt: skip
        self._settled_nodes = settled_nodes
        self._chunk_pass = chunk_pass
        self._listed = True  # whether a row of the step goes through the work list

    @property
    def fields(self) -> list[Field]:
        size = self.size
        short = [Field(name, (size.nodes,), torch.int32) for name in _NODE_FIELDS]
        short += [Field(name, (size.runs,), torch.int32) for name in _RUN_FIELDS]
        return [*short, Field("stream_path", (size.runs, LEVELS), torch.int32), Field("page_ids", (size.pages,), torch.int32)]

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """The attention reads its tables from the staged tensors."""
        for field in self.fields:
            setattr(self._attention.tables, field.name, tensors[field.name])

    def fill(self, arrays: Arrays, step: PagedStep) -> int:
        """Page lists of the nodes, then of the runs. Raises RuntimeError if a node is not settled and nodes are to be."""
        if self._settled_nodes and not step.settled:
            raise RuntimeError("a node holds keys of this very step, and nodes are read before it stores any")
        page_size = self._attention.shape.page_size
        runs = step.runs
        if self._chunk_pass is not None:
            runs = runs[step.chunks :]
            self._listed = bool(runs)
            self._chunk_pass.plan(step, page_size)
        pages: list[int] = []
        starts: list[int] = []
        for held, length in [(node.pages, node.length) for node in step.nodes] + [(run.pages, run.length) for run in runs]:
            starts.append(len(pages))
            pages += held[: -(-length // page_size)]
        nodes, count = len(step.nodes), len(runs)
        arrays["page_ids"][: len(pages)] = pages
        arrays["node_page_start"][:nodes] = starts[:nodes]
        arrays["node_length"][:nodes] = [node.length for node in step.nodes]
        arrays["node_length"][nodes:] = 0
        arrays["stream_page_start"][:count] = starts[nodes:]
        arrays["stream_length"][:count] = [run.length for run in runs]
        arrays["stream_row"][:count] = [run.row for run in runs]
        arrays["stream_row_count"][:count] = [run.rows for run in runs]
        arrays["stream_row_count"][count:] = 0
        arrays["stream_path"][:] = -1
        if count:
            padded = {path: (*path, *(-1,) * (LEVELS - len(path))) for path in {run.path for run in runs}}
            arrays["stream_path"][:count] = [padded[run.path] for run in runs]
        return len(pages)

    def prepare(self, slots: Tensor) -> None:
        """Build the work list."""
        if self._listed:
            self._attention.plan.build()

    @property
    def call(self) -> KernelCall:
        return self._call

    def check(self) -> None:
        """Wait for the device; RuntimeError if a step did not fit the work list."""
        self._attention.plan.check()

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [T, HQ, D] and log-sum-exp [T, HQ] of the work list alone, fp32, to be merged with other keys' parts."""
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self._attention.run(q, k_cache, v_cache, scale, out, lse)
        return out, lse

    def _call(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._listed:
            self._attention.run(q, k_cache, v_cache, scale, out)
        if self._chunk_pass is not None:
            self._chunk_pass.run(q, k_cache, v_cache, scale, out)
        return out
