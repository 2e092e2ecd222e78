"""Nodes that come and go in the middle of a run, of two kinds: all is answered once, each kind has the share that its speed earns."""

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("dispatch", ["direct", "ray_data"])
def test_a_node_crashes_and_another_joins(tmp_path: Path, dispatch: str) -> None:
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.elastic_run", str(tmp_path), dispatch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (told["exit_code"], told["documents"], told["statuses"]) == (0, DOCUMENTS, {"ok": DOCUMENTS * QUESTIONS})
    assert len(answers(tmp_path / "out")) == DOCUMENTS * QUESTIONS
    groups = told["groups"]
    before = {group["worker"] for group in groups if group["at"] < told["crashed_at"]}
    assert len(before) == 2, "both kinds were at work before the crash"
    if dispatch == "ray_data":
        return  # it may give a lost actor's groups to the worker that is left, and the node that joined nothing
    joined = {group["worker"] for group in groups if group["at"] > told["joined_at"]} - before
    assert len(joined) == 1, "the node that joined was used"
    assert {group["accelerator"] for group in groups if group["worker"] in joined} == {SLOW}
    assert_balanced([group for group in groups if group["at"] > min(g["at"] for g in groups if g["worker"] in joined)])


def assert_balanced(groups: list[dict[str, Any]]) -> None:
    """From the first group of the node that joined on, each kind's share of the records is about its share of the measured speed."""
    records: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for group in groups:
        records[group["accelerator"]] += group["records"]
        seconds[group["accelerator"]] += group["seconds"]
    speed = {kind: records[kind] / seconds[kind] for kind in records}
    assert speed[FAST] > 1.5 * speed[SLOW], speed
    share = records[FAST] / sum(records.values())
    earned = speed[FAST] / sum(speed.values())
    assert abs(share - earned) < 0.15, (share, earned)
