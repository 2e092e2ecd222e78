"""The throughput model: known parts are found again, through noise and through benchmark rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.jobs.bench_model import Fit, Point, fit, fits, point_of

SECONDS = st.floats(1e-6, 1e-2)


def made(truth: Fit, sizes: list[tuple[int, int]], noise: float = 0.0) -> list[Point]:
    rng = random.Random(1)
    return [Point(b, p, truth.step_s(b, p) * (1 + noise * rng.uniform(-1, 1))) for b, p in sizes]


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_parts_of_a_step_are_found_again(start_s: float, document_s: float, each_s: float, pairs_s: float) -> None:
    truth = Fit(start_s, document_s, each_s, pairs_s, 1.0)
    sizes = [(b, p) for b in (1, 2, 8) for p in (1, 4, 16, 64, 256)]
    found = fit(made(truth, sizes), pairs=True)
    for b, p in [*sizes, (4, 32)]:
        assert found.tokens_per_s(b, p) == pytest.approx(truth.tokens_per_s(b, p), rel=1e-3)


def test_noise_moves_the_parts_a_little() -> None:
    truth = Fit(4e-3, 0.0, 2e-5, 0.0, 1.0)
    found = fit(made(truth, [(1, p) for p in (1, 4, 16, 64, 128, 256)], noise=0.03), pairs=False)
    assert found.start_s == pytest.approx(4e-3, rel=0.05)
    assert found.each_s == pytest.approx(2e-5, rel=0.15)
    assert (found.document_s, found.pairs_s, found.best_streams) == (0.0, 0.0, None)
    assert 0.98 < found.r2 < 1


def test_pairs_give_throughput_a_peak() -> None:
    alone = Fit(4e-3, 0.0, 1e-5, 1e-7, 1.0)
    assert alone.best_streams == pytest.approx(200)
    assert alone.tokens_per_s(1, 200) > max(alone.tokens_per_s(1, 150), alone.tokens_per_s(1, 260))
    batch = Fit(4e-3, 1e-4, 1e-5, 1e-7, 1.0)
    assert batch.best_streams == pytest.approx(31.6, rel=0.01)
    assert batch.tokens_per_s(8, 32) > max(batch.tokens_per_s(32, 8), batch.tokens_per_s(2, 128))
    found = fit(made(batch, [(256 // p, p) for p in (8, 16, 32, 64, 128)]), pairs=True)
    assert found.best_streams == pytest.approx(batch.best_streams, rel=0.02)


def test_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 different numbers of requests and streams, not 2"):
        fit([Point(1, 4, 1.0), Point(1, 8, 1.0), Point(1, 8, 2.0)], pairs=False)
    with pytest.raises(ValueError, match="positive"):
        fit([Point(1, 4, 1.0), Point(1, 8, 0.0), Point(1, 16, 2.0)], pairs=False)


def row(questions: int, ours_s: float, **values: Any) -> dict[str, Any]:
    usual = {"work": "grid", "model": "m", "layout": "split", "documents": 1, "document_tokens": 8192, "new_tokens": 100, "spread": 0}
    return usual | {"questions": questions, "ours_s": ours_s, "cached": True, "setup": {}} | values


def test_a_row_says_what_one_step_took() -> None:
    assert point_of(row(64, 2.0)) == Point(1, 64, 0.02)
    assert point_of(row(64, 2.0, documents=4)) == Point(4, 64, 0.02)
    assert point_of(row(64, 8.0, documents=16)) == Point(4, 64, 0.02)  # 256 rows at once, in four turns
    assert point_of(row(64, 2.0, setup={"streams": 16})) == Point(1, 16, 0.005)
    assert point_of(row(64, 2.0, layout="interleaved")) == Point(2, 32, 0.02)
    assert point_of(row(64, 2.0, layout="interleaved", setup={"streams": 8, "max_rows": 32})) == Point(4, 8, 0.01)
    for unfit in ({"spread": 9}, {"cached": False}, {"setup": {"streams": "calibrate"}}):
        assert point_of(row(64, 2.0, **unfit)) is None


def test_rows_over_p_are_fitted_and_shown_beside_the_model() -> None:
    truth = Fit(4e-3, 0.0, 2e-5, 0.0, 1.0)
    rows = [row(count, 100 * truth.step_s(1, count)) for count in (256, 64, 128)]
    (found,) = fits([*rows, row(64, 1.0, model="of one point")])
    assert (found["model"], found["layout"], found["setup_label"]) == ("m", "split", "")
    assert (found["start_s"], found["each_s"], found["best_streams"]) == (pytest.approx(4e-3), pytest.approx(2e-5), None)
    assert [point[:2] for point in found["points"]] == [[1, 64], [1, 128], [1, 256]]
    for _, streams, step_s, measured, modelled in found["points"]:
        assert measured == pytest.approx(modelled) == pytest.approx(streams / step_s)


def test_p_of_the_interleaved_layout_makes_one_curve() -> None:
    truth = Fit(4e-3, 1e-4, 1e-5, 1e-7, 1.0)
    sweep = [
        row(256, 100 * truth.step_s(256 // p, p), layout="interleaved", setup={"streams": p}) for p in (8, 16, 32, 64, 128)
    ]  # fmt: skip
    (found,) = fits(sweep)
    assert found["best_streams"] == pytest.approx(31.6, rel=0.02)
