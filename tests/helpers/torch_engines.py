"""Engines with a real device half for tests: logits recorded, free pages poisoned, and the lone prompt to compare with."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from askmany.engine.batch import StepBatch
from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.executor import TorchExecutor
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import StepModel
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.request import Document, StreamResult
from askmany.engine.step import Sampled, StepPlan

Key = tuple[str, str]  # document key, question id


class RecordingModel(TransformersModel):
    """Keeps the logits of every draw, by question, in `logits`."""

    def __init__(self, model: PreTrainedModel, deterministic: bool = False) -> None:
        super().__init__(model, deterministic)
        self.logits: dict[Key, list[Tensor]] = defaultdict(list)

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        logits = super().forward(batch, pool)
        for stream, row in zip(batch.sampled_streams, logits, strict=False):  # the load-time check has rows, no streams
            self.logits[stream.document.document.key, stream.question.question_id].append(row.clone())
        return logits


class PoisoningExecutor(TorchExecutor):
    """Fills every free page with NaN before each step, so that a stale read cannot pass unseen."""

    free_pages: Callable[[], Iterable[int]]

    def execute(self, plan: StepPlan) -> list[Sampled]:
        pages = torch.tensor(sorted(self.free_pages()), dtype=torch.int64)[:, None]
        with torch.inference_mode():
            self.pool.poison((pages * self.page_size + torch.arange(self.page_size)).flatten())
        return super().execute(plan)


def recording_engine(model: PreTrainedModel, config: EngineConfig) -> tuple[Engine, RecordingModel]:
    """An engine on a copy of `model`, in NaN-poisoned memory; the config must be resolved. No token ends an answer."""
    recorder = RecordingModel(copy.deepcopy(model), config.deterministic)
    return poisoned_engine(recorder, config), recorder


def poisoned_engine(model: StepModel, config: EngineConfig) -> Engine:
    """An engine on `model` itself, in NaN-poisoned memory; the config must be resolved. No token ends an answer."""
    scheduler = build_scheduler(config)
    pool = KVPool(model.kv_shape, config.kv_pages * config.page_size, model.device, poisoned=True)
    executor = PoisoningExecutor(model, pool, config.page_size)
    executor.free_pages = scheduler.tree.pool.free_pages
    return Engine(scheduler, executor, FakeDetokenizer())


def answers(engine: Engine, documents: Iterable[Document]) -> dict[Key, StreamResult]:
    """Submit everything at once and run to the end."""
    for document in documents:
        engine.submit(document)
    return {(result.document_key, result.question_id): result for result in engine.drain()}


@torch.inference_mode()
def lone_logits(model: PreTrainedModel, document: Document, question_id: str, answer: tuple[int, ...]) -> Tensor:
    """Logits [len(answer), V] of the plain model (eager attention) on the whole prompt of one question, answer fed as given."""
    (question,) = (q for q in document.questions if q.question_id == question_id)
    prompt = [token for segment in document.segments for token in segment] + list(question.token_ids)
    ids = torch.tensor([prompt + list(answer[:-1])])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 :]
