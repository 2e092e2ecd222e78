"""Launches of a run in the test's own process: the real plan, fill, worker and seal, with no Ray, an engine that counts what it is asked,
and a kill at any write to the output."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from askmany.engine.engine import Engine
from askmany.engine.fake import fake_engine
from askmany.engine.request import Document, StreamResult
from askmany.pipeline import planning
from askmany.pipeline.building import build_preparer
from askmany.pipeline.commit import read_answers, read_manifest
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.finishing import Launch, finish, launches
from askmany.pipeline.lock import RunLock
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.planning import How, PlannedRun, plan_run, take_up
from askmany.pipeline.readers import Span
from askmany.pipeline.result import RunResult, make_result, run_values
from askmany.pipeline.run_file import write_run
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.survey import Survey, gather, pack_spans, survey_spans
from askmany.pipeline.worker import GroupWorker, Job

Stream = tuple[str, str]  # doc_id, question_id


class Killed(BaseException):
    """The process ended here."""


@dataclass
class Asked:
    """What engines were asked, in any launch."""

    streams: Counter[Stream] = field(default_factory=Counter)


class CountingEngine:
    """The fake engine, and a note of every stream."""

    def __init__(self, inner: Engine, asked: Asked) -> None:
        self._inner = inner
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, document: Document) -> None:
        doc_id = document.key.partition("/")[2]
        self._asked.streams.update((doc_id, question.question_id) for question in document.questions)
        self._inner.submit(document)

    def step(self) -> list[StreamResult]:
        return self._inner.step()


@contextmanager
def killed_at(write: int | None) -> Iterator[None]:
    """The `write`-th change of an output inside the block does not happen, nor does anything after it; None: all do."""
    left = [write]

    def guarded(name: str) -> Any:
        real = getattr(ObjectStore, name)

        def change(self: ObjectStore, *args: Any) -> Any:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return real(self, *args)

        return change

    with patch.object(ObjectStore, "put", guarded("put")), patch.object(ObjectStore, "delete", guarded("delete")):
        yield


def survey_here(spans: list[Span], config: Any, builder: Any) -> Survey:
    """The survey, made in this process."""
    preparer = builder(config)
    return gather([survey_spans(block, config.input, preparer) for block in pack_spans(spans)], config.input)


def launch(values: Mapping[str, Any], asked: Asked, kill: int | None = None, dies_after: int | None = None) -> RunResult:
    """One launch to its end. Raises Killed at the `kill`-th write to the output, or after `dies_after` groups."""
    with patch.object(planning, "run_survey", survey_here), killed_at(kill):
        return _launch(values, asked, dies_after)


def drained_launch(values: Mapping[str, Any], asked: Asked) -> list[str]:
    """A launch that is told to stop at the second answer, which takes its time; the names of the results that it kept."""
    with patch.object(planning, "run_survey", survey_here):
        opened, lock, planned = _planned(values)
        job = _job(opened, lock, planned, asked)
        workers: list[GroupWorker] = []
        answers: list[StreamResult] = []

        def stop(result: StreamResult) -> None:
            answers.append(result)
            if len(answers) == 2:
                workers[0].drain()
                time.sleep(1.0)

        workers.append(GroupWorker(job, _broken, stop))
        try:
            for group in planned.todo:
                workers[0].process(group.name, planned.plan.rows(group))
        finally:
            workers[0].close()
            lock.release()
        return [name for name in opened.store.find("attempts") if name.endswith(".parquet")]


def _planned(values: Mapping[str, Any]) -> tuple[OpenedRun, RunLock, PlannedRun]:
    opened = open_run(parse_config(values))
    lock = RunLock(opened.store, 60.0)
    lock.acquire("takeover")
    how = How(lock.epoch)
    planned = take_up(opened, how) or plan_run(opened, 1.0, build_preparer, how)
    write_run(opened.store, run_values(opened, make_result(opened, planned, None, "running"), launches(opened)))
    return opened, lock, planned


def _job(opened: OpenedRun, lock: RunLock, planned: PlannedRun, asked: Asked) -> Job:
    def engine(config: Any) -> Any:
        return CountingEngine(fake_engine(config.engine), asked)

    return Job(opened.config, opened.fingerprint, lock.epoch, engine, build_preparer, sets=planned.plan.sets)


def _launch(values: Mapping[str, Any], asked: Asked, dies_after: int | None) -> RunResult:
    opened, lock, planned = _planned(values)
    made = Launch(opened, lock, Console(quiet=True))
    if planned.todo:
        worker = GroupWorker(_job(opened, lock, planned, asked), _broken)
        try:
            for number, group in enumerate(planned.todo):
                if number == dies_after:
                    raise Killed
                ack = worker.process(group.name, planned.plan.rows(group))
                made.acks[group.name] = ack.shard  # type: ignore[assignment]
                made.records += ack.footer.rows
        finally:
            worker.close()
    result = finish(made, planned, made.acks, "complete")
    lock.release()
    return result


def _broken(error: BaseException) -> None:
    raise error


def answers_of(output: Path) -> list[dict[str, Any]]:
    """Every record that the manifest names, in order of key, without the number of its try. AssertionError for a key given twice."""
    store = ObjectStore(str(output), {})
    rows = [row for table in read_answers(store, read_manifest(store)) for row in table.to_pylist()]
    rows.sort(key=lambda row: (row["doc_id"], row["question_id"], row["chunk"]))
    keys = [(row["doc_id"], row["question_id"], row["chunk"]) for row in rows]
    assert len(set(keys)) == len(keys)
    return [{name: value for name, value in row.items() if name != "attempt"} for row in rows]
