"""Whole runs in processes of their own, in trouble: poison, hangs, signals, late errors, two at once."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from askmany.pipeline.commit import list_shards, read_manifest
from askmany.pipeline.heartbeat import read_status
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.storage import ObjectStore
from tests.helpers.chaos import answers, shards
from tests.helpers.child_run import Trouble, result_of, run_child, run_here, start
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.word_model import words

pytestmark = pytest.mark.timeout(600)


def values(folder: Path, address: str, count: int = 20, **sections: Any) -> dict[str, Any]:
    """`count` documents of a few words, two questions each, two workers."""
    write_jsonl(folder / "d.jsonl", [{"doc_id": f"doc-{n}", "text": words(4 + n % 9, n)} for n in range(count)])
    workers = {"count": 2, "cpus": 0.25, "address": address, **sections.pop("workers", {})}
    questions = sections.pop("questions", ["w1 w2", "w3"])
    return run_values(folder, questions=questions, workers=workers, metrics={"heartbeat_s": 0.5}, **sections)


@pytest.mark.parametrize("dispatch", ["ray_data", pytest.param("direct", marks=pytest.mark.slow)])
def test_a_poison_document_is_given_up_and_every_other_answered(tmp_path: Path, ray_address: str, dispatch: str) -> None:
    log = tmp_path / "log"
    log.mkdir()
    config = values(tmp_path, ray_address, workers={"dispatch": dispatch}, output={"shard_documents": 5})
    result = run_child(tmp_path, config, Trouble(abort=("doc-13",), log=str(log)), limit_s=200)
    assert result["exit_code"] == 3
    assert result["statuses"] == {"ok": 38, "error": 2}
    found = answers(tmp_path / "out")
    assert {key[0] for key, row in found.items() if row[0] == "error"} == {"doc-13"}
    processes = {path.name for path in log.iterdir() if path.name.startswith("doc-13-")}
    assert 2 <= len(processes) <= 3
    rows = [row for path in (tmp_path / "out/answers").iterdir() for row in pq.read_table(path).to_pylist()]
    assert {row["error"] for row in rows if row["doc_id"] == "doc-13"} == {
        "worker_lost: the worker process ended at each of 3 tries of this document"
    }
    assert read_status(ObjectStore(str(tmp_path / "out"), {})).restarts >= 1


def test_a_hang_ends_its_worker_alone_and_the_run_ends_by_itself(tmp_path: Path, ray_address: str) -> None:
    config = values(tmp_path, ray_address, workers={"watchdog_s": 2.0}, output={"shard_documents": 4})
    result = run_child(tmp_path, config, Trouble(hang=("doc-4",), once=str(tmp_path / "hung")), limit_s=150)
    assert result["exit_code"] == 0, result
    assert result["statuses"] == {"ok": 40}
    (stacks,) = (tmp_path / "out/stacks").iterdir()
    text = stacks.read_text()
    assert "worker_hung" in text
    assert "child_run.py" in text
    silent = float(text.partition("silent_s=")[2].partition(",")[0])
    assert 2.0 <= silent <= 4.0


@pytest.mark.slow
def test_a_late_first_error_changes_no_schema(tmp_path: Path, ray_address: str) -> None:
    """The optional count is null in every record of the first shards and the one failing document is in the last."""
    rows = [{"doc_id": f"doc-{n:03d}", "text": words(5, n)} for n in range(299)] + [{"doc_id": "zzz", "text": words(90)}]
    config = values(tmp_path, ray_address, questions=["w1"], output={"shard_documents": 100})
    write_jsonl(tmp_path / "d.jsonl", rows)
    result = run_child(tmp_path, config)
    assert result["statuses"] == {"ok": 299, "too_long": 1}
    paths = sorted((tmp_path / "out/answers").iterdir())
    schemas = [pq.read_schema(path).remove_metadata() for path in paths]
    assert len(paths) >= 3
    assert all(schema.equals(schemas[0]) for schema in schemas)
    assert ds.dataset(paths, schema=schemas[0]).to_table().num_rows == 300


@pytest.mark.parametrize(
    ("dispatch", "number"), [("ray_data", signal.SIGTERM), pytest.param("direct", signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_keeps_what_is_answered_and_exits_4(tmp_path: Path, ray_address: str, dispatch: str, number: int) -> None:
    log = tmp_path / "log"
    log.mkdir()
    workers = {"dispatch": dispatch, "count": 1}
    config = values(tmp_path, ray_address, 60, workers=workers, output={"shard_documents": 30}, engine={"max_rows": 2})
    process = start(tmp_path, config, Trouble(log=str(log), pause_s=0.15))
    out = tmp_path / "out"
    while not (len(list(log.iterdir())) >= 30) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1.5)
    began = time.monotonic()
    os.kill(process.pid, number)
    result = result_of(process)
    assert result["exit_code"] == 4
    assert result["state"] == "interrupted"
    assert time.monotonic() - began < 15
    status = read_status(ObjectStore(str(out), {}))
    assert status.state == "interrupted"
    kept = sum(pq.read_table(path).num_rows for path in out.glob("attempts/*/*.parquet"))
    assert kept > 0
    again = tmp_path / "again"
    again.mkdir()
    result = run_child(tmp_path, config, Trouble(log=str(again)))
    assert result["exit_code"] == 0, result
    taken = {path.name.rpartition("-")[0] for path in again.iterdir()}
    assert len(taken) <= 60 - kept // 2
    assert len(answers(out)) == 120
    assert not list(out.glob("attempts/*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["ray_data", "direct"])
def test_a_preempted_worker_keeps_what_is_answered_and_is_charged_nothing(tmp_path: Path, ray_address: str, dispatch: str) -> None:
    log = tmp_path / "log"
    log.mkdir()
    workers = {"dispatch": dispatch, "count": 1, "max_attempts": 1}
    config = values(tmp_path, ray_address, workers=workers, engine={"max_rows": 2})
    process = start(tmp_path, config, Trouble(log=str(log), pause_s=0.15))
    while not list(log.iterdir()) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1.0)
    pid = int(next(log.iterdir()).name.rpartition("-")[2])
    os.kill(pid, signal.SIGTERM)
    result = result_of(process)
    assert result["exit_code"] == 0, result
    assert result["statuses"] == {"ok": 40}
    assert len({path.name.rpartition("-")[2] for path in log.iterdir()}) == 2


def test_two_runs_on_one_output(tmp_path: Path, ray_address: str) -> None:
    config = values(tmp_path, ray_address, workers={"count": 1}, output={"shard_documents": 4})
    first = start(tmp_path, config, Trouble(pause_s=0.1))
    while not (tmp_path / "out/lock").exists() and first.poll() is None:
        time.sleep(0.02)
    refused = run_here(config)
    assert refused["exit_code"] == 2
    assert refused["type"] == "RunLockedError"
    assert "is running there" in refused["error"]
    waited = run_here(config, if_running="wait")
    assert result_of(first)["exit_code"] == 0
    assert waited["exit_code"] == 0
    assert waited["launch_records"] == 0
    assert len(answers(tmp_path / "out")) == 40


@pytest.mark.slow
def test_a_run_that_is_taken_over_stops_and_writes_no_more(tmp_path: Path, ray_address: str) -> None:
    config = values(tmp_path, ray_address, workers={"count": 1, "dispatch": "direct"}, output={"shard_documents": 4})
    first = start(tmp_path, config, Trouble(pause_s=0.3))
    while not shards(tmp_path / "out") and first.poll() is None:
        time.sleep(0.05)
    second = run_child(tmp_path, config, if_running="takeover")
    assert second["exit_code"] == 0, second
    lost = result_of(first)
    assert lost["type"] == "LockLostError", lost
    assert len(answers(tmp_path / "out")) == 40
    assert read_manifest(ObjectStore(str(tmp_path / "out"), {})).complete


@pytest.mark.slow
def test_the_breaker_ends_a_run_of_errors_early(tmp_path: Path, ray_address: str) -> None:
    config = values(tmp_path, ray_address, 60, output={"shard_documents": 5}, errors={"stop_sample": 20, "stop_fraction": 0.3})
    config["workers"] |= {"max_attempts": 1, "count": 1, "dispatch": "direct"}
    result = run_child(tmp_path, config, Trouble(abort=tuple(f"doc-{n}" for n in range(60))), limit_s=200)
    assert result["exit_code"] == 3
    assert result["state"] == "stopped"
    assert 20 <= result["records"] < 120
    assert "stop_fraction" in read_status(ObjectStore(str(tmp_path / "out"), {})).message


def test_errors_are_tried_again_when_asked_for_and_nothing_else_is(tmp_path: Path, ray_address: str) -> None:
    config = values(tmp_path, ray_address, workers={"max_attempts": 2}, output={"shard_documents": 5})
    assert run_here(config, Trouble(abort=("doc-13",)))["statuses"] == {"ok": 38, "error": 2}
    before = answers(tmp_path / "out")
    log = tmp_path / "log"
    log.mkdir()
    assert run_here(config, Trouble(log=str(log)))["launch_records"] == 0
    result = run_here(config, Trouble(log=str(log)), retry_errors=True)
    assert result["statuses"] == {"ok": 40}
    assert {path.name.rpartition("-")[0] for path in log.iterdir()} == {"doc-13"}
    after = answers(tmp_path / "out")
    assert {key: row for key, row in after.items() if key[0] != "doc-13"} == {k: r for k, r in before.items() if k[0] != "doc-13"}


@pytest.mark.slow
def test_an_unreadable_shard_is_redone_with_a_warning_and_finished_ones_are_not_opened(tmp_path: Path, ray_address: str) -> None:
    config = values(tmp_path, ray_address, output={"shard_documents": 4})
    assert run_child(tmp_path, config)["exit_code"] == 0
    out = tmp_path / "out"
    before = answers(out)
    store = ObjectStore(str(out), {})
    names = list(list_shards(store))
    store.put(names[0], store.get(names[0])[:-30])
    times = {name: os.stat(out / name).st_mtime_ns for name in names[1:]}
    log = tmp_path / "log"
    log.mkdir()
    result = run_child(tmp_path, config, Trouble(log=str(log)))
    assert result["exit_code"] == 0
    assert answers(out) == before
    assert len(list(log.iterdir())) <= 4
    assert {name: os.stat(out / name).st_mtime_ns for name in names[1:]} == times
    events = [line for line in read_ledger(store) if line.get("event") == "redone"]
    assert [event["object"] for event in events] == [names[0]]


def test_every_figure_agrees_also_after_a_resume(tmp_path: Path, ray_address: str) -> None:
    config = values(tmp_path, ray_address, 60, output={"shard_documents": 10})
    config["metrics"] |= {"host": "127.0.0.1", "port": unused_port()}
    process = start(tmp_path, config, Trouble(pause_s=0.1))
    out = tmp_path / "out"
    while shards(out) < 2 and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    result = run_child(tmp_path, config, watched=str(tmp_path))
    store = ObjectStore(str(out), {})
    manifest, status = read_manifest(store), read_status(store)
    run = json.loads(store.get("run.json"))
    assert manifest.records == status.done == run["records"] == result["records"] == len(answers(out)) == 120
    assert manifest.documents == status.documents_done == run["documents"] == 60
    assert dict(manifest.statuses) == dict(status.statuses) == run["statuses"] == result["statuses"]
    assert dict(manifest.usage) == dict(status.tokens) == run["usage"] == result["usage"]
    assert result["launch_records"] < 120
    page = (out / "report.html").read_text()
    assert "<b>120</b>" in page
    assert "of 120 planned" in page
    console = (tmp_path / "console.txt").read_text()
    progress = [line for line in console.splitlines() if " documents · " in line][-1]
    answered = result["launch_records"]  # a progress line tells of its own launch
    assert progress.startswith(f"{answered // 2}/{answered // 2} documents · {answered}/{answered} questions · ")
    assert f"done: 120 of 120 records ({', '.join(f'{count} {status}' for status, count in manifest.statuses.items())})" in console
    scraped = scrape(tmp_path / "scrape.txt")
    assert (scraped["askmany_documents_total"], scraped["askmany_planned_documents"]) == (60, 60)
    assert sum(value for name, value in scraped.items() if name.startswith("askmany_records_total")) == 120
    assert {name: scraped[f'askmany_records_total{{status="{name}"}}'] for name in manifest.statuses} == dict(manifest.statuses)
    assert scraped["askmany_shards_total"] == len(manifest.shards) == 6
    for name in ("answer_tokens", "decode_tokens", "tail_tokens", "steps", "kv_bytes_read"):
        assert scraped[f"askmany_{name}_total"] == manifest.usage[name]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(file: Path) -> dict[str, float]:
    """The samples of a scrape, by name and labels."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
