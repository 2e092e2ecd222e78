"""The device part of a step: tensors, forward, draw. Implements `step.Executor` with PyTorch.

This is the one place that chooses how a step attends: through the kernels of `steps` where there are any and they cover the plan, else in
PyTorch's own operations (on a CPU, and for label trees). A step whose tokens are all the likeliest can be left running (`launch`).

A draw is a function of the stream's seed and its token's index, K and V live in the pool. What must be kept about a stream is kept by its
id in two owners: the state of its grammar (`constraints`) and the label scores that are not complete (`scoring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from askmany.engine.batch import ScoredRow, StepBatch, build_batch
from askmany.engine.constraints import Constraints, Masks
from askmany.engine.errors import EngineError
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import StepModel
from askmany.engine.request import PENDING, Stream
from askmany.engine.sampler import Drawn, draw
from askmany.engine.scoring import LabelScorer
from askmany.engine.step import Sampled, StepPlan

if TYPE_CHECKING:
    from askmany.engine.kernel_steps import KernelSteps, Launched


class Pending:
    """A step that was launched. `ahead`: the next may be launched before this one is collected."""

    def __init__(self, collect: Callable[[], list[Sampled]], ahead: bool) -> None:
        self.collect = collect
        self.ahead = ahead


class TorchExecutor:
    """Runs steps of `model` over `pool`, whose slots are pages of `page_size`. Without `constraints`, no question may have a grammar."""

    def __init__(
        self,
        model: StepModel,
        pool: KVPool,
        page_size: int,
        constraints: Constraints | None = None,
        steps: KernelSteps | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.page_size = page_size
        self.steps = steps
        self._constraints = constraints
        self._scorer = LabelScorer()

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One forward pass; one `Sampled` for each run that samples, in plan order. Raises EngineError when device or model fail."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step; `collect` gives what `execute` would. Raises EngineError, as `collect` does."""
        if self.steps is None or not self.steps.covers(plan):
            sampled = self._passes(plan)
            return Pending(lambda: sampled, ahead=False)
        try:
            launched = self.steps.launch(plan)
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        ahead = all(_takes_the_likeliest(stream) for stream in launched.streams)
        if ahead:
            return Pending(partial(self._collect, plan, launched), ahead=True)
        sampled = self._drawn_on_host(plan, launched)
        return Pending(lambda: sampled, ahead=False)

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

    def _collect(self, plan: StepPlan, launched: Launched) -> list[Sampled]:
        try:
            drawn = launched.wait()
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        return self._checked([self._sampled(stream, one) for stream, one in zip(launched.streams, drawn, strict=True)])

    def _drawn_on_host(self, plan: StepPlan, launched: Launched) -> list[Sampled]:
        """A step with temperatures, grammars or label scores: its logits are looked at before the next step is launched."""
        assert self.steps is not None
        try:
            likeliest = [_takes_the_likeliest(stream) for stream in launched.streams]
            places = [place for place, stream in enumerate(launched.streams) if not (stream.question.labels or likeliest[place])]
            scored = [place for place, stream in enumerate(launched.streams) if stream.question.labels]
            if scored:
                rows = tuple(ScoredRow(launched.streams[place], 0) for place in scored)
                self._scorer.add(rows, launched.logits[scored])
            drawn = dict(zip(places, self._draw(tuple(launched.streams[i] for i in places), launched.logits[places]), strict=True))
            if any(likeliest):  # as they would be without the others, to the last bit
                drawn = dict(enumerate(launched.wait())) | drawn
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        return self._checked(
            [self._scores(s) if s.question.labels else self._sampled(s, drawn[place]) for place, s in enumerate(launched.streams)]
        )

    def _passes(self, plan: StepPlan) -> list[Sampled]:
        """The step in PyTorch's operations."""
        batch = build_batch(plan, self.page_size, self.pool.slots)
        for row, stream in zip(batch.sampled_rows.tolist(), batch.sampled_streams, strict=False):
            if self.steps is not None and batch.token_ids[row] == PENDING:
                batch.token_ids[row] = self.steps.pending_token(stream)
        try:
            drawn = iter(self._draw_batch(batch))
        except RuntimeError as error:
            raise self._failure(plan, error) from error
        streams = plan.sampling_streams
        return self._checked([self._scores(stream) if stream.question.labels else self._sampled(stream, next(drawn)) for stream in streams])

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

    def _draw_batch(self, batch: StepBatch) -> list[Drawn]:
        logits = self.model.forward(batch, self.pool)
        streams = batch.sampled_streams
        if batch.scored:
            self._scorer.add(batch.scored, logits[len(streams) :])
            logits = logits[: len(streams)]
        return self._draw(streams, logits)

    def _draw(self, streams: tuple[Stream, ...], logits: Tensor) -> list[Drawn]:
        """A token for each stream from its row of `logits` [N, V]."""
        if not streams:
            return []
        masks = self._masks(streams)  # on the CPU, while a GPU is still busy with the forward pass
        samplings, indices = [s.question.sampling for s in streams], [len(s.answer_token_ids) for s in streams]
        if masks is None:
            return draw(logits, samplings, indices)
        logits = logits.float()
        totals = torch.logsumexp(logits, dim=-1)
        return draw(masks.hold(logits), samplings, indices, totals)

    def _masks(self, streams: tuple[Stream, ...]) -> Masks | None:
        if self._constraints:
            return self._constraints.masks(streams)
        held = [stream.question.question_id for stream in streams if stream.question.grammar is not None]
        if held:
            raise EngineError(f"question {held[0]!r} has a grammar, and this engine was made without constraints")
        return None

    def _sampled(self, stream: Stream, drawn: Drawn) -> Sampled:
        complete = self._constraints.accept(stream, drawn.token_id) if self._constraints else False
        return Sampled(stream, drawn.token_id, drawn.logprob, drawn.margin, complete)

    def _scores(self, stream: Stream) -> Sampled:
        """The finished label tree of a stream; its nominal token is the first label's."""
        assert stream.question.labels is not None
        logprobs = self._scorer.take(stream)
        return Sampled(stream, stream.question.labels.token_ids[0][0], math.fsum(logprobs), math.inf, label_logprobs=logprobs)


def _takes_the_likeliest(stream: Stream) -> bool:
    question = stream.question
    return question.sampling.temperature <= 0 and question.grammar is None and question.labels is None
