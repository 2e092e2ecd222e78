"""From a step's plan to tensors: the one place where host lists become model inputs and attention items.

Builds on the CPU whatever the device is; the model moves the few tensors it needs. Rows stand in the plan's order. Knows nothing of
weights, sampling or memory: slots are numbers here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from askmany.engine.label_pages import LabelPages
from askmany.engine.request import Stream
from askmany.engine.step import MaskedRun, PrefixChunk, StepPlan, StreamRun
from askmany.kernels.layout import MaskedBatch, MaskedItem, PrivateItem, SharedItem, SplitBatch

if TYPE_CHECKING:
    from askmany.engine.prefix_tree import PrefixNode


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row whose logits are asked for label tokens: row `row` of the stream's label trie (0: the question's last token)."""

    stream: Stream
    row: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step as tensors on the CPU: T rows, of which N ask for a token and then M for the log-probabilities of label tokens."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    store_slots: Tensor  # [T] int64, where each row's K and V go
    attention: SplitBatch | MaskedBatch
    sampled_rows: Tensor  # [N + M] int64
    sampled_streams: tuple[Stream, ...]  # N
    scored: tuple[ScoredRow, ...] = ()  # M
    prefix_rows: int = 0  # the first so many rows feed prefixes, the others streams


def build_batch(plan: StepPlan, page_size: int, slot_count: int) -> StepBatch:
    """The tensors of `plan` over a pool of `slot_count` slots in pages of `page_size`."""
    builder: _SplitBuilder | _MaskedBuilder = _MaskedBuilder(page_size, slot_count) if plan.masked else _SplitBuilder(page_size)
    for chunk in plan.chunks:
        builder.add_chunk(chunk)
    if isinstance(builder, _SplitBuilder):
        for run in plan.runs:
            builder.add_run(run)
    else:
        for masked in plan.masked:
            builder.add_masked(masked)
    return builder.rows.batch(builder.attention())


