"""P of the interleaved layout, measured on a run's own documents: python -m askmany.jobs.bench_engine calibrate run.yaml

The calibration set is the first documents of the input with all their questions, as the published method does it (Parallel Prompting,
arXiv 2611.15130). Each P has its graphs captured, then answers the whole set once to warm up and once timed, documents' prefill included,
which is the same for every P. The model is loaded once. Nothing is written into the run's output; the result is a line for its
configuration.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from askmany.engine.build import build_scheduler
from askmany.engine.choice import INTERLEAVED_CANDIDATES, calibrated_streams
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.errors import AskmanyError, ConfigError
from askmany.engine.executor import TorchExecutor
from askmany.engine.loading import load_executor
from askmany.engine.models import ResolvedModel
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.request import Document
from askmany.engine.tokenizer import TextTokenizer
from askmany.jobs.bench_ours import hand_back
from askmany.pipeline import building
from askmany.pipeline.config_file import load_config
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.readers import plan_spans, scan


@dataclass(frozen=True, slots=True)
class Bench:
    """A loaded model that answers the calibration set under any P."""

    model: ResolvedModel
    executor: TorchExecutor
    config: EngineConfig
    context_tokens: int
    documents: Sequence[Document]

    def tokens_per_s(self, streams: int) -> float:
        """Answer tokens a second, of the second of two passes."""
        engine = self.engine(streams)
        self._answer(engine)
        engine.scheduler.tree.clear()
        started_s = perf_counter()
        produced = self._answer(engine)
        return produced / (perf_counter() - started_s)

    def engine(self, streams: int) -> Engine:
        """A fresh engine with P = `streams` over the loaded model, its graphs captured."""
        config = self.config.model_copy(update={"streams": streams})
        make: type[Engine] = Engine
        if self.executor.pool.device.type == "cuda":
            from askmany.engine.kernel_loading import load_steps

            self.executor.steps = None  # its graphs go before new ones come
            hand_back(self.executor.pool.device)
            steps = load_steps(self.executor.model, self.executor.pool, config, self.context_tokens)  # type: ignore[arg-type]
            if steps is not None:
                self.executor.steps, make = steps, PipelinedEngine
                steps.warm_run(*self.most_rows(streams))
        tokenizer = TextTokenizer(self.model.folder)
        return make(build_scheduler(config), self.executor, tokenizer, eos_token_ids=self.model.eos_token_ids)

    def most_rows(self, streams: int) -> tuple[int, int]:
        """Rows of a step that answers the calibration set with P = `streams`, at most: of all documents, in whole requests, and of one."""
        limits = self.config.model_copy(update={"streams": streams}).limits
        requests = sum(-(-len(document.questions) // streams) for document in self.documents)
        most = max(len(document.questions) for document in self.documents)
        return min(limits.requests, requests) * limits.streams, min(limits.max_rows, most)

    def _answer(self, engine: Engine) -> int:
        for document in self.documents:
            engine.submit(document)
        return sum(len(result.answer_token_ids) for result in engine.drain())


def main(arguments: Sequence[str]) -> int:
    """Measure, print the line for the configuration, write the record. Bad input is told in one line."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        record = calibrate(open_run(load_config(options.config, options.set), own_output=False), options.documents, options.candidates)
    except AskmanyError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    for line in (record["reason"], f"engine: {{layout: interleaved, streams: {record['streams']}}}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def calibrate(opened: OpenedRun, count: int, candidates: Sequence[int]) -> dict[str, Any]:
    """The measured rates and the P that they choose. ConfigError when there is nothing to measure with."""
    documents = calibration_set(opened, count)
    model = building.resolve(opened.config, weights=True)
    most = min(opened.config.engine.max_rows, max(len(document.questions) for document in documents))
    context_tokens = opened.preparer.context_tokens
    values = {"layout": "interleaved", "streams": min(max(candidates), most)}
    executor, config = load_executor(model, opened.config.engine.model_copy(update=values), context_tokens)
    bench, rates = Bench(model, executor, config, context_tokens, documents), {}

    def measure(streams: int) -> float:
        rates[streams] = bench.tokens_per_s(streams)
        return rates[streams]

    streams, reason = calibrated_streams(measure, sorted(candidates), most)
    device = executor.pool.device
    return {
        "model": model.name, "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "documents": len(documents),
        "questions": sum(len(document.questions) for document in documents), "tokens_per_s": rates, "streams": streams, "reason": reason,
    }  # fmt: skip


def calibration_set(opened: OpenedRun, count: int) -> list[Document]:
    """The first `count` documents that this layout can answer, without the questions that it cannot (scored labels of several tokens).

    ConfigError without any.
    """
    found: list[Document] = []
    for source in _sources(opened):
        for part in opened.preparer.parts(source):
            asked = [q.asked.question_id for q in part.answerable if not (q.labels and q.labels.feed)]
            if asked and len(found) < count:
                found.append(part.only(asked).for_engine(f"{len(found)}"))
        if len(found) == count:
            break
    if not found:
        raise ConfigError(f"input.uri: no document in {', '.join(opened.config.input.uris)} has a question for the interleaved layout")
    return found


def _sources(opened: OpenedRun) -> Iterator[SourceDocument]:
    for file in opened.files:
        for span in plan_spans(file, opened.config.input, 1 << 62):
            yield from (item for item in scan(span, opened.config.input) if isinstance(item, SourceDocument))


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_engine calibrate", description=__doc__)
    parser.add_argument("config", type=Path, help="a run's configuration")
    parser.add_argument("--documents", type=_count, default=8, help="of the calibration set")
    parser.add_argument("--candidates", type=_count, nargs="+", default=list(INTERLEAVED_CANDIDATES), help="P to try")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the configuration")
    parser.add_argument("--out", type=Path, help="JSON file for the rates")
    return parser
