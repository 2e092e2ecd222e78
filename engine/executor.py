"""The device part of a step: tensors, forward, draw. Implements `step.Executor` with PyTorch.

Keeps nothing about streams: a draw is a function of the stream's seed and its token's index, K and V live in the pool.
"""

from __future__ import annotations

import math

import torch

from askmany.engine.batch import StepBatch, build_batch
from askmany.engine.errors import EngineError
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.request import Stream
from askmany.engine.sampler import Drawn, draw
from askmany.engine.step import Sampled, StepPlan


class TorchExecutor:
    """Runs steps of `model` over `pool`, whose slots are pages of `page_size`."""

    def __init__(self, model: TransformersModel, pool: KVPool, page_size: int) -> None:
        self.model = model
        self.pool = pool
        self.page_size = page_size

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One forward pass; one `Sampled` for each run that samples, in plan order. Raises EngineError when device or model fail."""
        batch = build_batch(plan, self.page_size, self.pool.slots)
        try:
            drawn = self._draw(batch)
        except RuntimeError as error:
            raise EngineError(f"a step of {plan.tokens} tokens failed on {self.model.device}: {error}") from error
        for stream, token in zip(batch.sampled_streams, drawn, strict=True):
            if math.isnan(token.logprob):
                raise EngineError(
                    f"the model gave NaN logits for question {stream.question.question_id!r} of {stream.document.document.key!r}"
                )
        return [Sampled(stream, d.token_id, d.logprob, d.margin) for stream, d in zip(batch.sampled_streams, drawn, strict=True)]

    def release(self, streams: list[Stream]) -> None:
        """Nothing is kept for a stream."""

    def _draw(self, batch: StepBatch) -> list[Drawn]:
        logits = self.model.forward(batch, self.pool)
        streams = batch.sampled_streams
        if not streams:
            return []
        return draw(logits, [s.question.sampling for s in streams], [len(s.answer_token_ids) for s in streams])
