"""The commands that look at an output: status, report, gc, resume, doctor. The output is made by a worker in the test's own process."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from askmany.engine.errors import ConfigError
from askmany.engine.fake import fake_engine
from askmany.jobs.cli import app
from askmany.jobs.output_uri import storage_options
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.building import build_preparer
from askmany.pipeline.commit import PLAN, list_shards, seal
from askmany.pipeline.finishing import launches
from askmany.pipeline.heartbeat import read_status, write_status
from askmany.pipeline.lock import RunLock
from askmany.pipeline.opening import OpenedRun
from askmany.pipeline.plan import make_plan, to_bytes
from askmany.pipeline.planning import PlannedRun, made_from
from askmany.pipeline.recording import Recorder
from askmany.pipeline.result import make_result, run_values
from askmany.pipeline.run_file import write_run
from askmany.pipeline.worker import GroupWorker, Job
from tests.helpers.runs import opened_run, survey
from tests.helpers.word_model import words

RUNNER = CliRunner()


def make_output(folder: Path, groups_done: int | None = None) -> OpenedRun:
    """A finished run of six documents in three groups, or one in which only some groups are done and no seal is made."""
    rows = [{"doc_id": f"d{n}", "text": words(5, n)} for n in range(6)]
    opened = opened_run(folder, rows, questions=["w1", "w2"], output={"shard_documents": 2})
    plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits(max_documents=2))
    planned = PlannedRun(plan, plan.groups, {}, 0, 0)
    opened.store.put(PLAN, to_bytes(plan, made_from(opened)))
    recorder = Recorder(opened.store, opened.config, opened.fingerprint, 1, planned)
    worker = GroupWorker(Job(opened.config, opened.fingerprint, 1, lambda c: fake_engine(c.engine), build_preparer), lambda error: None)
    shards = {}
    for group in plan.groups[:groups_done]:
        ack = worker.process(group.name, plan.rows(group))
        recorder.book(ack)
        shards[group.name] = ack.shard
    recorder.flush()
    worker.close()
    write_run(opened.store, run_values(opened, make_result(opened, planned, None, "running"), launches(opened)))
    if groups_done is None:
        manifest = seal(opened.store, opened.fingerprint, {g.name: g.records for g in plan.groups}, shards)
        write_run(opened.store, run_values(opened, make_result(opened, planned, manifest, "complete", 1.0, 12), [{"seconds": 1.0}]))
        recorder.settle(manifest, "finished")
    else:
        write_status(opened.store, recorder.snapshot())
    return opened


def test_status_of_a_finished_run(tmp_path: Path) -> None:
    opened = make_output(tmp_path)
    shown = RUNNER.invoke(app, ["status", opened.store.uri])
    assert shown.exit_code == 0
    assert "finished" in shown.stdout
    assert "12 of 12 records (100.0%), 6 of 6 documents" in shown.stdout
    told = json.loads(RUNNER.invoke(app, ["status", opened.store.uri, "--json", "--verify"]).stdout)
    assert (told["done"], told["complete"], told["silent"], told["harmed"]) == (12, True, False, {})


def test_status_finds_a_harmed_shard(tmp_path: Path) -> None:
    opened = make_output(tmp_path)
    name = next(iter(list_shards(opened.store)))
    opened.store.put(name, opened.store.get(name)[:-9])
    assert RUNNER.invoke(app, ["status", opened.store.uri]).exit_code == 0
    shown = RUNNER.invoke(app, ["status", opened.store.uri, "--verify"])
    assert shown.exit_code == 1
    assert f"{name}: not a whole shard" in shown.stdout


def test_status_of_a_run_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = make_output(tmp_path, groups_done=1)
    status = read_status(opened.store)
    now = time.time()
    monkeypatch.setattr("askmany.pipeline.heartbeat.time.time", lambda: now - 300)
    write_status(opened.store, replace(status, state="running"))
    monkeypatch.undo()
    shown = RUNNER.invoke(app, ["status", opened.store.uri])
    assert shown.exit_code == 4
    assert "silent for 5 min" in shown.stdout
    assert "askmany resume" in shown.stdout


def test_report_into_the_output_and_elsewhere(tmp_path: Path) -> None:
    opened = make_output(tmp_path)
    assert RUNNER.invoke(app, ["report", opened.store.uri]).exit_code == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "of 12 planned" in page
    assert RUNNER.invoke(app, ["report", opened.store.uri, "--to", str(tmp_path / "r.html")]).exit_code == 0
    assert (tmp_path / "r.html").read_text() == page
    refused = RUNNER.invoke(app, ["report", opened.store.uri, "--to", str(tmp_path / "no/r.html")])
    assert refused.exit_code == 2


def test_report_of_a_run_that_is_going_on(tmp_path: Path) -> None:
    opened = make_output(tmp_path, groups_done=2)
    assert RUNNER.invoke(app, ["report", opened.store.uri]).exit_code == 0
    assert "of 12 planned" in (tmp_path / "out/report.html").read_text()
    assert "<b>8</b>" in (tmp_path / "out/report.html").read_text()


def test_gc_removes_what_nobody_needs_and_nothing_else(tmp_path: Path) -> None:
    opened = make_output(tmp_path)
    store = opened.store
    announced = set(store.find("announced"))  # of a run that is complete
    needed = set(store.find("")) - announced
    litter = ["answers/old.parquet", "answers/.writing-1-x.parquet", "attempts/g/00000001.0001", "_probe-1", "lock/00000000.json"]
    lock = RunLock(store)
    lock.acquire()
    needed |= set(store.find("lock"))
    for name in litter:
        store.put(name, b"x")
    refused = RUNNER.invoke(app, ["gc", store.uri])
    assert refused.exit_code == 2
    lock.release()
    assert f"{5 + len(announced)} objects could be removed" in RUNNER.invoke(app, ["gc", store.uri, "--dry-run"]).stdout
    assert set(litter) <= set(store.find(""))
    assert RUNNER.invoke(app, ["gc", store.uri]).exit_code == 0
    assert set(store.find("")) == needed


def test_gc_keeps_what_a_resumed_run_could_use(tmp_path: Path) -> None:
    opened = make_output(tmp_path, groups_done=1)
    group = next(iter(list_shards(opened.store))).removeprefix("answers/").removesuffix(".parquet")
    opened.store.put(f"attempts/{group}/00000001.0001-000000.parquet", b"kept")
    opened.store.put(f"attempts/{group}/00000001.0001", b"")
    assert "1 objects removed" in RUNNER.invoke(app, ["gc", opened.store.uri]).stdout
    assert set(opened.store.find("attempts")) == {f"attempts/{group}/00000001.0001-000000.parquet"}
    assert len(list_shards(opened.store)) == 1


@pytest.mark.parametrize("command", ["status", "report", "gc", "resume"])
def test_an_output_that_is_none_is_one_clear_line(tmp_path: Path, command: str) -> None:
    shown = RUNNER.invoke(app, [command, str(tmp_path / "nowhere")])
    assert shown.exit_code == 2
    assert len(shown.stderr.splitlines()) == 1
    assert "nowhere" in shown.stderr


def test_resume_needs_nothing_but_the_output(tmp_path: Path) -> None:
    opened = make_output(tmp_path)
    shown = RUNNER.invoke(app, ["resume", opened.store.uri])
    assert shown.exit_code == 0, shown.stderr
    assert "12 of 12 records" in shown.stdout


def test_storage_options_are_read_as_yaml() -> None:
    assert storage_options(["key=a", "config_kwargs.s3.addressing_style=path", "anon=true"]) == {
        "key": "a",
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "anon": True,
    }
    with pytest.raises(ConfigError, match="write it as key=value"):
        storage_options(["key"])
