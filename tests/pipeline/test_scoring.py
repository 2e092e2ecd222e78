"""Scores of stored runs: every kind of answer, comparisons, and answers that stay as they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline import score_report, scoring
from askmany.pipeline.schema import Record
from askmany.pipeline.score_items import read_gold
from askmany.pipeline.score_report import ScoreRequest, score_run
from askmany.pipeline.scoring import ScoreOptions
from tests.helpers.stored import labelled, stored_run

OPTIONS = ScoreOptions(resamples=500)


def text(doc_id: str, question_id: str, answer: str, *references: str, **values: object) -> Record:
    return Record(doc_id, question_id, "ok", answer, references=references or None, **values)  # type: ignore[arg-type]


def mixed(folder: Path) -> str:
    sure, unsure = {"yes": 0.9, "no": 0.1}, {"yes": 0.45, "no": 0.55}
    first = [
        text("a", "t", "the Cat", "cat"),
        labelled("a", "c", sure, ["yes"]),
        Record("a", "i", "ok", "99", answer_type="int", value="99", value_number=99.0, references=["100"]),
        Record("a", "j", "ok", '{"x":1}', answer_type="json", value='{"x":1}', references=['{ "x": 1 }']),
        Record("a", "m", "ok", '["u","v"]', answer_type="multi_choice", value='["u","v"]', references=["v", "u"]),
        Record("a", "n", "ok", "unasked"),
    ]
    second = [
        text("b", "t", "a dog", "cat"),
        labelled("b", "c", unsure, ["Yes"]),
        Record("b", "i", "invalid_output", "many", answer_type="int", references=["3"], error="x"),
        Record("b", "m", "ok", '["u"]', answer_type="multi_choice", value='["u"]', references=["u", "v"]),
        Record("b", "z", "too_long", error="x", references=["1"]),
    ]
    return stored_run(folder, {"g1": first, "g2": second})


def test_every_kind_has_its_metrics(tmp_path: Path) -> None:
    report = score_run(ScoreRequest(mixed(tmp_path), options=ScoreOptions(tolerance=0.01, resamples=500)))
    kinds = report["kinds"]
    means = {(kind, name): found["mean"] for kind, values in kinds.items() for name, found in values["metrics"].items()}
    assert means == {
        ("text", "exact_match"): 0.5,
        ("text", "f1"): 0.5,
        ("text", "token_recall"): 0.5,
        ("choice", "accuracy"): 0.5,
        ("int", "numeric_match"): 0.5,
        ("json", "exact_json"): 1.0,
        ("multi_choice", "exact_set"): 0.5,
    }
    assert report["left_out"] == {"no reference": 1, "status too_long": 1}
    assert kinds["int"]["illegal"] == 1
    assert kinds["choice"]["classes"]["yes"] == {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "truths": 2, "answers": 1}
    assert kinds["choice"]["means"]["macro_f1"]["mean"] == pytest.approx(1 / 3)
    assert kinds["multi_choice"]["means"]["micro_f1"]["mean"] == pytest.approx(6 / 7)
    assert kinds["choice"]["calibration"]["ece"] == pytest.approx((0.1 + 0.55) / 2)


def test_the_files_of_a_report(tmp_path: Path) -> None:
    output = mixed(tmp_path)
    report = score_run(ScoreRequest(output, options=OPTIONS))
    assert json.loads((tmp_path / "scores/report.json").read_text()) == json.loads(json.dumps(report))
    assert (tmp_path / "scores/reliability-choice.png").read_bytes().startswith(b"\x89PNG")
    rows = pq.read_table(tmp_path / "scores/items.parquet").to_pylist()
    assert {"doc_id": "a", "question_id": "t", "chunk": 0, "metric": "f1", "score": 1.0} in rows
    assert len({(row["doc_id"], row["question_id"]) for row in rows}) == report["items"] == 9


def test_a_failing_scorer_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = mixed(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(scoring, "token_f1", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_run(ScoreRequest(output, options=OPTIONS))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_plot_that_cannot_be_drawn_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise ConfigError("the reliability plot needs matplotlib")

    monkeypatch.setattr(score_report, "reliability_png", refuse)
    report = score_run(ScoreRequest(mixed(tmp_path), options=OPTIONS))
    assert report["notes"] == ["the reliability plot needs matplotlib"]
    assert (tmp_path / "scores/report.json").is_file()


def test_two_runs_are_compared_answer_by_answer(tmp_path: Path) -> None:
    ours = [[text(f"d{d}", f"q{q}", "right" if (d + q) % 3 else "wrong", "right") for q in range(4)] for d in range(6)]
    theirs = [[text(f"d{d}", f"q{q}", "right" if (d + q) % 2 else "wrong", "right") for q in range(4)] for d in range(6)]
    theirs[0] = theirs[0][:2]
    one = stored_run(tmp_path / "ours", {f"g{i}": records for i, records in enumerate(ours)})
    two = stored_run(tmp_path / "theirs", {f"g{i}": records for i, records in enumerate(theirs)})
    found = score_run(ScoreRequest(one, against=two, options=OPTIONS))["against"]
    assert (found["pairs"], found["unmatched"]) == (22, 2)
    pairs = [(a.answer == "right", b.answer == "right") for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=False)]
    expected = sum(a - b for a, b in pairs) / len(pairs)
    difference = found["metrics"]["text.exact_match"]["difference"]
    assert difference["mean"] == pytest.approx(expected)
    assert difference["low"] <= expected <= difference["high"]
    assert found["same_answer"] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))


def test_references_from_a_gold_file(tmp_path: Path) -> None:
    output = stored_run(tmp_path / "run", {"g": [text("a", "q", "cat"), text("a", "r", "dog"), text("b", "q", "3")]})
    gold = tmp_path / "gold.jsonl"
    lines = [
        {"doc_id": "a", "questions": [{"qid": "q", "answers": ["cat", "tom"]}]},
        {"doc_id": "b", "question_id": "q", "answers": 3},
    ]
    gold.write_text("\n".join(map(json.dumps, lines)))
    report = score_run(ScoreRequest(output, gold=str(gold), options=OPTIONS))
    assert report["items"] == 2
    assert report["kinds"]["text"]["metrics"]["exact_match"]["mean"] == 1.0


@pytest.mark.parametrize(("content", "message"), [("", "no gold answers"), ('{"doc_id": "a"}', r"gold.jsonl:1"), ("{", r"gold.jsonl:1")])
def test_a_bad_gold_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "gold.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_gold(str(tmp_path / "gold.jsonl"), {})


def test_a_packed_gold_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gold.jsonl.gz").write_bytes(gzip.compress(b'{"doc_id": "a", "qid": "q", "answers": ["x"]}')[:-9])
    with pytest.raises(ConfigError, match=r"gold.jsonl.gz: the gold file cannot be read: Compressed file ended"):
        read_gold(str(tmp_path / "gold.jsonl.gz"), {})


def test_nothing_to_score_is_refused(tmp_path: Path) -> None:
    output = stored_run(tmp_path, {"g": [text("a", "q", "cat"), Record("a", "r", "error", error="x")]})
    with pytest.raises(ConfigError, match="nothing to score: 1 no reference; 1 status error"):
        score_run(ScoreRequest(output, options=OPTIONS))
