"""Runs that are killed at random moments lose no answer, double none and change none."""

import json
from pathlib import Path
from typing import Any

import pytest

from askmany.pipeline.commit import list_shards, read_manifest
from askmany.pipeline.storage import ObjectStore
from tests.helpers.chaos import Size, answers, endure, make_input, with_workers
from tests.helpers.child_run import run_here
from tests.helpers.launches import Asked, launch
from tests.helpers.runs import write_jsonl

SIZE = Size()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> tuple[Path, dict[str, Any], dict[Any, Any]]:
    """The input, its configuration, and the answers of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("chaos")
    config = make_input(folder, SIZE)
    output = folder / "undisturbed"
    result = run_here(with_workers(config, ray_address, 3, "ray_data", output))
    assert result["exit_code"] == 0, result
    return folder, config, answers(output)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 3 else [pytest.mark.slow]) for seed in range(40)])
def test_no_answer_is_lost_doubled_or_changed(whole: tuple[Path, dict[str, Any], dict[Any, Any]], ray_address: str, seed: int) -> None:
    folder, config, expected = whole
    output, story = endure(folder, config, SIZE, ray_address, seed)
    found = answers(output)
    assert len(found) == SIZE.documents * SIZE.questions == 1800
    assert found == expected, story


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 101 else [pytest.mark.slow]) for seed in range(100, 120)])
def test_edits_that_are_killed_lose_nothing(tmp_path: Path, ray_address: str, seed: int) -> None:
    """A finished run whose questions and documents are edited: one question new, one changed, one gone; documents new, changed and gone."""
    size = Size(documents=60, shard=5)
    config = make_input(tmp_path, size)
    output = tmp_path / f"out-{seed}"
    launch({**config, "output": {**config["output"], "uri": str(output)}}, Asked())
    rows = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    rows = [{**row, "text": row["text"] + " w7"} if number % 7 == 0 else row for number, row in enumerate(rows) if number % 11]
    write_jsonl(tmp_path / "d.jsonl", [*rows, {"doc_id": "new", "text": "w1 w2"}])
    changed = {**config["questions"][1], "question": "w9 w8 w7"}
    config = {**config, "questions": [{"id": "new", "question": "w5"}, changed, *config["questions"][2:]]}
    launch({**config, "output": {**config["output"], "uri": str(tmp_path / "fresh")}}, Asked())
    ended, story = endure(tmp_path, config, size, ray_address, seed)
    assert ended == output
    assert answers(output) == answers(tmp_path / "fresh"), story
    assert set(list_shards(ObjectStore(str(output), {}))) == set(read_manifest(ObjectStore(str(output), {})).shards), story
