"""`askmany evaluate TASK --data FILE`: a published task answered and scored, with baselines beside it, in one report.

Baselines on the same model and data: `alone` (one request per question, the document's KV reused), `batch-prompt` (many questions in one
prompt) and `transformers` (each full prompt by itself, without askmany's engine). The report is `evaluation.json` in the output. An
evaluation that was stopped writes no report, ends with the exit code of the run that was stopped, and goes on where it was when it is
asked for again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from askmany.engine.errors import AskmanyError, ConfigError
from askmany.engine.models import resolve_model
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.jobs.score import print_report
from askmany.pipeline.commit import current_answers
from askmany.pipeline.config import RunConfig
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.eval_batch_prompt import batched_items, batched_rows
from askmany.pipeline.eval_loaders import Row, articles, chunked_articles, read_data, rows_of
from askmany.pipeline.eval_tasks import TASKS, Task
from askmany.pipeline.export_shapes import write_lines
from askmany.pipeline.result import EXIT_OK
from askmany.pipeline.run import run
from askmany.pipeline.run_file import read_run
from askmany.pipeline.score_items import Items, read_items
from askmany.pipeline.scoring import ScoreOptions, compare, score
from askmany.pipeline.storage import ObjectStore

BASELINES = ("alone", "batch-prompt", "transformers")
REPORT = "evaluation.json"


class UnfinishedError(AskmanyError):
    """A run of the evaluation ended before every question had its record: nothing to score yet. `exit_code` is that run's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Request:
    """What to evaluate. `sets` override the run's configuration; `limit` and `max_questions` make it smaller."""

    task: str
    data: str
    output: str
    model: str = "smollm2"
    sets: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    limit: int | None = None
    max_questions: int | None = None
    batch_size: int = 10
    options: ScoreOptions = field(default_factory=ScoreOptions)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of answering, ready to be scored. `answer_s` leaves out the steps that fed document tokens alone."""

    items: Items
    seconds: float
    answer_s: float | None = None
    exit_code: int = EXIT_OK

    @property
    def timing(self) -> dict[str, float | None]:
        return {"seconds": round(self.seconds, 3), "answer_seconds": None if self.answer_s is None else round(self.answer_s, 3)}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A request with its data loaded."""

    request: Request
    task: Task
    rows: list[Row]
    config: RunConfig
    console: Console


def main(request: Request, console: Console) -> int:
    """Evaluate, write the report, print it. The exit code is that of the run which ended worst."""
    try:
        report = evaluate(request, console)
    except UnfinishedError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    _print(report, request, console)
    return max(int(way["exit_code"]) for way in report["ways"].values())


def _print(report: Mapping[str, Any], request: Request, console: Console) -> None:
    for name, found in report["ways"].items():
        answer_s = found["answer_seconds"]
        timing = f"{found['seconds']:.1f} s" + (f", {answer_s:.1f} s without document prefill" if answer_s is not None else "")
        console.print(f"\n{name}: {timing}", markup=False, highlight=False)
        print_report(found["scores"], console)
    console.print(f"written: {request.output.rstrip('/')}/{REPORT}", markup=False, highlight=False, soft_wrap=True)


def evaluate(request: Request, console: Console) -> dict[str, Any]:
    """The report. ConfigError for an unknown task or baseline, data of another shape, or a configuration that cannot be run;
    UnfinishedError when a run was stopped."""
    found = load(request, console)
    ways: dict[str, Callable[[Evaluation], Outcome]] = {
        "together": _together,
        "alone": _alone,
        "batch-prompt": _batch_prompt,
        "transformers": _transformers,
    }
    outcomes = {name: ways[name](found) for name in ("together", *request.baselines)}
    reports = {name: _way(name, outcomes, request) for name in outcomes}
    report = {
        "task": request.task,
        "data": request.data,
        "model": request.model,
        "documents": len(found.rows),
        "questions": sum(len(row["questions"]) for row in found.rows),
        "prompt": found.task.prompt,
        "sampling": found.config.sampling.model_dump(mode="json"),
        "ways": reports,
    }
    ObjectStore(request.output, {}).put(REPORT, json.dumps(report, indent=1, ensure_ascii=False).encode("utf-8"))
    return report


def _way(name: str, outcomes: Mapping[str, Outcome], request: Request) -> dict[str, Any]:
    """One way's times and scores; a baseline's are compared with those of all questions together."""
    outcome, together = outcomes[name], outcomes["together"]
    scores = score(outcome.items, request.options)
    if outcome is not together:
        scores["against"] = {"output": "together", **compare(outcome.items, together.items, request.options)}
    return {**outcome.timing, "exit_code": outcome.exit_code, "scores": scores}


