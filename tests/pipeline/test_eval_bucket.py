"""A scheduled evaluation over a real S3 bucket that moves, with real runs: three evaluations, the second overlapping the first."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from askmany.jobs.cli import app
from askmany.pipeline.eval_history import Entry, read_history
from askmany.pipeline.eval_schedule import Schedule, evaluate
from askmany.pipeline.lock import RunLockedError, newest_lease
from askmany.pipeline.run import run
from askmany.pipeline.storage import ObjectStore
from tests.helpers.browser import dom_of
from tests.helpers.child_run import BuildTroubled, Trouble
from tests.helpers.runs import run_config
from tests.helpers.s3_fixture import Bucket
from tests.helpers.word_model import words

pytestmark = pytest.mark.timeout(300)
QUIET = Console(quiet=True)


def put(store: ObjectStore, number: int, text: str = "") -> None:
    questions = [{"qid": f"q{n}", "question": f"w{n}", "answers": ["10 11"]} for n in range(3)]
    row = {"doc_id": f"d{number}", "text": text or words(5, number), "questions": questions}
    store.put(f"d{number}.jsonl", json.dumps(row).encode())


def test_three_evaluations_of_a_moving_bucket(tmp_path: Path, bucket: Bucket, ray_address: str) -> None:
    source, root = ObjectStore(bucket.uri("in"), bucket.plain), ObjectStore(bucket.uri("eval"), bucket.plain)
    for n in range(12):
        put(source, n)
    values: dict[str, Any] = {
        "input": {"uri": bucket.uri("in"), "questions": "questions", "storage_options": bucket.plain},
        "questions": None,
        "output": {"uri": bucket.uri("eval"), "storage_options": bucket.plain, "shard_documents": 2},
        "workers": {"count": 1, "cpus": 0.5, "address": ray_address},
    }
    config = run_config(tmp_path, **values)
    slowly = partial(run, build_engine=BuildTroubled(Trouble(pause_s=0.3)))
    found: list[Entry] = []

    def first_night() -> None:
        found.append(evaluate(Schedule(config, "2026-01-01", "last-success"), QUIET, slowly))

    night = threading.Thread(target=first_night)
    night.start()
    while newest_lease(root) is None:
        night.join(0.05)
        assert night.is_alive() or found
    with pytest.raises(RunLockedError, match="eval: process"):
        evaluate(Schedule(config, "2026-01-02", "last-success"), QUIET, slowly)
    assert not found, "the first was still at work"

    # New documents come while the first is at work on what it has listed; the second waits for it.
    while not any(name.endswith("selection.json") for name in root.find("runs")):
        night.join(0.05)
        assert night.is_alive()
    for n in (12, 13):
        put(source, n)
    second = evaluate(Schedule(config, "2026-01-02", "last-success", if_running="wait"), QUIET)
    night.join()
    (first,) = found
    assert (first.verdict, first.documents, first.asked_documents) == ("green", 12, 12)
    assert (second.verdict, second.documents, second.asked_documents, second.against) == ("green", 14, 2, first.key)

    # One is edited, one deleted.
    put(source, 3, words(6, 500))
    source.delete("d5.jsonl")
    third = evaluate(Schedule(config, "2026-01-03", "last-success"), QUIET)
    assert (third.verdict, third.documents, third.asked_documents, third.records) == ("green", 13, 1, 39)

    keys = [f"2026-01-0{n}-{first.revision[:12]}" for n in (1, 2, 3)]
    assert [entry.key for entry in read_history(root)] == keys
    asked = [{row["doc_id"] for name in root.list(f"runs/{key}/answers") for row in rows(root, name)} for key in keys]
    assert asked == [{f"d{n}" for n in range(12)}, {"d12", "d13"}, {"d3"}]
    page = tmp_path / "trend.html"
    page.write_bytes(root.get("trend.html"))
    dom = dom_of(page, tmp_path)
    assert dom.count('<section class="chart">') == 3
    assert dom.count('<g class="point green">') == 9
    assert all(key in dom for key in keys)


def rows(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    with store.open(name) as stream:
        found: list[dict[str, Any]] = pq.read_table(stream).to_pylist()
    return found


def test_the_command_line_tells_schedules_from_tasks(tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["evaluate", str(tmp_path / "nightly.yaml")])
    assert (done.exit_code, "no such configuration file" in done.output) == (2, True)
    done = runner.invoke(app, ["evaluate", "squad"])
    assert (done.exit_code, "--data FILE" in done.output) == (2, True)
