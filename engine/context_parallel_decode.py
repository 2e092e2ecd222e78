"""One rank's part in decode steps that are captured: all rows are single tokens of streams that live on one rank each, below one path.

The leader says which streams take a step, in a few numbers a row; what a rank keeps between steps are the places of its own streams' keys,
and, for each path, a runner whose graphs hold the document's attention. Every rank does this alike, so that all capture and replay at
the same step. Imports Triton. Letters: R rows of the step, N ranks, P rows of a rank's space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from askmany.engine.context_parallel_layout import GroupLayout, GroupSpace
from askmany.engine.context_parallel_slots import SlotMap
from askmany.engine.graphs import Bucket, Capturer, GraphRunner, row_buckets
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import RowModel
from askmany.engine.paged import PagedRun, PagedStep
from askmany.engine.request import PENDING
from askmany.engine.space import StepSpace
from askmany.engine.space_makers import processors_of
from askmany.engine.split_space import SplitLayout, SplitSize
from askmany.engine.workspaces import WorkRules
from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.layout import SharedItem, SplitBatch
from askmany.kernels.plan import Chunking
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.stream_attention import Partials
from askmany.kernels.tiles import AttentionShape

PATHS = 2  # paths whose graphs are kept
KNOWN_PATHS = 8  # whose slots the ranks remember
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DecodeMessage:
    """What the leader tells all ranks of a step. A row's token may be PENDING: the one that its stream drew in the last such step.

    `path` names the prefix nodes that all rows read; `path_slots` are their global slots, sent when the path is a new one. `fresh` are the
    slots of all stored tokens of streams that the ranks have no places of.
    """

    streams: Ints  # [R] ids
    token_ids: Ints  # [R]
    positions: Ints  # [R]
    slots: Ints  # [R] global
    path: int
    path_slots: Ints | None
    fresh: Mapping[int, Ints]
    freed: Ints  # global slots that hold nothing any more


@dataclass(slots=True)
class _Resident:
    """A stream: its home, and there the places of its keys."""

    home: int
    places: list[int]


@dataclass(slots=True)
class _Path:
    runner: GraphRunner
    version: int  # of the map of slots, when the path lay where `lies` says
    lies: Tensor  # [2, S] owner and place of each of its slots


@dataclass(slots=True)
class RankDecode:
    """Runs such steps on one rank. `most_rows` bounds the rows of a step, `most_keys` the private keys of a rank's streams."""

    model: RowModel
    pool: KVPool
    slots: SlotMap
    group: RankGroup
    blocks: BlockAttention
    capturer: Capturer
    most_rows: int
    most_keys: int
    _sent_bytes: int = 0
    _residents: dict[int, _Resident] = field(default_factory=dict)
    _feeds: dict[int, int] = field(default_factory=dict)  # by stream of this rank: its row in the last step
    _paths: dict[int, _Path] = field(default_factory=dict)  # the least recently used first
    _path_slots: dict[int, Tensor] = field(default_factory=dict)
    _drawn: Tensor = field(init=False)
    _partials: Partials | None = None

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            self._drawn = torch.zeros(self.most_rows, dtype=torch.int64, device=self.pool.device)

    def run(self, message: DecodeMessage) -> tuple[GroupSpace, Ints, Ints]:
        """Start the step: the space that has its results, and the rank and place of each row. Collective."""
        self.slots.release(torch.from_numpy(message.freed))
        if message.path_slots is not None:
            self._path_slots[message.path] = torch.from_numpy(message.path_slots)
            forget_oldest(self._path_slots)
        streams: list[int] = message.streams.tolist()
        self._residents = {stream: self._resident(stream, message) for stream in streams}
        homes = np.array([self._residents[stream].home for stream in streams], dtype=np.int64)
        step, places = self._step(message, streams, homes)
        runner = self._runner(message.path, step)
        loaded = runner.load(step, self._fed(message, streams, homes))
        assert loaded is not None, "a step fits no bucket"
        space, replay = loaded
        replay()
        mine = homes == self.group.rank
        self._feeds = dict(zip(message.streams[mine].tolist(), places[mine].tolist(), strict=True))
        assert isinstance(space, GroupSpace)
        self.group.traffic.take()
        self._sent_bytes += space.sent_bytes
        return space, homes, places

    def take_sent_bytes(self) -> int:
        """What this rank sent to others since the last call."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def _resident(self, stream: int, message: DecodeMessage) -> _Resident:
        fresh = message.fresh.get(stream)
        if fresh is None:
            return self._residents[stream]
        slots = torch.from_numpy(fresh)
        home = int(self.slots.owner[slots[0]])
        return _Resident(home, self.slots.seen_at(home, slots).tolist() if home == self.group.rank else [])

    def _step(self, message: DecodeMessage, streams: list[int], homes: Ints) -> tuple[PagedStep, Ints]:
        """This rank's rows, padded to as many as the fullest rank has; the place of every row on its rank."""
        places = np.zeros(len(streams), dtype=np.int64)
        step = PagedStep()
        most = 0
        for rank in range(self.slots.ranks):
            rows = np.flatnonzero(homes == rank)
            places[rows] = np.arange(len(rows))
            most = max(most, len(rows))
            stored = self.slots.store(torch.from_numpy(message.slots[rows]), rank).tolist()
            if rank != self.group.rank:
                continue
            step.token_ids, step.positions, step.slots = message.token_ids[rows].tolist(), message.positions[rows].tolist(), stored
            for row, (index, place) in enumerate(zip(rows.tolist(), stored, strict=True)):
                held = self._residents[streams[index]].places
                held.append(place)
                step.runs.append(PagedRun(row, 1, len(held), held, ()))
        padding = most - len(step.token_ids)
        step.token_ids += [0] * padding
        step.positions += [0] * padding
        step.slots += [-1] * padding
        step.wanted = list(range(most))
        return step, places

    def _fed(self, message: DecodeMessage, streams: list[int], homes: Ints) -> list[int]:
        """For each own row whose token is pending, the row that drew it."""
        mine = np.flatnonzero(homes == self.group.rank).tolist()
        tokens = message.token_ids
        feeds = [self._feeds[streams[index]] if tokens[index] == PENDING else -1 for index in mine]
        most = int(np.bincount(homes, minlength=self.slots.ranks).max())
        return feeds + [-1] * (most - len(feeds))

    def _runner(self, path: int, step: PagedStep) -> GraphRunner:
        """The path's graphs; a bucket is captured at once where none serves the step, since no rank could run it otherwise."""
        before = self._paths.pop(path, None)  # is let go of after the capture: PyTorch refuses a memory pool that no graph uses any more
        found = before if before and self._stays(before, path) else self._new_path(path)
        if not found.runner.ready(step):
            found.runner.warm([step])
        self._paths[path] = found
        for old in list(self._paths)[:-PATHS]:
            del self._paths[old]
        return found.runner

    def _stays(self, known: _Path, path: int) -> bool:
        """Whether the path lies where its graphs read it, although something may have moved."""
        if known.version != self.slots.version:
            if not torch.equal(known.lies, self._lies(path)):
                return False
            known.version = self.slots.version
        return True

    def _lies(self, path: int) -> Tensor:
        return torch.stack(self.slots.owned(self._path_slots[path]))

    def _new_path(self, path: int) -> _Path:
        slots = self._path_slots[path]
        buckets = [Bucket(rows, rows, True) for rows in row_buckets(self.most_rows)]
        runner = GraphRunner(
            buckets, lambda bucket, step: self._space(bucket, slots), lambda bucket, step: True, self.capturer, PagedStep(), self._drawn
        )
        return _Path(runner, self.slots.version, self._lies(path))

    def _space(self, bucket: Bucket, path_slots: Tensor) -> StepSpace:
        kv, rows = self.pool.shape, bucket.rows * self.slots.ranks
        shape = AttentionShape(self.model.q_heads, kv.kv_heads, kv.head_dim, 1, kv.dtype)
        with torch.inference_mode(False):
            own = SplitLayout(shape, self._size(bucket.rows), self.pool.device, partials=self._workspace(shape))
            mine = path_slots[self.slots.owner[path_slots] == self.group.rank]
            keys = self.slots.seen_at(self.group.rank, mine)
            document = self.blocks.prepare(SplitBatch((SharedItem(torch.arange(rows), keys),), ()), rows) if len(keys) else None
            return GroupSpace(self.model, self.pool, GroupLayout(own, document, self.group), bucket.rows, self._drawn, self.group)

    def _size(self, rows: int) -> SplitSize:
        """Rows of streams' own keys, no node."""
        return SplitSize(rows, rows, 1, self.most_keys)

    def _workspace(self, shape: AttentionShape) -> Partials:
        """Of all buckets together: their steps follow one another on one stream."""
        if self._partials is None:
            rules = WorkRules(shape, Chunking(), self.most_keys, self.most_rows, processors_of(self.pool.device))
            most = rules.most_partials(map(self._size, row_buckets(self.most_rows)))
            self._partials = Partials(most, shape.head_dim, self.pool.device)
        return self._partials


def forget_oldest(paths: dict[int, Any]) -> None:
    """Keep the paths that were told last, alike on the leader and on every rank."""
    for number in list(paths)[:-KNOWN_PATHS]:
        del paths[number]
