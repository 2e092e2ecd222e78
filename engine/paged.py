"""From a step's plan to page lists: what the kernels read, as host integers.

The counterpart of `batch` for a device with kernels: no slot is spelled out but those that are written, so that a step of hundreds of
streams over long documents costs the host little. Knows nothing of tensors, kernels or memory. Rows stand in the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from askmany.engine.request import Stream
from askmany.engine.step import MaskedRun, PrefixChunk, StepPlan, StreamRun

if TYPE_CHECKING:
    from askmany.engine.prefix_tree import PrefixNode

LEVELS = 3  # prefix nodes above a row that the kernels can follow


@dataclass(slots=True)  # not frozen: one for each row of each step
class PagedRun:
    """Rows `row .. row + rows - 1` are the last of `length` own tokens in `pages`; all of them see the nodes `path` (indices) whole."""

    row: int
    rows: int
    length: int
    pages: list[int]
    path: tuple[int, ...]


@dataclass(slots=True)
class PagedNode:
    """`length` tokens in `pages` that runs see whole: a prefix node, or a tail that the chains of its labels follow."""

    length: int
    pages: list[int]


@dataclass(slots=True)
class PagedRows:
    """The rows of a step, whatever its layout.

    Row `wanted[i]` asks for logits on behalf of `streams[i]`: for a token, or, where the stream has labels, for log-probabilities of label
    tokens, as row `label_rows[i]` of the label tree (0 where that is missing).
    """

    token_ids: list[int] = field(default_factory=list)  # T, or PENDING
    positions: list[int] = field(default_factory=list)  # T
    slots: list[int] = field(default_factory=list)  # T, where each row's K and V go
    wanted: list[int] = field(default_factory=list)  # W, ascending
    streams: list[Stream] = field(default_factory=list)  # W
    label_rows: dict[int, int] = field(default_factory=dict)
    chunk_rows: int = 0  # the first rows, which belong to prefix chunks

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @property
    def decodes(self) -> bool:
        """Every row asks for logits."""
        return len(self.wanted) == self.rows


@dataclass(slots=True)
class PagedStep(PagedRows):
    """A step of the split layout. The first `chunks` runs are prefix chunks, every other run belongs to a stream. `settled`: what its nodes
    hold was stored by steps before."""

    nodes: list[PagedNode] = field(default_factory=list)
    runs: list[PagedRun] = field(default_factory=list)
    chunks: int = 0
    settled: bool = True


@dataclass(frozen=True, slots=True)
class PagedRequest:
    """Rows `row .. row + rows - 1` are new tokens of one KV row: `nodes` whole, then the first `stored` tokens of `pages`."""

    row: int
    rows: int
    nodes: tuple[PrefixNode, ...]
    pages: list[int]
    stored: int

    @property
    def cached_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes) + self.stored


@dataclass(slots=True)
class MaskedStep(PagedRows):
    """A step of the interleaved layout; a prefix chunk is a request of its own, and the first `chunks` requests are chunks."""

    requests: list[PagedRequest] = field(default_factory=list)
    sids: list[int] = field(default_factory=list)  # T, -1 for a prefix token
    chunks: int = 0

    @property
    def cached_tokens(self) -> int:
        return sum(request.cached_tokens for request in self.requests)


def can_page(plan: StepPlan) -> bool:
    """Whether the kernels serve this plan: no path deeper than LEVELS, the tail being one more for chains of labels that follow it."""
    deepest = max((len(run.stream.document.path) + _has_chains(run.stream) for run in plan.runs), default=0)
    return max([deepest, *(len(chunk.node.ancestors) for chunk in plan.chunks)]) <= LEVELS


def _has_chains(stream: Stream) -> bool:
    labels = stream.question.labels
    return labels is not None and labels.longest > 0


def paged_step(plan: StepPlan, page_size: int) -> PagedStep:
    """The page lists of `plan`, whose slots lie in pages of `page_size`."""
    step = PagedStep()
    index: dict[int, int] = {}
    for chunk in plan.chunks:
        _add_chunk(step, chunk, index, page_size)
    step.chunks, step.chunk_rows = len(step.runs), step.rows
    known: dict[int, tuple[int, tuple[int, ...]]] = {}  # by document: tokens before its streams', nodes that they see
    row = step.rows
    for run in plan.runs:
        document = run.stream.document
        found = known.get(id(document))
        if found is None:
            found = known[id(document)] = document.document.prefix_tokens, _path(step, document.path, index)
        if run.stream.question.labels is None:
            _add_run(step, row, run, *found, page_size)
        else:
            _add_label_run(step, row, run, *found, page_size)
        row += run.stop - run.start
    return step


def masked_step(plan: StepPlan, page_size: int) -> MaskedStep:
    """The KV rows of `plan`."""
    step = MaskedStep()
    for chunk in plan.chunks:
        row, node = step.rows, chunk.node
        _chunk_rows(step, chunk, page_size)
        step.sids += [-1] * (chunk.stop - chunk.start)
        step.requests.append(PagedRequest(row, chunk.stop - chunk.start, tuple(node.ancestors), node.pages, chunk.start))
    step.chunks, step.chunk_rows = len(step.requests), step.rows
    for run in plan.masked:
        _add_request(step, run, page_size)
    return step


def _add_request(step: MaskedStep, run: MaskedRun, page_size: int) -> None:
    request, row = run.request, step.rows
    base = request.document.document.prefix_tokens
    step.token_ids += [request.streams[sid].private_token(index) for sid, index in run.entries]
    step.positions += [base + index for _, index in run.entries]
    step.slots += slots_between(request.pages, run.start, run.start + len(run.entries), page_size)
    step.sids += [sid for sid, _ in run.entries]
    step.requests.append(PagedRequest(row, len(run.entries), tuple(request.document.path), request.pages, run.start))
    step.wanted += [row + entry for entry in run.samples]
    step.streams += [request.streams[run.entries[entry][0]] for entry in run.samples]


def _add_chunk(step: PagedStep, chunk: PrefixChunk, index: dict[int, int], page_size: int) -> None:
    node, row = chunk.node, step.rows
    _chunk_rows(step, chunk, page_size)
    path = _path(step, node.ancestors, index)
    step.runs.append(PagedRun(row, chunk.stop - chunk.start, chunk.stop, node.pages, path))


def _chunk_rows(step: PagedRows, chunk: PrefixChunk, page_size: int) -> None:
    node = chunk.node
    step.token_ids += node.token_ids[chunk.start : chunk.stop]
    step.positions += range(node.start + chunk.start, node.start + chunk.stop)
    step.slots += slots_between(node.pages, chunk.start, chunk.stop, page_size)


def _add_run(step: PagedStep, row: int, run: StreamRun, base: int, path: tuple[int, ...], page_size: int) -> None:
    stream, start, stop = run.stream, run.start, run.stop
    if stop - start == 1:  # nearly all runs of a long job
        step.token_ids.append(stream.private_token(start))
        step.positions.append(base + start)
        step.slots.append(stream.pages[start // page_size] * page_size + start % page_size)
    else:
        step.token_ids += [stream.private_token(i) for i in range(start, stop)]
        step.positions += range(base + start, base + stop)
        step.slots += slots_between(stream.pages, start, stop, page_size)
    step.runs.append(PagedRun(row, stop - start, stop, stream.pages, path))
    if run.samples:
        step.wanted.append(row + stop - start - 1)
        step.streams.append(stream)


def _add_label_run(step: PagedStep, row: int, run: StreamRun, base: int, path: tuple[int, ...], page_size: int) -> None:
    """Tail and first chain as one run; each further chain as one of its own, below the tail and the tree's trunk."""
    stream, start, labels = run.stream, run.start, run.stream.question.labels
    assert labels is not None
    laid = stream.question.label_pages(page_size)
    below: tuple[int, ...] | None = None
    for piece in laid.pieces(start, run.stop):
        pages = stream.pages[piece.page : piece.last_page]
        if piece.above and below is None:
            below = (*path, len(step.nodes))
            step.nodes.append(PagedNode(piece.above, stream.pages))
            step.settled = False
        above = below if piece.above else path
        assert above is not None
        step.runs.append(PagedRun(row + piece.start - start, piece.stop - piece.start, piece.length, pages, above))
        step.slots += slots_between(pages, piece.start - piece.first, piece.length, page_size)
    step.token_ids += [stream.private_token(i) for i in range(start, run.stop)]
    step.positions += [base + stream.private_depth(i) for i in range(start, run.stop)]
    for index in range(max(start, laid.tail - 1), run.stop):
        if labels.asked[index - laid.tail + 1]:
            step.label_rows[len(step.wanted)] = index - laid.tail + 1
            step.wanted.append(row + index - start)
            step.streams.append(stream)


def _path(step: PagedStep, nodes: list[PrefixNode] | tuple[PrefixNode, ...], index: dict[int, int]) -> tuple[int, ...]:
    for node in nodes:
        if id(node) not in index:
            index[id(node)] = len(step.nodes)
            step.nodes.append(PagedNode(len(node.token_ids), node.pages))
    return tuple(index[id(node)] for node in nodes)


def slots_between(pages: list[int], start: int, stop: int, page_size: int) -> list[int]:
    """The slots of tokens [start, stop) that lie in `pages`."""
    return [pages[i // page_size] * page_size + i % page_size for i in range(start, stop)]
