"""The device part of a step: tensors, forward, draw. Implements `step.Executor` with PyTorch.

This is the one place that chooses how a step attends: through the kernels of `steps` where there are any and they cover the plan, else in
PyTorch's own operations (on a CPU, and below prefixes of many parts). A step whose tokens are all the likeliest, or the likeliest that
grammars allow, can be left running (`launch`): the masks follow while the forward pass runs, once the tokens before are known
(`Pending.draw`).

A draw is a function of the stream's seed and its token's index, K and V live in the pool. What must be kept about a stream is kept by its
id in two owners: the state of its grammar (`constraints`) and the label scores that are not complete (`scoring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from askmany.engine.batch import ScoredRow, StepBatch, build_batch
from askmany.engine.constraints import Constraints, hold
from askmany.engine.errors import EngineError
from askmany.engine.kv_pool import KVPool
from askmany.engine.masks import Masks
from askmany.engine.model import StepModel
from askmany.engine.request import PENDING, Stream
from askmany.engine.sampler import Drawn, draw
from askmany.engine.scoring import AskedLabels, LabelScorer, ask_labels
from askmany.engine.step import Sampled, StepPlan

if TYPE_CHECKING:
    from askmany.engine.context_parallel_launch import GroupSteps
    from askmany.engine.kernel_steps import KernelSteps, Launched


class Pending:
    """A step that was launched. `ahead`: the next may be launched before this one is collected, but not before `draw`."""

    def __init__(self, collect: Callable[[], list[Sampled]], ahead: bool, draw: Callable[[], None] | None = None) -> None:
        self.ahead = ahead
        self._collect, self._draw = collect, draw

    def draw(self) -> None:
        """The tokens of all steps before are known: say what depends on them. Does not wait."""
        if self._draw is not None:
            self._draw()
            self._draw = None

    def collect(self) -> list[Sampled]:
        """One `Sampled` for each run that samples, in plan order."""
        self.draw()
        return self._collect()


class TorchExecutor:
    """Runs steps of `model` over `pool`, whose slots are pages of `page_size`. Without `constraints`, no question may have a grammar."""

    def __init__(
        self,
        model: StepModel,
        pool: KVPool,
        page_size: int,
        constraints: Constraints | None = None,
        steps: KernelSteps | GroupSteps | None = None,
        alone: AbstractContextManager[object] | None = None,
    ) -> None:
        """`alone`: held wherever rows of logits are reduced together, to make each row's bits its own; may be entered again and again."""
        self.model = model
        self.pool = pool
        self.page_size = page_size
        self.steps = steps
        self._constraints = constraints
        self._scorer = LabelScorer()
        self._alone = alone or nullcontext()

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One forward pass; one `Sampled` for each run that samples, in plan order. Raises EngineError when device or model fail."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step; `collect` gives what `execute` would. Raises EngineError, as `collect` does."""
        if self.steps is None or not self.steps.covers(plan):
            return self._passes(plan)
        try:
            launched = self.steps.launch(plan)
            asked = self._asked_labels(launched)
            if any(map(_is_hot, launched.streams)):
                return Pending(partial(self._drawn_on_host, plan, launched, asked), ahead=False)
            if any(stream.question.grammar is not None for stream in launched.streams):
                return Pending(partial(self._collect, plan, launched, asked), ahead=True, draw=partial(self._hold, plan, launched))
            self.steps.bring_home(launched)
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        return Pending(partial(self._collect, plan, launched, asked), ahead=True)

    def device_times(self) -> tuple[float, float]:
        """Seconds that a GPU was busy, and idle between steps, so far."""
        if self.steps is None:
            return 0.0, 0.0
        self.steps.clock.collect()
        return self.steps.clock.busy_s, self.steps.clock.idle_s

    def pause(self) -> None:
        """There is no work for now."""
        if self.steps is not None:
            self.steps.clock.pause()

    def release(self, streams: list[Stream]) -> None:
        """Forget grammar states and label scores."""
        self._scorer.release(streams)
        if self._constraints:
            self._constraints.release(streams)

    def _asked_labels(self, launched: Launched) -> AskedLabels | None:
        """What the step says of labels, on its way to the host: there when the step's tokens are."""
        places = [place for place, stream in enumerate(launched.streams) if stream.question.labels is not None]
        if not places or self.steps is None:
            return None
        rows = [ScoredRow(launched.streams[place], launched.label_rows.get(place, 0)) for place in places]
        with self.steps.clock.step(), self._alone:
            return ask_labels(rows, places, launched.logits).going_home()

    @torch.inference_mode()
    def _hold(self, plan: StepPlan, launched: Launched) -> None:
        """Masks for the rows under a grammar; then all tokens on their way to the host."""
        assert self.steps is not None
        try:
            constrained = any(stream.question.grammar is not None for stream in launched.streams)
            masks = self._masks(launched.streams, self.steps.mask_room) if constrained else None
            if masks:
                self.steps.hold(launched, masks)
            self.steps.bring_home(launched)
        except RuntimeError as error:
            raise self._failure(plan, error) from error

    def _collect(self, plan: StepPlan, launched: Launched, asked: AskedLabels | None) -> list[Sampled]:
        try:
            drawn = launched.wait()
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        return self._home(plan, launched.streams, drawn, asked)

    def _home(self, plan: StepPlan, streams: tuple[Stream, ...], drawn: list[Drawn], asked: AskedLabels | None) -> list[Sampled]:
        """The tokens of `streams`, and what was asked for labels."""
        if asked is None:
            return self._checked(self._booked(streams, drawn))
        self._scorer.book(asked)
        drawing = [place for place, stream in enumerate(streams) if not stream.question.labels]
        return self._in_order(plan, self._booked(tuple(streams[place] for place in drawing), [drawn[place] for place in drawing]))

    @torch.inference_mode()
    def _drawn_on_host(self, plan: StepPlan, launched: Launched, asked: AskedLabels | None) -> list[Sampled]:
        """A step with temperatures: its logits are looked at before the next step is launched. Rows that take the likeliest token take it
        as they would without the others, to the last bit."""
        streams = launched.streams
        hot = [place for place, stream in enumerate(streams) if _is_hot(stream)]
        self._hold(plan, launched)
        try:
            own = dict(zip(hot, self._draw(tuple(streams[place] for place in hot), launched.logits[hot]), strict=True))
            drawn = [own.get(place, likeliest) for place, likeliest in enumerate(launched.wait())]
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        return self._home(plan, streams, drawn, asked)

    def _passes(self, plan: StepPlan) -> Pending:
        """The step in PyTorch's operations."""
        batch = build_batch(plan, self.page_size, self.pool.slots)
        for row, stream in zip(batch.sampled_rows.tolist(), batch.sampled_streams, strict=False):
            if self.steps is not None and batch.token_ids[row] == PENDING:
                batch.token_ids[row] = self.steps.pending_token(stream)
        try:
            logits = self.model.forward(batch, self.pool)
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        return Pending(partial(self._drawn_from, plan, batch, logits), ahead=False)

    @torch.inference_mode()
    def _drawn_from(self, plan: StepPlan, batch: StepBatch, logits: Tensor) -> list[Sampled]:
        """What the rows of `logits` [N + M, V] say, in plan order."""
        streams = batch.sampled_streams
        try:
            if batch.scored:
                with self._alone:
                    self._scorer.add(batch.scored, logits[len(streams) :])
            drawn = self._draw(streams, logits[: len(streams)])
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        return self._in_order(plan, self._booked(streams, drawn))

    def _in_order(self, plan: StepPlan, booked: list[Sampled]) -> list[Sampled]:
        """What was drawn, and the scores of the label trees that the step completed, in plan order."""
        tokens = iter(booked)
        return self._checked([self._scores(s) if s.question.labels else next(tokens) for s in plan.sampling_streams])

    def _checked(self, sampled: list[Sampled]) -> list[Sampled]:
        for sample in sampled:
            if math.isnan(sample.logprob):
                if self.steps is not None:
                    self.steps.check()
                question = sample.stream.question.question_id
                raise EngineError(f"the model gave NaN logits for question {question!r} of {sample.stream.document.document.key!r}")
        return sampled

    def _failure(self, plan: StepPlan, error: RuntimeError) -> EngineError:
        return EngineError(f"a step of {plan.tokens} tokens failed on {self.model.device}: {error}")

    def _draw(self, streams: tuple[Stream, ...], logits: Tensor) -> list[Drawn]:
        """A token for each stream from its row of `logits` [N, V]."""
        if not streams:
            return []
        masks = self._masks(streams)  # on the CPU, while a GPU is still busy with the forward pass
        samplings, indices = [s.question.sampling for s in streams], [len(s.answer_token_ids) for s in streams]
        with self._alone:
            if masks is None:
                return draw(logits, samplings, indices)
            logits = logits.float()
            totals = torch.logsumexp(logits, dim=-1)
            return draw(hold(logits, masks), samplings, indices, totals)

    def _masks(self, streams: tuple[Stream, ...], room: Tensor | None = None) -> Masks | None:
        if self._constraints:
            return self._constraints.masks(streams, room)
        held = [stream.question.question_id for stream in streams if stream.question.grammar is not None]
        if held:
            raise EngineError(f"question {held[0]!r} has a grammar, and this engine was made without constraints")
        return None

    def _booked(self, streams: tuple[Stream, ...], drawn: list[Drawn]) -> list[Sampled]:
        """The streams' tokens, which their grammars know now."""
        complete = self._constraints.accept(streams, [one.token_id for one in drawn]) if self._constraints else [False] * len(drawn)
        pairs = zip(streams, drawn, complete, strict=True)
        return [Sampled(stream, one.token_id, one.logprob, one.margin, ended) for stream, one, ended in pairs]

    def _scores(self, stream: Stream) -> Sampled:
        """The finished label tree of a stream; its nominal token is the first label's."""
        assert stream.question.labels is not None
        logprobs = self._scorer.take(stream)
        return Sampled(stream, stream.question.labels.token_ids[0][0], math.fsum(logprobs), math.inf, label_logprobs=logprobs)


def _is_hot(stream: Stream) -> bool:
    """Whether its token is not the likeliest, of all or of those that a grammar allows."""
    return stream.question.sampling.temperature > 0 and stream.question.labels is None
