"""Nodes that come and go in the middle of a run, of two kinds: all is answered once, each worker has the share that its speed earns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chaos import answers
from tests.helpers.elastic_run import DOCUMENTS, FAST, QUESTIONS, SLOW
from tests.helpers.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("dispatch", ["direct", "ray_data"])
def test_a_node_crashes_and_two_others_join(tmp_path: Path, dispatch: str) -> None:
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.elastic_run", str(tmp_path), dispatch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (told["exit_code"], told["documents"], told["statuses"]) == (0, DOCUMENTS, {"ok": DOCUMENTS * QUESTIONS})
    assert len(answers(tmp_path / "out")) == DOCUMENTS * QUESTIONS
    groups = told["groups"]
    before = {group["worker"] for group in groups if group["at"] < told["crashed_at"]}
    assert len(before) == 2, "both kinds were at work before the crash"
    joined = [group for group in groups if group["worker"] not in before]
    first = {group["worker"]: group for group in sorted(joined, key=lambda group: -group["at"])}
    assert sorted(group["accelerator"] for group in first.values()) == sorted([FAST, SLOW]), "the nodes that joined were used"
    assert min(group["at"] for group in joined) > told["joined_at"]
    assert_balanced([group for group in groups if group["at"] - group["seconds"] > told["all_here_at"]])


def assert_balanced(groups: list[dict[str, Any]]) -> None:
    """From when all that joined were at work, each kind's share of the records is about its workers' share of the measured speeds."""
    records: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    workers: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        records[group["accelerator"]] += group["records"]
        seconds[group["accelerator"]] += group["seconds"]
        workers[group["accelerator"]].add(group["worker"])
    speed = {kind: records[kind] / seconds[kind] for kind in records}
    assert speed[FAST] > 1.5 * speed[SLOW], speed
    share = records[FAST] / sum(records.values())
    together = {kind: len(workers[kind]) * speed[kind] for kind in records}
    assert (len(workers[FAST]), len(workers[SLOW])) == (2, 1)
    assert abs(share - together[FAST] / sum(together.values())) < 0.15, (share, together)
