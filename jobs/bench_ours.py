"""This project's engine as a contender of the engine benchmark: one process, one layout, random or real weights, no text.

`run` times the questions of a cell from the call to the last answer. Answers end at the length that the seed drew for them; neither the
scheduler nor the KV pool knows it (both see the cap).
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from askmany.engine.answers import GrowingAnswer
from askmany.engine.build import build_scheduler
from askmany.engine.choice import Choice, Expected, choose
from askmany.engine.config import EngineConfig
from askmany.engine.constraints import Constraints
from askmany.engine.engine import Engine
from askmany.engine.errors import ConfigError
from askmany.engine.executor import TorchExecutor
from askmany.engine.host_threads import keep_host_work_in_one_thread
from askmany.engine.invariant_rows import InvariantRows
from askmany.engine.kv_pool import KVPool
from askmany.engine.metrics import Metrics
from askmany.engine.model import LoadedModel
from askmany.engine.models import context_limit
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.request import Document, FinishReason, Question, Sampling, Stream, StreamResult
from askmany.engine.step import Sampled
from askmany.jobs.bench_cells import Cell, Drawn

if TYPE_CHECKING:
    from askmany.engine.graphs import Bucket
    from askmany.engine.kernel_steps import KernelSteps

KV_SHARE = 0.85  # of what is free beside the weights


class _Silent:
    """A detokenizer that says nothing, as SGLang's when it has no tokenizer."""

    def stream(self) -> _Silent:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _TimedAnswer:
    """An answer that ends at a length nobody knew."""

    def __init__(self, length: int) -> None:
        self._left = length
        self._token_ids: list[int] = []

    def push(self, sampled: Sampled) -> FinishReason | None:
        self._token_ids.append(sampled.token_id)
        self._left -= 1
        return None if self._left else "stop"

    def result(self, stream: Stream) -> StreamResult:
        key, question = stream.document.document.key, stream.question.question_id
        return StreamResult(key, question, tuple(self._token_ids), "", "stop", stream.logprob, stream.margin)


class _Scheduled:
    """Mixed into an engine: ends answers by `lengths`, keyed by document and question."""

    lengths: dict[tuple[str, str], int]

    def _open(self, stream: Stream) -> GrowingAnswer:
        return _TimedAnswer(self.lengths[stream.document.document.key, stream.question.question_id])


class ScheduledEngine(_Scheduled, Engine):
    """For a CPU."""


class ScheduledPipelinedEngine(_Scheduled, PipelinedEngine):
    """For a GPU."""


@dataclass(frozen=True)
class OursSetup:
    """How the engine is set up. `kv_tokens` None: what memory leaves."""

    layout: str = "split"
    streams: int | None = None
    batching: str = "continuous"
    max_rows: int = 256
    page_size: int = 64
    step_tokens: int = 2048
    kv_tokens: int | None = None
    deterministic: bool = False

    def config(self, kv_tokens: int, device: str) -> EngineConfig:
        values: dict[str, Any] = {
            "layout": self.layout, "streams": self.streams or "auto", "batching": self.batching, "max_rows": self.max_rows,
            "page_size": self.page_size, "step_tokens": max(self.step_tokens, self.max_rows), "kv_tokens": kv_tokens, "device": device,
            "deterministic": self.deterministic, "prefill_chunk": min(self.step_tokens, 2048),
        }  # fmt: skip
        return EngineConfig(**values)


