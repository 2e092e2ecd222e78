"""`askmany evaluate` end to end on the fake engine: every way of answering, one report."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.jobs import scheduled
from askmany.jobs.evaluate import REPORT, Request, evaluate, main
from askmany.jobs.run import guarded
from askmany.pipeline import eval_schedule
from askmany.pipeline.config import RunConfig
from askmany.pipeline.eval_history import read_history
from askmany.pipeline.result import RunResult, State
from askmany.pipeline.run import run
from askmany.pipeline.scoring import ScoreOptions
from askmany.pipeline.storage import ObjectStore
from tests.helpers.evaluations import Answerer, MovingInput
from tests.helpers.runs import run_values
from tests.helpers.word_model import word_model, words


def request(folder: Path, task: str = "jsonl", **values: object) -> Request:
    rows = [
        {
            "doc_id": f"d{i}",
            "text": words(20, start=i),
            "questions": [{"qid": f"{i}-{j}", "question": f"w{j}", "answers": ["w1"]} for j in range(4)],
        }
        for i in range(3)
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    settings = {"sets": ("engine.backend=fake", "workers.count=1"), "options": ScoreOptions(resamples=200), **values}
    return Request(task, str(data), str(folder / "out"), str(word_model(folder / "model", 512)), **settings)  # type: ignore[arg-type]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_session")
def test_every_way_is_scored_and_compared(tmp_path: Path) -> None:
    report = evaluate(request(tmp_path, baselines=("alone", "batch-prompt"), batch_size=3), Console(quiet=True))
    assert report == json.loads(json.dumps(report))
    assert set(report["ways"]) == {"together", "alone", "batch-prompt"}
    assert (report["documents"], report["questions"]) == (3, 12)
    for way in report["ways"].values():
        assert way["scores"]["items"] == 12
        assert way["seconds"] > 0
    against = report["ways"]["alone"]["scores"]["against"]
    assert (against["pairs"], against["same_answer"]) == (12, 1.0)
    assert report["ways"]["together"]["answer_seconds"] >= 0
    assert (tmp_path / "out" / REPORT).is_file()
    again = evaluate(request(tmp_path, baselines=("alone", "batch-prompt"), batch_size=3), Console(quiet=True))
    assert again == report, "nothing is left to do, and what was done took as long as it did"


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_session")
def test_limits_and_the_printed_report(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert main(request(tmp_path, limit=2, max_questions=1), console) == 0
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert (report["documents"], report["questions"]) == (2, 2)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "exact_match" in printed
    assert REPORT in printed


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("state", "exit_code"), [("interrupted", 4), ("stopped", 3), ("incomplete", 1)])
def test_an_evaluation_that_was_stopped_is_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State, exit_code: int
) -> None:
    def stopped(config: RunConfig, console: Console) -> RunResult:
        return replace(run(config, console=console), state=state, records=5)

    console = Console(file=io.StringIO(), width=200)
    with monkeypatch.context() as patch:
        patch.setattr("askmany.jobs.evaluate.run", stopped)
        assert main(request(tmp_path), console) == exit_code
    assert f"the run is {state}, 7 questions are left" in console.file.getvalue()  # type: ignore[attr-defined]
    assert not (tmp_path / "out" / REPORT).exists()
    assert main(request(tmp_path), console) == 0
    assert (tmp_path / "out" / REPORT).is_file()


@pytest.mark.parametrize(
    ("values", "message"),
    [({"task": "riddles"}, "task 'riddles' is none of squad"), ({"baselines": ("guess",)}, "baseline 'guess' is none of")],
)
def test_what_is_not_known_is_refused(tmp_path: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(request(tmp_path, **values), Console(quiet=True))


class UnheardError(Exception):
    """A SIGTERM that nobody handled."""


@pytest.fixture
def unheard() -> Iterator[None]:
    """A SIGTERM that the code under test leaves alone raises here, where it would end the process."""

    def tell(*_: object) -> None:
        raise UnheardError

    before = signal.signal(signal.SIGTERM, tell)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("unheard")
def test_a_termination_while_scoring_ends_as_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("askmany.jobs.evaluate.evaluate", terminate)
    assert guarded(lambda: main(request(tmp_path), Console(quiet=True))) == 4


@pytest.mark.usefixtures("unheard")
def test_a_termination_while_scoring_on_a_schedule_is_kept_as_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MovingInput(tmp_path / "in").put("d0")
    source = {"uri": str(tmp_path / "in"), "questions": "questions"}
    config = tmp_path / "nightly.yaml"
    config.write_text(json.dumps(run_values(tmp_path, input=source, questions=None)))
    monkeypatch.setattr(scheduled, "evaluate", partial(eval_schedule.evaluate, answer=Answerer()))
    monkeypatch.setattr(eval_schedule, "measure", terminate)
    assert guarded(lambda: scheduled.main(str(config), (), scheduled.Options(), Console(quiet=True))) == 4
    (entry,) = read_history(ObjectStore(str(tmp_path / "out"), {}))
    assert (entry.verdict, entry.exit_code, entry.note) == ("failed", 4, "interrupted")
