"""The leader's side of captured decode steps: which plans are such steps, what the ranks are told, and how tokens come home without a wait.

What `TorchExecutor` calls; the steps that it does not cover run by the group's other way, on host tensors. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from askmany.engine.context_parallel import RankModel
from askmany.engine.context_parallel_decode import DecodeMessage, Ints, forget_oldest
from askmany.engine.context_parallel_layout import read_results
from askmany.engine.idle import DeviceClock
from askmany.engine.kernel_steps import Launched
from askmany.engine.masks import Masks
from askmany.engine.prefix_tree import PrefixNode
from askmany.engine.request import Stream
from askmany.engine.slots import page_slots_array
from askmany.engine.step import StepPlan


@dataclass(slots=True)
class GroupLaunched(Launched):
    """A step under way on all ranks: the rank and place of each stream's row; `results` as `read_results` takes them, on the host once
    they were sent home and `done`."""

    results: Tensor = field(default_factory=lambda: torch.zeros(0))
    ranks: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    places: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def _values(self) -> Iterable[tuple[int, float, float]]:
        index = torch.from_numpy(self.ranks), torch.from_numpy(self.places)
        tokens, logprobs, margins = (figure[index].tolist() for figure in read_results(self.results))
        return zip(tokens, logprobs, margins, strict=True)


class GroupSteps:
    """Decode steps of the whole group, led from here. `take_freed` as in `ContextParallelModel`."""

    def __init__(self, rank: RankModel, page_size: int, take_freed: Callable[[], Tensor]) -> None:
        assert rank.decode is not None
        self.clock = DeviceClock(rank.pool.device)
        self._rank, self._decode, self._page_size, self._take_freed = rank, rank.decode, page_size, take_freed
        self._known: dict[int, tuple[int, int]] = {}  # by stream id: its home, and the tokens whose places the ranks know
        self._paths: dict[int, tuple[list[PrefixNode], list[list[int]]]] = {}  # that the ranks know, by number: nodes and their pages
        self._last: GroupLaunched | None = None

    def covers(self, plan: StepPlan) -> bool:
        """Whether this is a step of single tokens, greedy, of streams at home below one path, with room for all; changes nothing."""
        runs = plan.runs
        if plan.chunks or plan.masked or not runs or len(runs) > self._decode.most_rows:
            return False
        path = runs[0].stream.document.path
        if not path:
            return False
        counts = [0] * self._decode.slots.ranks
        keys = [0] * self._decode.slots.ranks
        for run in runs:
            document = run.stream.document
            if run.stop - run.start != 1 or not run.samples or not _is_greedy(run.stream):
                return False
            if document is not runs[0].stream.document and document.path != path:
                return False
            home = self._home(run.stream, run.start)
            if home < 0:
                return False
            counts[home] += 1
            keys[home] += run.stop
        room = all(self._decode.slots.free(rank) >= count for rank, count in enumerate(counts))
        return room and max(keys) <= self._decode.most_keys

    def launch(self, plan: StepPlan) -> GroupLaunched:
        """Start a step that is covered, on all ranks."""
        message = self._message(plan)
        self._rank.groups.control.broadcast_object(message)
        with self.clock.step():
            space, ranks, places = self._decode.run(message)
        self._rank.note_captured()
        assert space.results is not None
        self._last = GroupLaunched(tuple(run.stream for run in plan.runs), space, results=space.results, ranks=ranks, places=places)
        return self._last

    @property
    def mask_room(self) -> Tensor:
        """No covered step has a row under a grammar."""
        raise AssertionError("a captured step of a group holds no row to a grammar")

    def hold(self, launched: Launched, masks: Masks) -> None:
        """As `mask_room`."""
        raise AssertionError("a captured step of a group holds no row to a grammar")

    def bring_home(self, launched: Launched) -> None:
        """Send the step's tokens to the host. Does not wait."""
        assert isinstance(launched, GroupLaunched)
        results = launched.results
        if results.device.type != "cuda":
            launched.results = results.clone()
            return
        launched.results = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        launched.results.copy_(results, non_blocking=True)
        launched.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.done.record()

    def pending_token(self, stream: Stream) -> int:
        """The token that the last launch drew for a stream; waits for it."""
        assert self._last is not None
        return int(self._last.wait()[self._last.streams.index(stream)].token_id)

    def warm(self, row_counts: Iterable[int], tail_rows: Iterable[int] = (), document_tokens: int | None = None) -> None:
        """Nothing can be captured before there is a document."""

    def warm_run(self, rows: int, document_rows: int, document_tokens: int | None = None) -> None:
        """As `warm`."""

    def check(self) -> None:
        """Nothing to look at beside the results."""

    def _home(self, stream: Stream, stored: int) -> int:
        """The rank that holds all of a stream's keys, -1 for none."""
        known = self._known.get(stream.stream_id)
        if known is not None and known[1] == stored:
            return known[0]
        slots = torch.from_numpy(self._slots(stream, stored))
        home = int(self._decode.slots.owner[slots[0]]) if len(slots) else -1
        return home if home >= 0 and self._decode.slots.holds(home, slots) else -1

    def _message(self, plan: StepPlan) -> DecodeMessage:
        fresh: dict[int, Ints] = {}
        known: dict[int, tuple[int, int]] = {}
        rows: list[tuple[int, int, int, int]] = []
        size = self._page_size
        for run in plan.runs:
            stream, start = run.stream, run.start
            before = self._known.get(stream.stream_id)
            if before is None or before[1] != start:
                fresh[stream.stream_id] = self._slots(stream, start)
                before = self._home(stream, start), start
            known[stream.stream_id] = before[0], start + 1
            slot = stream.pages[start // size] * size + start % size
            rows.append((stream.stream_id, stream.private_token(start), stream.document.document.prefix_tokens + start, slot))
        self._known = known
        path, path_slots = self._path(plan.runs[0].stream.document.path)
        streams, tokens, positions, slots = np.array(rows, dtype=np.int64).T.copy()
        return DecodeMessage(streams, tokens, positions, slots, path, path_slots, fresh, self._take_freed().numpy())

    def _path(self, nodes: list[PrefixNode]) -> tuple[int, Ints | None]:
        """The number of a path, and its slots if the ranks do not know it yet."""
        for number, (held, pages) in self._paths.items():
            if len(held) == len(nodes) and all(a is b and a.pages == p for a, b, p in zip(held, nodes, pages, strict=True)):
                return number, None
        number = max(self._paths, default=-1) + 1
        self._paths[number] = list(nodes), [list(node.pages) for node in nodes]
        forget_oldest(self._paths)
        slots = [page_slots_array(node.pages, len(node.token_ids), self._page_size) for node in nodes]
        return number, np.concatenate(slots).astype(np.int64)

    def _slots(self, stream: Stream, count: int) -> Ints:
        return page_slots_array(stream.pages, count, self._page_size).astype(np.int64)


def _is_greedy(stream: Stream) -> bool:
    question = stream.question
    return question.sampling.temperature <= 0 and question.grammar is None and question.labels is None
