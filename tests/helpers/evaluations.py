"""Evaluations without Ray or engine: documents in a folder, each a file of its own, and a run that answers as it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.commit import PLAN, describe, seal, write_shard
from askmany.pipeline.config import RunConfig
from askmany.pipeline.eval_schedule import Schedule
from askmany.pipeline.opening import open_run
from askmany.pipeline.plan import make_plan, to_bytes
from askmany.pipeline.planning import PlannedRun, made_from
from askmany.pipeline.result import RunResult, State, make_result, run_values
from askmany.pipeline.run_file import write_run
from askmany.pipeline.schema import Record, Status, to_table
from tests.helpers.runs import run_config, survey

RIGHT, WRONG = "w1 w2", "w3"
QUESTIONS = ("q0", "q1")


@dataclass
class MovingInput:
    """A folder of documents that come, change and go."""

    folder: Path

    def put(self, doc_id: str, text: str = "w5 w6 w7") -> None:
        questions = [{"qid": name, "question": f"w{n}", "answers": [RIGHT]} for n, name in enumerate(QUESTIONS)]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{doc_id}.jsonl"
        path.write_text(json.dumps({"doc_id": doc_id, "text": text, "questions": questions}) + "\n")

    def remove(self, doc_id: str) -> None:
        (self.folder / f"{doc_id}.jsonl").unlink()


def schedule(folder: Path, date: str, values: dict[str, Any] | None = None, **more: Any) -> Schedule:
    """A schedule over `folder`/in with its root in `folder`/root."""
    source = {"uri": str(folder / "in"), "questions": "questions", **(values or {}).get("input", {})}
    config = run_config(folder, **{"questions": None, "output": {"uri": str(folder / "root")}, **(values or {}), "input": source})
    return Schedule(config, date, **{"since": "last-success", **more})


@dataclass
class Answerer:
    """Stands in for `run`: answers are right but for the documents in `wrong`; `error` marks documents whose records are errors. Not
    `referenced`, records keep no right answers."""

    wrong: set[str] = field(default_factory=set)
    error: set[str] = field(default_factory=set)
    state: State = "complete"
    raises: Exception | None = None
    referenced: bool = True
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, config: RunConfig, *, console: Console, if_running: str) -> RunResult:
        if self.raises is not None:
            raise self.raises
        opened = open_run(config)
        plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits())
        opened.store.put(PLAN, to_bytes(plan, made_from(opened)))
        self.asked.append(sorted(plan.table.column("doc_id").to_pylist()))
        for group in plan.groups:
            ids = plan.rows(group).column("doc_id").to_pylist()
            table = to_table([self._record(doc_id, question) for doc_id in ids for question in QUESTIONS])
            write_shard(opened.store, table, describe(table, opened.fingerprint, group.name, 1, 1, {}))
        manifest = seal(opened.store, opened.fingerprint, {group.name: group.records for group in plan.groups}, {})
        result = make_result(opened, PlannedRun(plan, (), {}, 0, 0), manifest, self.state)
        write_run(opened.store, run_values(opened, result, []))
        return result

    def _record(self, doc_id: str, question_id: str) -> Record:
        status: Status = "error" if doc_id in self.error else "ok"
        answer = None if status == "error" else WRONG if doc_id in self.wrong else RIGHT
        references = [RIGHT] if self.referenced else None
        return Record(doc_id, question_id, status, answer=answer, references=references, answer_type="text")
