"""A step's launches out of a profiler's trace: made-up traces, and a real one of a tiny engine on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from askmany.jobs import bench_floor
from askmany.jobs.step_profile import KINDS, NAME_LENGTH, profiled, read, text


def event(name: str, ts: float, dur: float, kind: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "args": args}


def test_launches_that_overlap_cover_their_time_once() -> None:
    found = read(
        [event("b", 8.0, 4.0), event("a", 0.0, 10.0), event("a", 20.0, 1.0), event("c", 0.0, 99.0, "cpu_op"), {"ph": "i", "cat": "kernel"}],
        KINDS["cuda"],
    )
    assert found.micros == {("a", ""): 11.0, ("b", ""): 4.0}
    assert found.covered_us == pytest.approx(12.0 + 1.0)


def test_a_launch_inside_another_covers_nothing_of_its_own() -> None:
    assert read([event("a", 0.0, 10.0), event("b", 2.0, 3.0), event("c", 9.0, 2.0)], KINDS["cuda"]).covered_us == pytest.approx(11.0)


def test_a_step_is_what_the_longer_run_has_beyond_the_shorter() -> None:
    """Grids tell apart products that one kernel does; what both runs did as often is no part of a step."""
    once = [event("start", 0.0, 50.0)]
    step = [event("gemm", 100.0, 6.0, grid=[4, 1, 1]), event("gemm", 110.0, 3.0, grid=[2, 1, 1]), event("gemm", 120.0, 3.0, grid=[2, 1, 1])]
    later = [e | {"ts": e["ts"] + 1000.0 * i} for i in (1, 2) for e in step]
    found = read([*once, *step, *later], KINDS["cuda"]).step(read([*once, *step], KINDS["cuda"]), 2)
    assert found["covered_us"] == pytest.approx(12.0)
    assert sorted((row["grid"], row["launches"], row["us"]) for row in found["launches"]) == [("2x1x1", 2.0, 6.0), ("4x1x1", 1.0, 6.0)]
    assert text(found, most=1).count("gemm") == 1
    assert "12 us a step" in text(found)


def test_long_names_are_cut() -> None:
    assert list(read([event("k" * 500, 0.0, 1.0)], KINDS["cuda"]).counts) == [("k" * NAME_LENGTH, "")]


def test_work_is_found_in_a_real_trace() -> None:
    one = torch.ones(8, 8)
    found = profiled(lambda: [one @ one for _ in range(3)], torch.device("cpu"))
    assert found.counts["aten::mm", ""] == 3
    assert found.covered_us > 0


def test_the_benchmark_of_the_floor_tells_a_steps_launches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = ["--shape", "tiny", "--document-tokens", "40", "--rows", "3", "--new-tokens", "2", "4", "--runs", "1", "--device", "cpu"]
    peaks = ["--bytes-per-s", "1e10", "--flop-per-s", "1e12"]
    bench_floor.main([*cell, *peaks, "--profile", str(tmp_path / "step.json"), "--out", str(tmp_path / "floor.json")])
    step = json.loads((tmp_path / "step-40-3.json").read_text())
    products = next(row for row in step["launches"] if row["name"] == "aten::mm")
    assert products["launches"] == int(products["launches"]) > 0
    assert "us a step" in capsys.readouterr().out


def test_a_profiler_that_fails_costs_no_measured_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(work: Any, device: torch.device) -> None:
        raise RuntimeError("no counters here")

    monkeypatch.setattr(bench_floor, "profiled", refused)
    cell = ["--shape", "tiny", "--document-tokens", "40", "--rows", "3", "--new-tokens", "2", "4", "--runs", "1", "--device", "cpu"]
    peaks = ["--bytes-per-s", "1e10", "--flop-per-s", "1e12"]
    with pytest.raises(RuntimeError, match="no counters here"):
        bench_floor.main([*cell, *peaks, "--profile", str(tmp_path / "step.json"), "--out", str(tmp_path / "floor.json")])
    assert len(json.loads((tmp_path / "floor.json").read_text())["table"]) == 1
