"""`askmany evaluate` end to end on the fake engine: every way of answering, one report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.jobs.evaluate import REPORT, Request, evaluate, main
from askmany.pipeline.config import RunConfig
from askmany.pipeline.result import RunResult, State
from askmany.pipeline.run import run
from askmany.pipeline.scoring import ScoreOptions
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
