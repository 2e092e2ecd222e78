"""Steps on a device with kernels: which plans it can run, through a graph or not, and how the results come back without a wait.

`launch` leaves the device working; `hold` says what some rows may hold, once that is known; `bring_home` sends the tokens, and
`Launched.wait` waits for them. A step may feed on tokens that the one before drew and the host has not seen. Knows layouts only by what
their `StepSpace`s are made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from askmany.engine.errors import EngineError
from askmany.engine.graphs import Bucket, Capturer, GraphRunner, Work
from askmany.engine.held_rows import HeldRows
from askmany.engine.idle import DeviceClock
from askmany.engine.kv_pool import KVPool
from askmany.engine.masks import Masks
from askmany.engine.model import RowModel
from askmany.engine.paged import PagedRows, can_page
from askmany.engine.request import PENDING, Stream
from askmany.engine.sampler import Drawn
from askmany.engine.space import StepSpace
from askmany.engine.space_makers import SpaceMaker
from askmany.engine.step import StepPlan
from askmany.kernels.greedy import unpack


@dataclass(slots=True)
class Launched:
    """A step under way: W rows asked for logits, on behalf of `streams`, `label_rows` as in `PagedRows`. What is on the host is there from
    `KernelSteps.bring_home` on."""

    streams: tuple[Stream, ...]
    space: StepSpace
    label_rows: dict[int, int] = field(default_factory=dict)
    home: Tensor | None = None  # on the host, as `GreedyPick.packed`; filled when `done`
    done: torch.cuda.Event | None = None
    _read: list[Drawn] | None = None

    @property
    def logits(self) -> Tensor:
        """[W, V] on the device, until the next step is launched."""
        assert self.space.logits is not None
        return self.space.logits[: len(self.streams)]

    def wait(self) -> list[Drawn]:
        """The likeliest token of every row, of a held row among those that it may hold; read once, however often it is asked for."""
        if self._read is None:
            if self.done is not None:
                self.done.synchronize()
            self._read = [Drawn(token, logprob, margin) for token, logprob, margin in self._values()]
        return self._read

    def _values(self) -> Iterable[tuple[int, float, float]]:
        """Token, log-probability and margin of every row."""
        assert self.home is not None, "nothing was sent home"
        found, count = unpack(self.home), len(self.streams)
        return zip(*(values[:count].tolist() for values in (found.tokens, found.logprobs, found.margins)), strict=True)


class KernelSteps:
    """Runs plans of one layout over `pool`. Without a `capturer` nothing is captured."""

    def __init__(self, model: RowModel, pool: KVPool, maker: SpaceMaker, context_tokens: int, capturer: Capturer | None) -> None:
        self.clock = DeviceClock(pool.device)
        self._pool, self._maker, self._context_tokens = pool, maker, context_tokens
        self._name, self._vocabulary = model.name, model.vocabulary
        self._drawn = torch.zeros(maker.most_wanted, dtype=torch.int64, device=pool.device)
        self._places: dict[int, int] = {}  # by stream id: where the last launch drew its token
        self._read: tuple[StepPlan, PagedRows] | None = None
        self._last: Launched | None = None
        self._eager: StepSpace | None = None
        self.eager_steps = self.held_steps = 0  # steps without a graph, and with held rows, so far
        self._held: HeldRows | None = None  # from the first step with a held row on
        self._graphs: GraphRunner | None = None
        if capturer is not None:
            make = partial(_graph_space, maker, self._drawn)  # not bound to these steps: what holds a KV pool goes with its last reference
            self._graphs = GraphRunner(maker.buckets, make, maker.fits, capturer, maker.empty, self._drawn)

    @property
    def capture_s(self) -> dict[Bucket, float]:
        """Seconds that each graph took to capture."""
        return dict(self._graphs.capture_s) if self._graphs else {}

    @property
    def replays(self) -> dict[Bucket, int]:
        """Steps that each graph has run."""
        return dict(self._graphs.loads) if self._graphs else {}

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
        self._last = Launched(tuple(step.streams), space, step.label_rows)
        return self._last

    @property
    def mask_room(self) -> Tensor:
        """[most W, ceil(V / 32)] int32 on the host: where masks for `hold` are to be written, once the last step's have gone over."""
        if self._held is None:
            with torch.inference_mode(False):
                self._held = HeldRows(self._maker.most_wanted, self._vocabulary, self._pool.device)
        return self._held.room

    def hold(self, launched: Launched, masks: Masks) -> None:
        """The rows of `masks`, which lie in `mask_room`, draw the likeliest token that they may hold; to be called before the next launch
        and before the step's tokens are sent home. Does not wait."""
        assert self._held is not None, "masks lie in mask_room"
        self.held_steps += 1
        with self.clock.step():
            self._held.pick(masks, launched.logits, launched.space.greedy.out, self._drawn)

    def bring_home(self, launched: Launched) -> None:
        """Send the step's tokens to the host. Does not wait."""
        packed = launched.space.greedy.packed
        if packed.device.type != "cuda":
            launched.home = packed.clone()
            return
        launched.home = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        launched.home.copy_(packed, non_blocking=True)
        launched.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.done.record()

    def pending_token(self, stream: Stream) -> int:
        """The token that the last launch drew for a stream; waits for it."""
        assert self._last is not None
        return int(self._last.wait()[self._places[stream.stream_id]].token_id)

    def warm(self, row_counts: Iterable[int], tail_rows: Iterable[int] = (), document_tokens: int | None = None) -> None:
        """Capture what decode steps of so many rows at a document of about `document_tokens` tokens need, and steps with so many rows of
        question tails."""
        if self._graphs:
            decoding = [self._maker.sample(rows, rows, rows, document_tokens) for rows in row_counts]
            asking = [self._maker.sample(rows, 1, rows, document_tokens) for rows in tail_rows]
            with torch.inference_mode():
                self._graphs.warm([*decoding, *asking])

    def warm_run(self, rows: int, document_rows: int, document_tokens: int | None = None) -> None:
        """Capture what a run comes by whose steps have up to `rows` streams, up to `document_rows` of them at one document (of about
        `document_tokens` tokens): decode steps of every size, since streams end one by one, and steps that bring in the next questions."""
        if self._graphs:
            counts = [bucket.rows for bucket in self._maker.buckets if bucket.decode]
            decoding = [count for count in counts if count <= min((c for c in counts if c >= rows), default=rows)]
            mixed = [bucket.rows for bucket in self._maker.buckets if not bucket.decode]
            with torch.inference_mode():
                steps = [self._maker.sample(count, count, min(count, document_rows), document_tokens) for count in decoding]
                self._graphs.warm([*steps, *(self._maker.sample(count, 1, count, document_tokens) for count in mixed)])

    def check(self) -> None:
        """Wait for the device; RuntimeError if a step did not fit its work list."""
        if self._graphs:
            self._graphs.check()
        if self._eager:
            self._eager.layout.check()

    def _load_eagerly(self, step: PagedRows, feeds: list[int]) -> tuple[StepSpace, Work]:
        if self._eager is None:
            with torch.inference_mode(False):
                self._eager = self._maker.eager_space(self._drawn)
        self._eager.load(step, feeds)
        self.eager_steps += 1
        return self._eager, partial(self._eager.compute, step.rows, len(step.wanted))

    def _feeds(self, step: PagedRows) -> list[int]:
        feeds = [-1] * step.rows
        if PENDING in step.token_ids:
            for row, stream in zip(step.wanted, step.streams, strict=True):
                if step.token_ids[row] == PENDING:
                    feeds[row] = self._places[stream.stream_id]
        return feeds

    def _check_positions(self, step: PagedRows) -> None:
        last = max(step.positions, default=0)
        if last >= self._context_tokens:
            raise EngineError(f"model {self._name}: position {last} lies beyond its context of {self._context_tokens} tokens")


def _graph_space(maker: SpaceMaker, drawn: Tensor, bucket: Bucket, step: PagedRows) -> StepSpace:
    with torch.inference_mode(False):  # buffers that live longer than a step
        return maker.space(bucket, step, drawn)