def page_slots(pages: list[int], count: int, page_size: int) -> Tensor:
    """[count] int64: the slots of the first `count` tokens that lie in `pages`."""
    first = torch.tensor(pages[: -(-count // page_size)], dtype=torch.int64)[:, None] * page_size
    return (first + torch.arange(page_size)).flatten()[:count]


@dataclass(slots=True)
class _Rows:
    """The rows gathered so far."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    store_slots: list[Tensor] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    sampled_streams: list[Stream] = field(default_factory=list)
    scored_rows: list[int] = field(default_factory=list)
    scored: list[ScoredRow] = field(default_factory=list)
    prefix_rows: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def sample(self, row: int, stream: Stream) -> None:
        self.sampled_rows.append(row)
        self.sampled_streams.append(stream)

    def score(self, row: int, stream: Stream, index: int) -> None:
        """Row `row` fed private token `index` of a stream with labels; most tail tokens ask for nothing."""
        assert stream.question.labels is not None
        trie_row = index - len(stream.question.token_ids) + 1
        if trie_row >= 0 and stream.question.labels.asked[trie_row]:
            self.scored_rows.append(row)
            self.scored.append(ScoredRow(stream, trie_row))

    def batch(self, attention: SplitBatch | MaskedBatch) -> StepBatch:
        return StepBatch(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            positions=torch.tensor(self.positions, dtype=torch.int64),
            store_slots=torch.cat(self.store_slots),
            attention=attention,
            sampled_rows=torch.tensor(self.sampled_rows + self.scored_rows, dtype=torch.int64),
            sampled_streams=tuple(self.sampled_streams),
            scored=tuple(self.scored),
            prefix_rows=self.prefix_rows,
        )


class _Builder:
    """What both layouts share: rows, and the slots of prefix nodes (looked up once a step)."""

    def __init__(self, page_size: int) -> None:
        self.rows = _Rows()
        self.page_size = page_size
        self._node_slots: dict[int, Tensor] = {}

    def node_slots(self, node: PrefixNode) -> Tensor:
        found = self._node_slots.get(id(node))
        if found is None:
            found = self._node_slots[id(node)] = page_slots(node.pages, len(node.token_ids), self.page_size)
        return found

    def feed_chunk(self, chunk: PrefixChunk) -> Tensor:
        """Append a chunk's rows; the node's slots up to the chunk's end."""
        node = chunk.node
        slots = self.node_slots(node)[: chunk.stop]
        self.rows.token_ids += node.token_ids[chunk.start : chunk.stop]
        self.rows.positions += range(node.start + chunk.start, node.start + chunk.stop)
        self.rows.store_slots.append(slots[chunk.start :])
        self.rows.prefix_rows += chunk.stop - chunk.start
        return slots


class _SplitBuilder(_Builder):
    """Items of the split layout: a private item for each chunk and run, one shared item for each node with rows below it."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._private: list[PrivateItem] = []
        self._below: dict[int, list[Tensor]] = defaultdict(list)
        self._nodes: dict[int, PrefixNode] = {}

    def add_chunk(self, chunk: PrefixChunk) -> None:
        start = len(self.rows)
        slots = self.feed_chunk(chunk)
        self._add_item(start, slots, _ancestors(chunk.node))

    def add_run(self, run: StreamRun) -> None:
        stream, start = run.stream, len(self.rows)
        prefix_tokens = stream.document.document.prefix_tokens
        self.rows.token_ids += [stream.private_token(i) for i in range(run.start, run.stop)]
        self.rows.positions += [prefix_tokens + stream.private_depth(i) for i in range(run.start, run.stop)]
        if stream.question.labels:
            self._add_label_run(run, start, stream.question.label_pages(self.page_size))
            return
        slots = page_slots(stream.pages, run.stop, self.page_size)
        self.rows.store_slots.append(slots[run.start :])
        self._add_item(start, slots, stream.document.path)
        if run.samples:
            self.rows.sample(len(self.rows) - 1, stream)

    def _add_label_run(self, run: StreamRun, start: int, laid: LabelPages) -> None:
        """Tail and first chain as one item; each further chain as one of its own, which sees the tail and the tree's trunk before it."""
        stream = run.stream
        for piece in laid.pieces(run.start, run.stop):
            own = page_slots(stream.pages[piece.page : piece.last_page], piece.length, self.page_size)
            above = page_slots(stream.pages, piece.above, self.page_size)
            self._private.append(PrivateItem(start + piece.start - run.start, piece.stop - piece.start, torch.cat([above, own])))
            self.rows.store_slots.append(own[piece.start - piece.first :])
        self._add_below(start, stream.document.path)
        for index in range(run.start, run.stop):
            self.rows.score(start + index - run.start, stream, index)

    def attention(self) -> SplitBatch:
        """Shared items from the top of the tree down, so that every row is merged in the order of its path."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.start)
        shared = tuple(SharedItem(torch.cat(self._below[id(node)]), self.node_slots(node)) for node in nodes)
        return SplitBatch(shared, tuple(self._private))

    def _add_item(self, start: int, slots: Tensor, above: list[PrefixNode]) -> None:
        self._private.append(PrivateItem(start, len(self.rows) - start, slots))
        self._add_below(start, above)

    def _add_below(self, start: int, above: list[PrefixNode]) -> None:
        """The rows from `start` on see all of these nodes."""
        rows = torch.arange(start, len(self.rows))
        for node in above:
            self._nodes[id(node)] = node
            self._below[id(node)].append(rows)


class _MaskedBuilder(_Builder):
    """Items of the interleaved layout: one for each chunk and each request; the stream ids of a request's row are its own numbers."""

    def __init__(self, page_size: int, slot_count: int) -> None:
        super().__init__(page_size)
        self._items: list[MaskedItem] = []
        self._q_sid: list[int] = []
        self._slot_sid = torch.full((slot_count,), -1, dtype=torch.int32)

    def add_chunk(self, chunk: PrefixChunk) -> None:
        start = len(self.rows)
        slots = self.feed_chunk(chunk)
        self._q_sid += [-1] * (chunk.stop - chunk.start)
        self._add_item(start, _ancestors(chunk.node), slots)

    def add_masked(self, run: MaskedRun) -> None:
        request, start = run.request, len(self.rows)
        row_slots = page_slots(request.pages, run.start + len(run.entries), self.page_size)
        sids = [sid for sid, _ in run.entries]
        self._slot_sid[row_slots] = torch.tensor(request.sids[: run.start] + sids, dtype=torch.int32)
        prefix_tokens = request.document.document.prefix_tokens
        self.rows.token_ids += [request.streams[sid].private_token(index) for sid, index in run.entries]
        self.rows.positions += [prefix_tokens + index for _, index in run.entries]
        self.rows.store_slots.append(row_slots[run.start :])
        self._q_sid += sids
        self._add_item(start, request.document.path, row_slots)
        for entry in run.samples:
            sid, index = run.entries[entry]
            stream = request.streams[sid]
            if stream.question.labels:
                self.rows.score(start + entry, stream, index)
            else:
                self.rows.sample(start + entry, stream)

    def attention(self) -> MaskedBatch:
        return MaskedBatch(tuple(self._items), torch.tensor(self._q_sid, dtype=torch.int32), self._slot_sid)

    def _add_item(self, start: int, above: list[PrefixNode], own_slots: Tensor) -> None:
        slots = torch.cat([*(self.node_slots(node) for node in above), own_slots])
        self._items.append(MaskedItem(start, len(self.rows) - start, slots))


def _ancestors(node: PrefixNode) -> list[PrefixNode]:
    """The nodes above `node`, topmost first."""
    above: list[PrefixNode] = []
    parent = node.parent
    while parent is not None:
        above.append(parent)
        parent = parent.parent
    return above[::-1]
