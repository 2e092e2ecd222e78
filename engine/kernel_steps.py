"""Steps on a device with kernels: which plans it can run, through a graph or not, and how the results come back without a wait.

`launch` leaves the device working; `Launched.wait` brings tokens home. A step may feed on tokens that the one before drew and the host has
not seen. Knows layouts only by what their `StepSpace`s are made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from askmany.engine.errors import EngineError
from askmany.engine.graphs import Bucket, Capturer, GraphRunner, Work
from askmany.engine.idle import DeviceClock
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import RowModel
from askmany.engine.paged import PagedRows, can_page
from askmany.engine.request import PENDING, Stream
from askmany.engine.sampler import Drawn
from askmany.engine.space import StepSpace
from askmany.engine.space_makers import SpaceMaker
from askmany.engine.step import StepPlan


@dataclass(slots=True)
class Launched:
    """A step under way: W rows asked for logits, on behalf of `streams`."""

    streams: tuple[Stream, ...]
    space: StepSpace
    tokens: Tensor  # [W] int64 on the host, filled when `done`
    figures: Tensor  # [2, W] fp32: log-probabilities, margins
    done: torch.cuda.Event | None

    @property
    def logits(self) -> Tensor:
        """[W, V] on the device, until the next step is launched."""
        assert self.space.logits is not None
        return self.space.logits[: len(self.streams)]

    def wait(self) -> list[Drawn]:
        """The likeliest token of every row."""
        if self.done is not None:
            self.done.synchronize()
        values = zip(self.tokens.tolist(), *self.figures.tolist(), strict=True)
        return [Drawn(token, logprob, margin) for token, logprob, margin in values]


class KernelSteps:
    """Runs plans of one layout over `pool`. Without a `capturer` nothing is captured."""

    def __init__(self, model: RowModel, pool: KVPool, maker: SpaceMaker, context_tokens: int, capturer: Capturer | None) -> None:
        self.clock = DeviceClock(pool.device)
        self._pool, self._maker, self._context_tokens = pool, maker, context_tokens
        self._name = model.name
        self._drawn = torch.zeros(maker.most_wanted, dtype=torch.int64, device=pool.device)
        self._places: dict[int, int] = {}  # by stream id: where the last launch drew its token
        self._read: tuple[StepPlan, PagedRows] | None = None
        self._last: Launched | None = None
        self._eager: StepSpace | None = None
        self._graphs: GraphRunner | None = None
        if capturer is not None:
            self._graphs = GraphRunner(maker.buckets, self._make, maker.fits, capturer, maker.empty, self._drawn)

    @property
    def capture_s(self) -> dict[Bucket, float]:
        """Seconds that each graph took to capture."""
        return dict(self._graphs.capture_s) if self._graphs else {}

    def covers(self, plan: StepPlan) -> bool:
        """Whether the kernels run this plan; to be asked before each `launch`. What they do not run, others must, at once."""
        if not can_page(plan):
            return False
        step = self._maker.read(plan)
        self._read = (plan, step)
        if self._maker.fits_eager(step):
            return True
        self._maker.stored_elsewhere(step)
        return False

    def launch(self, plan: StepPlan) -> Launched:
        """Start a step that is covered. Raises EngineError for a position beyond the context."""
        assert self._read is not None, "launch follows covers"
        assert self._read[0] is plan, "launch follows covers"
        step, self._read = self._read[1], None
        self._check_positions(step)
        feeds = self._feeds(step)
        space, work = (self._graphs.load(step, feeds) if self._graphs else None) or self._load_eagerly(step, feeds)
        with self.clock.step():
            work()
        self._places = {stream.stream_id: place for place, stream in enumerate(step.streams)}
        self._last = self._bring_home(step, space)
        return self._last

    def pending_token(self, stream: Stream) -> int:
        """The token that the last launch drew for a stream; waits for it."""
        assert self._last is not None
        return int(self._last.wait()[self._places[stream.stream_id]].token_id)

    def warm(self, row_counts: Iterable[int], tail_rows: Iterable[int] = ()) -> None:
        """Capture what decode steps of so many rows need, and steps with so many rows of question tails."""
        if self._graphs:
            decoding = [self._maker.sample(rows, rows, rows) for rows in row_counts]
            asking = [self._maker.sample(rows, 1, rows) for rows in tail_rows]
            with torch.inference_mode():
                self._graphs.warm([*decoding, *asking])

    def warm_run(self, rows: int, document_rows: int) -> None:
        """Capture what a run comes by whose steps have up to `rows` streams, up to `document_rows` of them at one document: decode steps
        of every size, since streams end one by one, and steps that bring in the next questions."""
        if self._graphs:
            counts = [bucket.rows for bucket in self._maker.buckets if bucket.decode]
            decoding = [count for count in counts if count <= min((c for c in counts if c >= rows), default=rows)]
            mixed = [bucket.rows for bucket in self._maker.buckets if not bucket.decode]
            with torch.inference_mode():
                steps = [self._maker.sample(count, count, min(count, document_rows)) for count in decoding]
                self._graphs.warm([*steps, *(self._maker.sample(count, 1, count) for count in mixed)])

    def check(self) -> None:
        """Wait for the device; RuntimeError if a step did not fit its work list."""
        if self._graphs:
            self._graphs.check()
        if self._eager:
            self._eager.layout.check()

    def _make(self, bucket: Bucket, step: PagedRows) -> StepSpace:
        with torch.inference_mode(False):  # buffers that live longer than a step
            return self._maker.space(bucket, step, self._drawn)

    def _load_eagerly(self, step: PagedRows, feeds: list[int]) -> tuple[StepSpace, Work]:
        if self._eager is None:
            with torch.inference_mode(False):
                self._eager = self._maker.eager_space(self._drawn)
        self._eager.load(step, feeds)
        return self._eager, partial(self._eager.compute, step.rows, len(step.wanted))

    def _feeds(self, step: PagedRows) -> list[int]:
        feeds = [-1] * step.rows
        if PENDING in step.token_ids:
            for row, stream in zip(step.wanted, step.streams, strict=True):
                if step.token_ids[row] == PENDING:
                    feeds[row] = self._places[stream.stream_id]
        return feeds

    def _bring_home(self, step: PagedRows, space: StepSpace) -> Launched:
        count, out = len(step.wanted), space.greedy.out
        if self._pool.device.type != "cuda":
            return Launched(tuple(step.streams), space, out.tokens[:count].clone(), _figures(space, count).clone(), None)
        tokens = torch.empty(count, dtype=torch.int64, pin_memory=True)
        figures = torch.empty(2, count, dtype=torch.float32, pin_memory=True)
        tokens.copy_(out.tokens[:count], non_blocking=True)
        figures.copy_(_figures(space, count), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Launched(tuple(step.streams), space, tokens, figures, done)

    def _check_positions(self, step: PagedRows) -> None:
        last = max(step.positions, default=0)
        if last >= self._context_tokens:
            raise EngineError(f"model {self._name}: position {last} lies beyond its context of {self._context_tokens} tokens")


def _figures(space: StepSpace, count: int) -> Tensor:
    return torch.stack([space.greedy.out.logprobs[:count], space.greedy.out.margins[:count]])
