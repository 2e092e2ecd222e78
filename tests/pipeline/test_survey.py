"""The survey: spans in blocks, rows that are documents, dead letters or refusals, in input order whatever order tasks end in."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline import survey as surveying
from askmany.pipeline.building import build_preparer
from askmany.pipeline.opening import open_run
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.questions import QuestionSetError
from askmany.pipeline.readers import Span, plan_spans
from askmany.pipeline.survey import gather, pack_spans, run_survey, survey_spans
from tests.helpers.runs import opened_run, run_config, survey, write_jsonl


def span(size: int, number: int = 0) -> Span:
    return Span(f"f{number}", "f", "jsonl", 0, size, size)


def test_spans_are_packed_by_bytes_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "TASK_BYTES", 100)
    monkeypatch.setattr(surveying, "TASK_SPANS", 3)
    blocks = pack_spans(span(size, n) for n, size in enumerate([60, 60, 10, 10, 10, 10, 500, 1]))
    assert [block.num_rows for block in blocks] == [1, 3, 2, 1, 1]
    assert [uri for block in blocks for uri in block.column("uri").to_pylist()] == [f"f{n}" for n in range(8)]
    assert pack_spans([]) == []


@pytest.mark.parametrize("span_bytes", [1, 7, 50, 1 << 20])
def test_cut_files_give_the_same_survey_with_exact_lines(tmp_path: Path, span_bytes: int) -> None:
    rows = [{"doc_id": f"d{i}", "text": "w1 " * i} for i in range(1, 9)]
    opened = opened_run(tmp_path, [*rows[:3], b"{bad", b"", *rows[3:], b"[1]"])
    spans = [s for file in opened.files for s in plan_spans(file, opened.config.input, span_bytes)]
    tables = [survey_spans(block, opened.config.input, opened.preparer) for s in spans for block in pack_spans([s])]
    random.Random(span_bytes).shuffle(tables)
    found, whole = gather(tables, opened.config.input), survey(opened)
    assert found.documents.column("doc_id").to_pylist() == [f"d{i}" for i in range(1, 9)]
    assert found.documents.drop_columns(["line"]).equals(whole.documents.drop_columns(["line"]))
    assert [letter.locator.line for letter in found.dead_letters] == [4, 11]


def test_a_limit_takes_the_first_documents(tmp_path: Path) -> None:
    rows = [{"doc_id": f"d{i}", "text": "w1"} for i in range(9)]
    found = survey(opened_run(tmp_path, [b"{bad", *rows], input={"limit": 4}))
    assert found.documents.column("doc_id").to_pylist() == ["d0", "d1", "d2", "d3"]


def test_documents_that_are_asked_nothing_are_counted(tmp_path: Path) -> None:
    rows = [{"doc_id": "a", "text": "w1", "qs": ["w2"]}, {"doc_id": "b", "text": "w1", "qs": []}, {"doc_id": "c", "text": "w1"}]
    found = survey(opened_run(tmp_path, rows, input={"questions": "qs"}, questions=None))
    assert (found.documents.num_rows, found.unasked) == (1, 2)


def test_malformed_own_questions_are_dead_letters(tmp_path: Path) -> None:
    rows = [{"doc_id": "a", "text": "w1", "qs": 7}, {"doc_id": "b", "text": "w1", "qs": [{"question": "w2"}]}]
    found = survey(opened_run(tmp_path, rows, input={"questions": "qs"}))
    (letter,) = found.dead_letters
    assert (letter.doc_id, letter.locator.line) == ("a", 1)
    assert "questions must be a list" in letter.reason


@pytest.mark.parametrize(("error", "refused"), [(QuestionSetError("q: bad type"), True), (ValueError("odd"), False)])
def test_what_preparing_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, refused: bool) -> None:
    opened = opened_run(tmp_path, [{"doc_id": "a", "text": "w1"}])

    def prepare(self: Preparer, source: Any) -> Any:
        raise error

    monkeypatch.setattr(Preparer, "parts", prepare)
    if refused:
        with pytest.raises(ConfigError, match="q: bad type"):
            survey(opened)
    else:
        assert survey(opened).dead_letters[0].reason == "ValueError: odd"


@pytest.mark.usefixtures("ray_session")
def test_tasks_of_the_cluster_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "TASK_SPANS", 2)
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(5):
        write_jsonl(folder / f"{n}.jsonl", [{"doc_id": f"d{n}-{i}", "text": "w1 w2"} for i in range(3)])
    opened = open_run(run_config(tmp_path, input={"uri": str(folder)}))
    spans = [s for file in opened.files for s in plan_spans(file, opened.config.input, 1 << 20)]
    found = run_survey(spans, opened.config, build_preparer)
    assert found.documents.equals(survey(opened).documents)
    assert run_survey([], opened.config, build_preparer).documents.num_rows == 0
    json.dumps(found.documents.drop_columns(["content_hash"]).to_pylist())