class OursContender:
    """An engine over a loaded model. Its books are checked after each cell, when the clock has stopped."""

    def __init__(
        self, model: LoadedModel, setup: OursSetup, context_tokens: int, cells: Sequence[Cell], constraints: Constraints | None = None
    ) -> None:
        """What decode steps of `cells` need is captured now. Without `constraints`, no question may have a grammar."""
        device = model.device
        fits = free_tokens(model, setup, context_tokens) if setup.kv_tokens is None else setup.kv_tokens
        config = setup.config(fits // setup.page_size * setup.page_size, device.type)
        pool = KVPool(model.kv_shape, config.kv_pages * config.page_size, device)
        steps = None
        if device.type == "cuda":
            from askmany.engine.kernel_loading import load_steps

            steps = load_steps(model, pool, config, context_tokens)
        alone = InvariantRows() if config.deterministic else None
        self.executor = executor = TorchExecutor(model, pool, config.page_size, constraints, steps, alone)
        make = ScheduledEngine if steps is None else ScheduledPipelinedEngine
        self._engine = make(build_scheduler(config), executor, _Silent(), check_share=0.0)
        self._engine.lengths = {}
        self._rotary = model.rotary
        self._steps = steps
        self._choices = {cell: _choice(cell, config) for cell in cells}
        if steps is not None:
            _warm(steps, self._choices, config)

    def run(self, cell: Cell, drawn: Drawn) -> float:
        """Seconds from handing in the questions to the last answer."""
        engine = self._engine
        engine.scheduler.tree.clear()
        if cell.cached:
            self._ask([Document(_key(d), (tuple(ids),), (_question(0, drawn.tails[d][0], 1),)) for d, ids in enumerate(drawn.documents)], 1)
        taken_s, answers = self.answer(list(zip(drawn.documents, drawn.tails, drawn.lengths, strict=True)), cell.most_tokens)
        engine.scheduler.check_integrity()
        produced = {(a.document_key, a.question_id): len(a.answer_token_ids) for a in answers}
        if produced != engine.lengths:
            raise RuntimeError(f"the engine gave {sum(produced.values())} answer tokens of {sum(engine.lengths.values())} for {cell}")
        return taken_s

    def answer(
        self,
        asked: Sequence[tuple[list[int], list[list[int]], list[int]]],
        most_tokens: int | None = None,
        grammars: Sequence[str | None] | None = None,
    ) -> tuple[float, list[StreamResult]]:
        """Answer (document, questions, lengths of the answers) together; `most_tokens`: what the engine is told (default: the length);
        `grammars`: of a document's questions."""
        engine = self._engine
        engine.lengths.clear()
        documents = []
        for d, (ids, tails, lengths) in enumerate(asked):
            engine.lengths |= {(_key(d), f"q{i}"): length for i, length in enumerate(lengths)}
            held = grammars or [None] * len(tails)
            questions = (_question(i, tail, most_tokens or lengths[i], held[i]) for i, tail in enumerate(tails))
            documents.append(Document(_key(d), (tuple(ids),), tuple(questions)))
        synchronize()
        started_s = perf_counter()
        for document in documents:
            engine.submit(document)
        answers = list(engine.drain())
        synchronize()
        return perf_counter() - started_s, answers

    def notes(self) -> dict[str, Any]:
        """What belongs beside the times."""
        metrics = self._engine.metrics
        captured = captured_s(self._steps.capture_s) if self._steps else {}
        reasons = [choice.reason for choice in self._choices.values()]
        found: dict[str, Any] = {"idle_ratio": metrics.device_idle_ratio, "steps": metrics.steps, "capture_s": captured, "reasons": reasons}
        return found | {"rotary": "library" if self._rotary is None else "with the store"}

    @property
    def metrics(self) -> Metrics:
        """Everything counted so far."""
        return self._engine.metrics

    def launches(self) -> dict[str, int]:
        """What the device has run so far: replays by bucket, steps without a graph, picks under masks, captures. Empty on a CPU."""
        if self._steps is None:
            return {}
        replays = {f"replay {bucket}": count for bucket, count in self._steps.replays.items()}
        return replays | {"eager": self._steps.eager_steps, "held": self._steps.held_steps, "captures": len(self._steps.capture_s)}

    def close(self) -> None:
        """The process ends anyway."""

    def _ask(self, documents: list[Document], length: int) -> None:
        for document in documents:
            self._engine.lengths |= {(document.key, question.question_id): length for question in document.questions}
            self._engine.submit(document)
        list(self._engine.drain())


def captured_s(taken: Mapping[Bucket, float]) -> dict[str, float]:
    """Seconds by rows and kind: `64d` of decode steps alone, `64m` of steps that bring tokens in as well. Other differences are summed."""
    found: dict[str, float] = defaultdict(float)
    for bucket, seconds in taken.items():
        found[f"{bucket.rows}{'d' if bucket.decode else 'm'}"] += seconds
    return {name: round(seconds, 2) for name, seconds in found.items()}


def load_ours(folder: Path, device: torch.device, context_tokens: int, random_weights: bool, deterministic: bool = False) -> LoadedModel:
    """The model through SGLang on a GPU, through Transformers on a CPU, for prompts of at most `context_tokens` with their answers.

    ConfigError when its config allows fewer: positions beyond have no entry in its rotary tables.
    """
    limit = context_limit(folder)
    if context_tokens > limit:
        raise ConfigError(f"model {folder}: its context has {limit} tokens; prompt and answer take {context_tokens}")
    keep_host_work_in_one_thread(device)
    if device.type == "cuda":
        from askmany.engine.model_sglang import SglangModel

        return SglangModel.load(
            folder, device, torch.bfloat16, context_tokens, "dummy" if random_weights else "auto", deterministic=deterministic
        )
    from askmany.engine.model_transformers import TransformersModel

    if random_weights:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        return TransformersModel(model, deterministic)
    return TransformersModel.load(folder, device, torch.float32, deterministic, context_tokens)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def hand_back(device: torch.device) -> None:
    """What nothing refers to any more becomes free memory of the device, reference cycles and PyTorch's cache included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _choice(cell: Cell, config: EngineConfig) -> Choice:
    kv_tokens = config.kv_pages * config.page_size
    expected = Expected(cell.document_tokens, cell.questions, cell.question_tokens, cell.new_tokens)
    return choose(expected, kv_tokens, config.page_size, min(config.max_rows, cell.documents * cell.questions))


def _warm(steps: KernelSteps, choices: Mapping[Cell, Choice], config: EngineConfig) -> None:
    """As for a run where answers end at different times, documents follow on, or questions wait for room; of other cells only what they
    come by, to start sooner."""
    for cell, choice in sorted(choices.items(), key=lambda found: found[1].rows, reverse=True):
        if cell.spread or cell.documents > 1 or choice.rows < min(config.max_rows, cell.questions):
            rows = min(config.max_rows, cell.documents * cell.questions)
            steps.warm_run(rows, min(choice.streams, cell.questions), cell.document_tokens)
        else:
            steps.warm([choice.rows], _tail_rows(cell, config), cell.document_tokens)


def _tail_rows(cell: Cell, config: EngineConfig) -> list[int]:
    """Rows of the steps that bring in the questions of streams that begin together: as many whole tails as a step takes, beside the
    streams that have begun to answer."""
    streams, found, asked = min(config.max_rows, cell.questions), [], 0
    while asked < streams:
        taken = min(streams - asked, max(1, (config.step_tokens - asked) // cell.question_tokens))
        found.append(asked + taken * cell.question_tokens)
        asked += taken
    return found


def free_tokens(model: LoadedModel, setup: OursSetup, context_tokens: int) -> int:
    """KV tokens for which there is memory now, with some to spare."""
    from askmany.engine.memory import free_bytes

    if model.device.type == "cpu":
        return 4096
    from askmany.engine.kernel_loading import kernel_bytes

    step_bytes = model.step_bytes(setup.step_tokens, setup.max_rows)
    kept = kernel_bytes(model, setup.config(setup.page_size, model.device.type), model.device, context_tokens)
    return int((free_bytes(model.device) - step_bytes - kept) * KV_SHARE) // model.kv_shape.token_bytes


def _key(document: int) -> str:
    return f"d{document}"


def _question(index: int, tail: list[int], most_tokens: int, grammar: str | None = None) -> Question:
    return Question(f"q{index}", tuple(tail), Sampling(most_tokens), grammar)
