"""Runs that are killed at random moments lose no answer, double none and change none."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chaos import Size, answers, endure, make_input, with_workers
from tests.helpers.child_run import run_child

SIZE = Size()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> tuple[Path, dict[str, Any], dict[Any, Any]]:
    """The input, its configuration, and the answers of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("chaos")
    config = make_input(folder, SIZE)
    output = folder / "undisturbed"
    result = run_child(folder, with_workers(config, ray_address, 3, "ray_data", output))
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
