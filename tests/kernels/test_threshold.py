"""The grouping threshold from injected times: where it lies, what the budget cuts, what the file remembers."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import torch

from askmany.kernels.threshold import DOCUMENTS, STREAMS, Timed, best_threshold, saved_bytes, tuned_threshold
from askmany.kernels.tiles import AttentionShape

SHAPE = AttentionShape(28, 4, 128, 16, torch.bfloat16)
CPU = torch.device("cpu")


def from_bytes(limit: int) -> object:
    """A GPU on which sharing pays from `limit` saved bytes on."""
    return lambda shape, streams, tokens, device: (10.0, 20.0) if saved_bytes(shape, streams, tokens) >= limit else (10.0, 5.0)


def test_the_threshold_parts_the_steps_that_gain_from_those_that_lose(tmp_path: Path) -> None:
    savings = [saved_bytes(SHAPE, STREAMS, tokens) for tokens in DOCUMENTS]
    for index, limit in enumerate(savings):
        found = tuned_threshold(SHAPE, CPU, tmp_path / f"{index}.json", from_bytes(limit), clock=lambda: 0.0)  # type: ignore[arg-type]
        assert [saved > found for saved in savings] == [saved >= limit for saved in savings]
    assert tuned_threshold(SHAPE, CPU, tmp_path / "never.json", from_bytes(1 << 50), clock=lambda: 0.0) == savings[-1]  # type: ignore[arg-type]


def test_one_noisy_step_does_not_move_it_past_many() -> None:
    timed = [Timed(1, 10, 5), Timed(2, 10, 12), Timed(3, 10, 9.5), Timed(4, 10, 30), Timed(5, 10, 40)]
    assert best_threshold(timed) == 1


def test_the_budget_ends_the_measuring(tmp_path: Path) -> None:
    asked: list[int] = []

    def measure(shape: AttentionShape, streams: int, tokens: int, device: torch.device) -> tuple[float, float]:
        asked.append(saved_bytes(shape, streams, tokens))
        return 1.0, 2.0

    ticks = count()
    assert tuned_threshold(SHAPE, CPU, tmp_path / "t.json", measure, clock=lambda: float(next(ticks))) == -1
    assert len(asked) == 1 + 3  # one to compile; then the clock read 0, 1, 2 and 3 seconds
    assert asked == sorted(asked)


def test_the_file_remembers_and_a_broken_one_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "thresholds.json"
    file.parent.mkdir()
    file.write_text("{not json")
    first = tuned_threshold(SHAPE, CPU, file, from_bytes(1 << 22), clock=lambda: 0.0)  # type: ignore[arg-type]

    def never(*arguments: object) -> tuple[float, float]:
        raise AssertionError("measured again")

    assert tuned_threshold(SHAPE, CPU, file, never) == first
    other = AttentionShape(12, 2, 128, 16, torch.bfloat16)
    tuned_threshold(other, CPU, file, from_bytes(0), clock=lambda: 0.0)  # type: ignore[arg-type]
    assert len(json.loads(file.read_text())) == 2