def load(request: Request, console: Console) -> Evaluation:
    """Task, data and configuration; the data is written as the run's input."""
    if request.task not in TASKS:
        raise ConfigError(f"task {request.task!r} is none of {', '.join(TASKS)}")
    if not request.data:
        raise ConfigError(f"task {request.task}: its data is needed: --data FILE")
    unknown = sorted(set(request.baselines) - set(BASELINES))
    if unknown:
        raise ConfigError(f"baseline {unknown[0]!r} is none of {', '.join(BASELINES)}")
    task = TASKS[request.task]
    rows = _shaped(task, rows_of(task.loader, read_data(request.data, {}), request.data), request.model)[: request.limit]
    rows = [{**row, "questions": row["questions"][: request.max_questions]} for row in rows]
    return Evaluation(request, task, rows, _config(request, task, rows, "together"), console)


def _shaped(task: Task, rows: list[Row], model: str) -> list[Row]:
    if task.shape == "articles":
        return articles(rows)
    if task.shape == "chunks":
        tokenizer = PromptBuilder(resolve_model(model, weights=False).folder, PromptConfig(**task.prompt)).tokenizer
        return chunked_articles(rows, lambda text: len(tokenizer.encode(text).ids), task.chunk_tokens)
    return rows


def _config(request: Request, task: Task, rows: Sequence[Row], name: str, sets: Sequence[str] = ()) -> RunConfig:
    """The run of one way of answering, its input written beside its output."""
    store = ObjectStore(f"{request.output.rstrip('/')}/{name}", {})
    with store.writer("input.jsonl") as stream:
        write_lines(stream, iter(rows))
    values = {
        "model": request.model,
        "prompt": task.prompt,
        "input": {"uri": store.uri_of("input.jsonl"), "questions": "questions"},
        "output": {"uri": store.uri},
        "sampling": dict(task.sampling),
    }
    return parse_config(values, [*request.sets, *sets], f"evaluate {request.task}")


def _together(found: Evaluation) -> Outcome:
    return _run(found.config, found.console)


def _alone(found: Evaluation) -> Outcome:
    return _run(_config(found.request, found.task, found.rows, "alone", ["engine.streams=1"]), found.console)


def _batch_prompt(found: Evaluation) -> Outcome:
    size, budget = found.request.batch_size, found.config.sampling.max_new_tokens
    rows = batched_rows(found.rows, size, budget)
    config = _config(found.request, found.task, rows, "batch-prompt", ["sampling.stop=[]", "prompt.question='{{ question }}'"])
    outcome = _run(config, found.console)
    answers = {(row["doc_id"], row["question_id"]): row["answer"] or "" for row in _rows(config)}
    return replace(outcome, items=Items(batched_items(found.rows, answers, size)))


def _transformers(found: Evaluation) -> Outcome:
    from askmany.jobs.baselines_transformers import PlainBaseline

    config = found.config
    model = resolve_model(config.model, config.model_revision)
    prompts = PromptBuilder(model.folder, config.prompt)
    kept = ObjectStore(f"{found.request.output.rstrip('/')}/transformers", {})
    baseline = PlainBaseline(model, prompts, config.sampling.max_new_tokens, tuple(config.sampling.stop), kept)
    done = baseline.answer(found.rows)
    return Outcome(Items(done.items), done.seconds)


def _run(config: RunConfig, console: Console) -> Outcome:
    """A run, taken up where it stood; `seconds` are those of all its launches. Raises UnfinishedError when it was stopped."""
    result = run(config, console=console)
    if result.state != "complete":
        left = result.planned_records - result.records
        what = f"{config.output.uri}: the run is {result.state}, {left:,} questions are left; evaluate again"
        raise UnfinishedError(what, result.exit_code)
    store = ObjectStore(config.output.uri, config.output.storage_options)
    seconds = math.fsum(launch["seconds"] for launch in (read_run(store) or {}).get("launches", ()))
    usage: Mapping[str, float] = result.usage
    answer_s = usage["busy_s"] - usage["prefill_s"] if "prefill_s" in usage else None
    return Outcome(read_items(current_answers(store)), seconds, answer_s, result.exit_code)


def _rows(config: RunConfig) -> list[dict[str, Any]]:
    return [row for table in current_answers(ObjectStore(config.output.uri, {})) for row in table.to_pylist()]
