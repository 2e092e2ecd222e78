"""Whole runs on a local Ray, from files to answers."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import askmany
from askmany.engine.errors import ConfigError, EngineError
from askmany.pipeline.commit import read_manifest
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.result import RunResult
from askmany.pipeline.run import run
from askmany.pipeline.schema import answer_schema
from askmany.pipeline.storage import ObjectStore
from tests.helpers.engines import deadly_engine, failing_engine, noting_engine, strict_engine
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.word_model import words

pytestmark = pytest.mark.usefixtures("ray_session")
Rows = dict[tuple[str, str], dict[str, Any]]


def rows_of(result: RunResult) -> Rows:
    """Records by document and question; fails when a key comes twice."""
    rows = result.to_table().to_pylist()
    keyed = {(row["doc_id"], row["question_id"]): row for row in rows}
    assert len(keyed) == len(rows) == result.records == sum(result.statuses.values())
    return keyed


def statuses(result: RunResult) -> dict[str, str]:
    return {doc_id: row["status"] for (doc_id, _), row in rows_of(result).items()}


def files_of(folder: Path) -> dict[str, int]:
    found = {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    return {name: time for name, time in found.items() if not name.startswith("lock/")}


def test_t1_over_long_rows(tmp_path: Path) -> None:
    """Context 64, one token a word, a 2-word question, 2 answer tokens: documents of up to 60 words are answered."""
    sizes = (10, 59, 60, 61, 5000)
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": f"{n}", "text": words(n)} for n in sizes])
    result = run(run_values(tmp_path), build_engine=strict_engine)
    assert statuses(result) == {"10": "ok", "59": "ok", "60": "ok", "61": "too_long", "5000": "too_long"}
    rows = {row["doc_id"]: row for row in rows_of(result).values()}
    for size in (61, 5000):
        assert str(size + 4) in rows[str(size)]["error"]
        assert "64" in rows[str(size)]["error"]
    assert all(rows[str(n)]["document_tokens"] == n for n in sizes)
    assert result.exit_code == 0
    with pytest.raises(ConfigError, match="too small for any question"):
        run(run_values(tmp_path, sampling={"max_new_tokens": 64}, output={"uri": str(tmp_path / "other")}))
    assert not (tmp_path / "other").exists()


T10_TEXTS = {
    "rtl": "שלום 🙂🏽 e\u0301 \u202eabc",
    "nul": "a\x00b",
    "crlf": "one\r\ntwo\rthree",
    "line": "w1 " * 350_000,
    "ok": "w1 w2",
}


def test_t10_odd_text(tmp_path: Path) -> None:
    """Odd documents are answered or told apart; nothing that is empty reaches the engine; the output is valid UTF-8."""
    lines: list[Any] = [{"doc_id": doc_id, "text": text} for doc_id, text in T10_TEXTS.items()]
    lines += [{"doc_id": "empty", "text": ""}, {"doc_id": "blank", "text": " \n\u3000"}]
    lines += [b'{"doc_id": "lone", "text": "a\\ud800b"}', b'{"doc_id": "broken", "text": ']
    source = tmp_path / "source"
    source.mkdir()
    write_jsonl(source / "d.jsonl", lines)
    (source / "latin.txt").write_bytes("café".encode("latin-1"))
    (source / "bom.txt").write_bytes(b"\xef\xbb\xbfw3 w4")
    values = run_values(tmp_path, context_tokens=1 << 20, input={"uri": str(source)}, output={"format": "both"})
    result = run(values)
    expected = dict.fromkeys([*T10_TEXTS, "lone", "latin.txt", "bom.txt"], "ok") | {"empty": "empty_document", "blank": "empty_document"}
    assert statuses(result) == expected
    rows = {row["doc_id"]: row for row in rows_of(result).values()}
    assert rows["lone"]["flags"] == ["surrogates_replaced:1"]
    assert rows["latin.txt"]["flags"] == ["encoding:cp1252"]
    assert rows["line"]["document_tokens"] == 350_000
    assert rows["bom.txt"]["document_tokens"] == 2
    assert result.usage["documents"] == 8
    assert result.dead_letters == 1
    (letter,) = [json.loads(line) for line in (tmp_path / "out" / "dead_letters.jsonl").read_text().splitlines()]
    assert (letter["uri"], letter["line"]) == (str(source / "d.jsonl"), 9)
    for line in (tmp_path / "out" / "answers.jsonl").read_bytes().splitlines():
        json.loads(line.decode("utf-8"))
    with pytest.raises(ConfigError, match=r"d\.jsonl:9: malformed JSON.*strict"):
        run({**values, "input": {**values["input"], "strict": True}, "output": {"uri": str(tmp_path / "strict")}})
    with pytest.raises(ConfigError, match="strict"):
        run({**values, "input": {**values["input"], "strict": True}})


def test_every_input_format_and_both_kinds_of_questions(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    own = [{"qid": "mine", "question": "w9", "answers": ["yes"]}]
    (source / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps({"doc_id": "gz", "text": "w1", "qs": own, "title": "T"}).encode()))
    pq.write_table(pa.table({"doc_id": [7], "text": ["w2"], "qs": [["w8 w8"]], "title": [1.5]}), source / "b.parquet")
    (source / "c.csv").write_text('doc_id,text,title,qs\ncsv,w3,"x, y",\n')
    (source / "d.md").write_text("# w4")
    (source / "e.html").write_text("<html><body><p>w5 w6</p></body></html>")
    values = run_values(tmp_path, input={"uri": str(source), "questions": "qs", "keep": ["title"]}, output={"format": "jsonl"})
    values["questions"] = [{"id": "shared", "question": "w1 w2"}]
    result = run(values)
    rows = rows_of(result)
    assert set(rows) >= {(d, "shared") for d in ("gz", "7", "csv", "d.md", "e.html")} | {("gz", "mine")}
    assert len(rows) == 7
    assert result.statuses == {"ok": 7}
    assert rows[("gz", "mine")]["references"] == ["yes"]
    assert [rows[(d, "shared")]["title"] for d in ("gz", "7", "csv", "d.md")] == ["T", "1.5", "x, y", None]
    assert result.to_table().schema.equals(answer_schema(("title",)))
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 7


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    documents = [{"doc_id": f"d{i}", "text": words(1100 + i)} for i in range(6)]  # long enough to be a group each
    write_jsonl(tmp_path / "d.jsonl", documents)
    context = 2048
    first = run(run_values(tmp_path, context, input={"limit": 4}))
    assert (first.documents, first.records, first.launch_records) == (4, 4, 4)
    shards = files_of(tmp_path / "out" / "answers")
    second = run(run_values(tmp_path, context))
    assert (second.documents, second.records, second.launch_records) == (6, 6, 2)
    assert shards.items() <= files_of(tmp_path / "out" / "answers").items()
    before = files_of(tmp_path / "out" / "answers")
    third = run(run_values(tmp_path, context))
    assert (third.records, third.launch_records, third.seconds) == (6, 0, 0.0)
    assert files_of(tmp_path / "out" / "answers") == before
    assert rows_of(third) == rows_of(second)
    assert third.usage == second.usage
    lost, damaged = sorted(before)[:2]
    (tmp_path / "out" / "answers" / lost).unlink()
    (tmp_path / "out" / "answers" / damaged).write_bytes(b"half a shard")
    fourth = run(run_values(tmp_path, context))
    assert (fourth.records, fourth.launch_records) == (6, 2)
    assert {key: row["answer_token_ids"] for key, row in rows_of(fourth).items()} == {
        key: row["answer_token_ids"] for key, row in rows_of(second).items()
    }
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [launch["records"] for launch in record["launches"]] == [4, 2, 2]
    choices = [launch["choices"]["cpu"] for launch in record["launches"]]
    assert [(choice["layout"], choice["rows"], choice["streams"]) for choice in choices] == [
        ("split", 4, 1),
        ("split", 2, 1),
        ("split", 2, 1),
    ]
    assert "4 rows over 4 resident documents" in choices[0]["reason"]
    told = [line for line in read_ledger(ObjectStore(str(tmp_path / "out"), {})) if line.get("event") == "streams chosen"]
    assert [(line["accelerator"], line["reason"]) for line in told] == [("cpu", choice["reason"]) for choice in choices]
    assert (record["records"], record["state"], record["statuses"]) == (6, "complete", {"ok": 6})
    assert record["kv_bytes_saved"] == record["usage"]["kv_bytes_alone"] - record["usage"]["kv_bytes_read"]
    assert record["model"]["revision"] == record["config"]["model_revision"]
    assert not (tmp_path / "out" / "attempts").exists()


def test_an_output_of_another_run_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": "w1 w2"}, {"doc_id": "b", "text": "w3"}])
    run(run_values(tmp_path))
    before = files_of(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds the answers of another run \(different: sampling\.max_new_tokens\)"):
        run(run_values(tmp_path, sampling={"max_new_tokens": 3}, questions=["w7"]))
    with pytest.raises(ConfigError, match=r"different: prompt\.instruction"):
        run(run_values(tmp_path, prompt={"instruction": "w9"}))
    assert files_of(tmp_path / "out") == before


def asked(folder: Path) -> list[tuple[str, str]]:
    """The streams that engines were asked since the last look."""
    path = folder / "asked.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted((line.split()[0], line.split()[1]) for line in lines)


@pytest.mark.timeout(600)
def test_edits_of_questions_and_documents_ask_only_what_is_new(tmp_path: Path) -> None:
    rows = [{"doc_id": f"d{i}", "text": words(5 + i)} for i in range(4)]
    one, two, three = ({"id": f"q{n}", "question": f"w{n}"} for n in (1, 2, 3))
    ids = [row["doc_id"] for row in rows]
    console = Console(record=True, width=200, file=io.StringIO())

    def go(*questions: dict[str, str]) -> RunResult:
        values = run_values(tmp_path, questions=list(questions), output={"shard_documents": 2, "format": "both"})
        result = run(values, build_engine=noting_engine, console=console)
        rows_of(result)
        assert set(files_of(tmp_path / "out" / "answers")) == {name.removeprefix("answers/") for name in read_manifest(store).shards}
        assert (result.documents, result.planned_documents, result.state) == (len(rows), len(rows), "complete")
        return result

    store = ObjectStore(str(tmp_path / "out"), {})
    write_jsonl(tmp_path / "d.jsonl", rows)
    go(one, two)
    assert asked(tmp_path) == [(doc_id, q) for doc_id in ids for q in ("q1", "q2")]
    before = files_of(tmp_path / "out" / "answers")
    added = go(one, two, three)
    assert asked(tmp_path) == [(doc_id, "q3") for doc_id in ids]
    assert before.items() <= files_of(tmp_path / "out" / "answers").items()
    assert (added.records, added.launch_records) == (12, 4)
    rows[2] = {**rows[2], "text": words(9, 50)}
    del rows[0]
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "new", "text": words(3)}, *rows])
    rows = [{"doc_id": "new"}, *rows]
    edited = go({**one, "question": "w8"}, three)
    assert asked(tmp_path) == sorted([(row["doc_id"], "q1") for row in rows] + [("d2", "q3"), ("new", "q3")])
    assert (edited.records, edited.launch_records) == (8, 6)
    assert "2 answers of earlier plans carried over" in console.export_text()
    back = go({**one, "question": "w8"}, two, three)
    assert asked(tmp_path) == [("d2", "q2"), ("new", "q2")]
    assert (back.records, back.statuses) == (12, {"ok": 12})
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 12


def test_inputs_that_refuse_the_run_after_a_look_at_every_document(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": "w1"}, {"doc_id": "b", "text": "w1"}, {"doc_id": "a", "text": "w2"}])
    with pytest.raises(ConfigError, match=r"doc_id 'a' occurs 2 times: .*d\.jsonl:1 and .*d\.jsonl:3"):
        run(run_values(tmp_path))
    own = [{"qid": "x", "question": "w1"}, {"qid": "x", "question": "w2"}]
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": "w1", "qs": own}])
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: question id 'x' is given twice"):
        run(run_values(tmp_path, input={"questions": "qs"}))
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": "w1", "qs": []}, b"{"])
    with pytest.raises(ConfigError, match=r"no document with a question .*1 rows are no documents.*1 documents have no question"):
        run(run_values(tmp_path, input={"questions": "qs"}, questions=None))
    assert files_of(tmp_path / "out") == {}


def test_workers_that_die_are_replaced_and_poison_becomes_records(tmp_path: Path) -> None:
    ids = ["kills-once", "kills", *(f"d{i}" for i in range(4))]
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": doc_id, "text": words(5 + i)} for i, doc_id in enumerate(ids)])
    (tmp_path / "out").mkdir()
    result = run(run_values(tmp_path, workers={"max_attempts": 3}), build_engine=deadly_engine)
    rows = {row["doc_id"]: row for row in rows_of(result).values()}
    assert rows["kills"]["status"] == "error"
    assert rows["kills"]["error"].startswith("worker_lost")
    assert {doc_id: row["status"] for doc_id, row in rows.items() if doc_id != "kills"} == dict.fromkeys(set(ids) - {"kills"}, "ok")
    assert rows["kills-once"]["attempt"] >= 2
    assert result.exit_code == 3


def test_an_engine_that_cannot_be_built_ends_the_run_and_keeps_the_output_in_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": "w1"}])
    with pytest.raises(EngineError, match="RuntimeError: no such device") as caught:
        run(run_values(tmp_path), build_engine=failing_engine)
    assert "in failing_engine" in caught.value.__notes__[0]
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["state"], record["records"]) == ("failed", 0)
    assert run(run_values(tmp_path)).records == 1


def test_a_dry_run_shows_the_plan_and_leaves_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": words(40)}, {"doc_id": "b", "text": words(99)}])
    console = Console(record=True, width=200, file=io.StringIO())
    result = run(run_values(tmp_path), dry_run=True, console=console)
    text = console.export_text()
    assert "2 documents, 2 questions" in text
    assert "139 document tokens (longest 99)" in text
    assert "1 question needs no engine" in text
    assert (result.state, result.records, result.planned_records, result.exit_code) == ("planned", 0, 2, 0)
    assert not (tmp_path / "out").exists()


def test_the_public_name_runs_a_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": "w1"}])
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(run_values(tmp_path)))
    result = askmany.run(path)
    assert isinstance(result, askmany.RunResult)
    assert result.records == 1
