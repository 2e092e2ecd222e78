"""The device part of a step: tensors, forward, draw. Implements `step.Executor` with PyTorch.

A draw is a function of the stream's seed and its token's index, K and V live in the pool. What must be kept about a stream is kept by its
id in two owners: the state of its grammar (`constraints`) and the label scores that are not complete (`scoring`).
"""

from __future__ import annotations

import math

import torch

from askmany.engine.batch import StepBatch, build_batch
from askmany.engine.constraints import Constraints, Masks
from askmany.engine.errors import EngineError
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import StepModel
from askmany.engine.request import Stream
from askmany.engine.sampler import Drawn, draw
from askmany.engine.scoring import LabelScorer
from askmany.engine.step import Sampled, StepPlan


class TorchExecutor:
    """Runs steps of `model` over `pool`, whose slots are pages of `page_size`. Without `constraints`, no question may have a grammar."""

    def __init__(self, model: StepModel, pool: KVPool, page_size: int, constraints: Constraints | None = None) -> None:
        self.model = model
        self.pool = pool
        self.page_size = page_size
        self._constraints = constraints
        self._scorer = LabelScorer()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One forward pass; one `Sampled` for each run that samples, in plan order. Raises EngineError when device or model fail."""
        batch = build_batch(plan, self.page_size, self.pool.slots)
        try:
            drawn = iter(self._draw(batch))
        except RuntimeError as error:
            raise EngineError(f"a step of {plan.tokens} tokens failed on {self.model.device}: {error}") from error
        streams = plan.sampling_streams
        sampled = [self._scores(stream) if stream.question.labels else self._sampled(stream, next(drawn)) for stream in streams]
        for sample in sampled:
            if math.isnan(sample.logprob):
                question = sample.stream.question.question_id
                raise EngineError(f"the model gave NaN logits for question {question!r} of {sample.stream.document.document.key!r}")
        return sampled

    def release(self, streams: list[Stream]) -> None:
        """Forget grammar states and label scores."""
        self._scorer.release(streams)
        if self._constraints:
            self._constraints.release(streams)

    def _draw(self, batch: StepBatch) -> list[Drawn]:
        logits = self.model.forward(batch, self.pool)
        streams = batch.sampled_streams
        masks = self._masks(streams)  # on the CPU, while a GPU is still busy with the forward pass
        if batch.scored:
            self._scorer.add(batch.scored, logits[len(streams) :])
            logits = logits[: len(streams)]
        if not streams:
            return []
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
