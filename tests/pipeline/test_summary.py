"""What a person sees at the end."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from askmany.pipeline.commit import Manifest
from askmany.pipeline.result import RunResult
from askmany.pipeline.schema import Record, to_table
from askmany.pipeline.summary import (
    answer_table,
    document_label,
    figures,
    kv_element_bytes,
    many,
    print_summary,
    printable,
    size,
    statuses,
    waves,
)
from tests.helpers.runs import opened_run, run_config, survey


def result(**values: Any) -> RunResult:
    base: dict[str, Any] = {
        "output": "out",
        "state": "complete",
        "documents": 10,
        "records": 40,
        "planned_documents": 10,
        "planned_records": 40,
        "statuses": {"ok": 38, "error": 2},
        "dead_letters": 0,
        "unasked_documents": 0,
        "document_tokens": 1000,
        "seconds": 36.0,
        "launch_records": 40,
        "usage": {"answer_tokens": 360, "kv_bytes_read": 1e9, "kv_bytes_alone": 5e9},
        "max_error_fraction": 0.0,
    }
    return RunResult(**{**base, **values})


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, 3),
        ({"max_error_fraction": 0.05}, 0),
        ({"statuses": {"ok": 30, "too_long": 10}}, 0),
        ({"state": "interrupted"}, 4),
        ({"state": "incomplete"}, 1),
        ({"state": "failed"}, 1),
        ({"state": "planned", "records": 0, "statuses": {}}, 0),
    ],
)
def test_exit_codes(values: dict[str, Any], code: int) -> None:
    assert result(**values).exit_code == code


def test_figures() -> None:
    first, second = figures(result())
    assert first == "36 s: 1,000 documents/hour, 1.1 answers/s, 10.0 answer tokens/s"
    assert second == "KV read 1.0 GB where one request per question reads 5.0 GB: 5.0 times less, 4.0 GB saved"
    half = figures(result(launch_records=20))[0]
    assert half == "36 s: 500 documents/hour, 0.6 answers/s, 5.0 answer tokens/s"
    assert figures(result(usage={}, launch_records=0)) == []
    assert "0.5 times less, -1.0 GB saved" in figures(result(usage={"kv_bytes_read": 2e9, "kv_bytes_alone": 1e9}))[1]


def test_small_words() -> None:
    assert statuses({"ok": 1200, "error": 1}) == "1,200 ok, 1 error"
    assert statuses({}) == "none"
    assert [size(n) for n in (0, 999, 1000, 1.5e6, 2e15, -3e9)] == ["0 B", "999 B", "1.0 kB", "1.5 MB", "2,000.0 TB", "-3.0 GB"]
    assert (many(1, "document"), many(2000, "document"), many(2, "row is", "rows are")) == ("1 document", "2,000 documents", "2 rows are")
    assert printable("a\x1b[31m\nb\u202e\tc ") == "a [31m b  c"


def shown(table: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_answers_are_shown_as_they_are_in_any_width(width: int) -> None:
    records = [
        Record("[red]d1", "q1", "ok", "[bold]an answer[/bold]", (1,), "stop", question="What [link=x]is[/link] it?"),
        Record("d2" * 20, "q1", "ok", "word " * 50, (1,), "length", question="Why? " * 30),
        Record("d3", "q1", "too_long", error="99 tokens"),
    ]
    lines = shown(answer_table(to_table(records), width), width)
    assert lines[0].split() == ["document", "question", "answer", "status"]
    assert len(lines) == 4
    assert all(len(text) <= width for text in lines)
    text = "\n".join(lines)
    assert "[red]d1" in text
    assert "ok (length)" in text
    assert "too_long" in text


def summary(folder: Path, quiet: bool = False, shape: str = "parquet", **values: Any) -> str:
    config = run_config(folder, output={"format": shape})
    console = Console(file=io.StringIO(), width=80, quiet=quiet)
    manifest = Manifest("f", True, 40, 10, 40, {}, {}, {})
    print_summary(console, result(**values), manifest, config)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_says_where_things_are_and_what_to_do(tmp_path: Path) -> None:
    text = summary(tmp_path)
    assert "done: 40 of 40 records (38 ok, 2 error)" in text
    assert f"answers: {tmp_path}/out/answers/*.parquet" in text
    assert "again" not in text
    text = summary(tmp_path, shape="both", state="interrupted", dead_letters=3)
    assert "interrupted: 40 of 40" in text
    assert "dead letters: 3 in" in text
    assert "answers.jsonl" in text
    assert "run the same command again" in text
    assert summary(tmp_path, quiet=True) == ""


def test_waves_and_kv_bytes(tmp_path: Path) -> None:
    questions = [f"w{i}" for i in range(10)]
    opened = opened_run(tmp_path, [{"doc_id": "a", "text": "w1"}], questions=questions, engine={"streams": 4})
    table = survey(opened).documents
    assert waves(opened, table) == 3
    assert waves(opened, table.slice(0, 0)) == 0
    assert kv_element_bytes(opened) == 4
    half = opened_run(tmp_path, [{"doc_id": "a", "text": "w1"}], engine={"dtype": "bfloat16"})
    assert kv_element_bytes(half) == 2


def test_a_chunk_is_told_apart() -> None:
    assert document_label({"doc_id": "a", "flags": ["seen:1"]}) == "a"
    assert document_label({"doc_id": "a", "flags": ["seen:1", "chunk:2/5", "chunk_chars:10-20"]}) == "a [2/5]"
