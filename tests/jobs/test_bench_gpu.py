"""The paired benchmark on a CPU with a tiny shape: its cells, its order, its ratios; `transformers` stands for stock."""

from __future__ import annotations

import io
import json
import sys
import time
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from askmany.engine.graphs import Bucket
from askmany.jobs import bench_contender, bench_gpu, bench_shares
from askmany.jobs.bench_cells import Cell, draw, suites
from askmany.jobs.bench_ours import OursSetup, _tail_rows, captured_s
from askmany.jobs.bench_plots import plot
from askmany.jobs.bench_process import lines_of
from askmany.jobs.bench_ratios import geometric_mean, grid_interval, interval
from askmany.jobs.bench_shapes import SHAPES

COMMAND = ["--device", "cpu", "--shape", "tiny", "--suite", "tiny", "--contenders", "transformers", "interleaved", "split"]
SMALL = ["--seeds", "2", "--max-rows", "8", "--setup", '{"page_size": 8, "kv_tokens": 1024, "step_tokens": 64}']


def in_process(job_file: Path, name: str, most_s: float) -> list[dict[str, Any]]:
    """`bench_process.lines_of` without the cost of a process."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        bench_contender.main(str(job_file))
    lines = printed.getvalue().splitlines()
    return [json.loads(line.removeprefix(bench_contender.MARK)) for line in lines if line.startswith(bench_contender.MARK + "{")]


def test_the_command_pairs_contenders_and_writes_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[int]]] = []

    def lines_of(job_file: Path, name: str, most_s: float, gpu: int | None) -> list[dict[str, Any]]:
        ran.append((name, json.loads(job_file.read_text())["order"]))
        return in_process(job_file, name, most_s)

    monkeypatch.setattr(bench_gpu, "lines_of", lines_of)
    out = tmp_path / "engine.json"
    bench_gpu.main([*COMMAND, *SMALL, "--out", str(out), "--plots", str(tmp_path / "plots"), "--commit", "abc"])
    names = ["transformers", "interleaved", "split"]
    assert ran == [(name, [0, 1]) for name in names] + [(name, [1, 0]) for name in reversed(names)]
    record = json.loads(out.read_text())
    assert {(row["work"], row["layout"]) for row in record["table"]} == {(w, n) for w in ("tiny", "tiny mixed") for n in names[1:]}
    for row in record["table"]:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["best_stock"] == "transformers"
        index = 0 if row["work"] == "tiny" else 1
        theirs, ours = (record["seconds"][name][str(index)] for name in ("transformers", row["layout"]))
        assert len(ours) == 4
        assert row["pairs"] == [[number, seed] for number in range(2) for seed in range(2)]
        assert row["ratio"] == pytest.approx(geometric_mean(theirs) / geometric_mean(ours))
    assert record["environment"]["commit"] == "abc"
    assert (tmp_path / "plots").is_dir()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["engine.json"]


def test_p_of_the_interleaved_layout_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "lines_of", lambda job_file, name, most_s, gpu: in_process(job_file, name, most_s))
    monkeypatch.setattr(bench_contender, "calibrated_streams", lambda measure, most: (2, f"P = 2: {measure(2) > 0}, {most}"))
    setup = ["--setup", '{"page_size": 8, "kv_tokens": 1024, "step_tokens": 64, "streams": "calibrate"}']
    out = tmp_path / "o.json"
    bench_gpu.main(
        [*COMMAND[:-3], "interleaved", "--cells", "0", "--seeds", "1", "--passes", "1", "--max-rows", "8", *setup, "--out", str(out)]
    )
    assert json.loads(out.read_text())["notes"]["interleaved"]["calibrated"] == "P = 2: True, 3"


def test_candidates_for_p_have_pools_of_one_size_and_no_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int | None, int | None]] = []
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Held:
        def __init__(self, model: Any, setup: OursSetup, context: int, cells: list[Cell]) -> None:
            assert not alive, "the candidate before still holds its pool"
            self.cycle = self
            alive.add(self)
            made.append((setup.streams, setup.kv_tokens))

        def run(self, cell: Cell, drawn: Any) -> float:
            return 1.0

    free = iter([5000])
    monkeypatch.setattr(bench_contender, "OursContender", Held)
    monkeypatch.setattr(bench_contender, "load_ours", lambda *arguments: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(bench_contender, "free_tokens", lambda model, setup, context: next(free))
    job = {"contender": "interleaved", "folder": "", "max_rows": 32, "device": "cpu", "random_weights": True, "shape": "tiny"}
    bench_contender.make(job | {"setup": {"streams": "calibrate"}}, [Cell("c", 8, 32, 2)])
    assert made == [(8, 5000), (16, 5000), (32, 5000), (8, 5000)]


def interpreter(tmp_path: Path, script: str) -> str:
    """Stands for Python: a program that runs `script` of the shell, whatever its arguments."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_a_contender_runs_in_a_process_of_its_own_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """echo a warning; echo '{"no": 1}'; echo 'BENCH {"start_s": 1.5}'; echo out of memory "$@" >&2; exit 1"""
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    assert list(lines_of(Path("job.json"), "split", 60)) == [{"start_s": 1.5}]
    assert "FAILED split after 1 lines (exit code 1): out of memory -m askmany.jobs.bench_contender job.json" in capsys.readouterr().out


def test_a_contender_that_hangs_is_stopped_and_what_it_said_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, """echo 'BENCH {"start_s": 1.5}'; exec sleep 300"""))
    assert list(lines_of(Path("job.json"), "stock-fa3", 1.0)) == [{"start_s": 1.5}]
    assert "STOPPED stock-fa3 after 1 s and 1 lines" in capsys.readouterr().out


def test_what_a_contender_leaves_running_does_not_keep_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler in the background that holds the output open."""
    script = f"""(sleep 300) & echo $! > {tmp_path}/child; echo 'BENCH {{"start_s": 1.5}}'; echo 'BENCH END'"""
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    assert list(lines_of(Path("job.json"), "split", 60)) == [{"start_s": 1.5}]
    assert capsys.readouterr().out == ""
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    until = time.monotonic() + 60
    while child.exists() and "zombie" not in child.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_short_warm_up_serves_cells_of_even_answers_alone() -> None:
    even, mixed = Cell("even", 8, 2, 128), Cell("mixed", 8, 2, 46, spread=44, cap=160)
    assert bench_contender.warm_up(even) == replace(even, new_tokens=bench_contender.WARM_UP_TOKENS)
    assert bench_contender.warm_up(mixed) == mixed


def test_steps_that_bring_tails_in_are_captured_before_the_clock_starts() -> None:
    config = OursSetup(max_rows=256, step_tokens=2048).config(1 << 16, "cpu")
    assert _tail_rows(Cell("c", 8192, 64, 8), config) == [768]
    assert _tail_rows(Cell("c", 8192, 256, 8), config) == [2040, 170 + 86 * 12]


def test_nothing_begins_after_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_gpu, "lines_of", lambda job_file, name, most_s, gpu: [])
    bench_gpu.main([*COMMAND, "--limit-s", "0", "--out", str(tmp_path / "o.json")])
    assert capsys.readouterr().out.count("LEFT OUT for time") == 6
    assert json.loads((tmp_path / "o.json").read_text())["table"] == []


@pytest.mark.parametrize("contenders", [["split", "stock-fa3"], ["stock-fa3", "split"], ["stock-fa3", "stock-triton", "split"]])
def test_a_contender_that_takes_all_it_may_leaves_the_others_their_start_and_a_part(contenders: list[str]) -> None:
    shares, left_s, starts = bench_shares.Shares([0, 1, 2], contenders), 1400.0, {"split": [24.0, 40.0]}
    for at, (_, name) in enumerate(shares.turns[: 2 * len(contenders)]):
        share_s = shares.share_s(at, left_s, starts)
        assert share_s >= (40.0 if name == "split" else bench_shares.START_S["stock"]) + bench_shares.LEAST_S
        left_s -= share_s
    assert left_s >= 0
    assert left_s == pytest.approx(0.0) or shares.share_s(2 * len(contenders), left_s, starts) > 0


def test_what_a_contender_leaves_is_shared_mostly_with_stock() -> None:
    shares = bench_shares.Shares([0], ["split", "stock-fa3"])
    first_s = shares.share_s(0, 560.0, {})
    over_s = 560.0 - 85 - 130 - 2 * bench_shares.LEAST_S
    assert first_s == pytest.approx(85 + bench_shares.LEAST_S + over_s / 5)
    assert shares.share_s(1, 500.0, {}) == 500.0
    backward = bench_shares.Shares([1], ["split", "stock-fa3"])
    assert backward.turns == [(1, "stock-fa3"), (1, "split")]
    assert backward.share_s(0, 560.0, {}) == pytest.approx(560.0 - first_s)


def test_a_later_pass_is_whole_or_left_out() -> None:
    """It begins where the starts were quick; the first pass runs in any case, with less for each."""
    contenders = ["split", "stock-fa3"]
    quick = {"split": [30.0], "stock-fa3": [60.0]}
    for starts, runs in (({}, False), (quick, True)):
        shares = bench_shares.Shares([0, 1], contenders)
        assert all(shares.share_s(at, 400.0, starts) > 0 for at in range(2))
        assert [shares.share_s(at, left_s, starts) > 0 for at, left_s in ((2, 250.0), (3, 120.0))] == [runs, runs]
    tight = bench_shares.Shares([0], ["stock-fa3", "stock-flashinfer", "stock-triton"])
    assert tight.share_s(0, 305.0, {}) == pytest.approx(90.0)
    assert tight.share_s(1, 40.0, {}) == 0.0


def test_contenders_and_the_plan_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def lines_of(job_file: Path, name: str, most_s: float, gpu: int | None) -> list[dict[str, Any]]:
        told.append(capsys.readouterr().out)
        job = json.loads(job_file.read_text())
        assert job["limit_s"] == pytest.approx(most_s - bench_shares.STOP_S)
        assert 0 <= time.monotonic() - job["launched_s"] < 100
        return []

    monkeypatch.setattr(bench_gpu, "lines_of", lines_of)
    bench_gpu.main(["--suite", "long", "--stock", "fa3", "flashinfer", "--limit-s", "520", "--out", str(tmp_path / "o.json")])
    text = " ".join(told[0].split())
    assert "contenders, in the order of even passes: split, stock-fa3, stock-flashinfer" in text
    assert "pass 0: split " in text
    short, later = bench_shares.plan(range(2), ["split", "stock-fa3", "stock-flashinfer"], 520.0)
    assert short.endswith("; stock-flashinfer 230 s, a start of up to 200 s in it (TOO SHORT)")
    assert later == "pass 1: only if the passes before it leave enough"


def test_what_was_measured_is_written_after_every_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no git."""
    monkeypatch.setenv("PATH", str(tmp_path))
    out, rows = tmp_path / "engine.json", []

    def lines_of(job_file: Path, name: str, most_s: float, gpu: int | None) -> list[dict[str, Any]]:
        rows.append(json.loads(out.read_text())["table"] if out.exists() else None)
        if len(rows) == 4:
            raise KeyboardInterrupt
        return [{"start_s": 1.0}, {"cell": 0, "seed": 0, "seconds": 1.0 if name == "split" else 2.0}]

    monkeypatch.setattr(bench_gpu, "lines_of", lines_of)
    with pytest.raises(KeyboardInterrupt):
        bench_gpu.main(["--cells", "0", "--contenders", "split", "stock-fa3", "--limit-s", "5000", "--out", str(out)])
    assert [found and len(found) for found in rows] == [None, [], 1, 1]
    record = json.loads(out.read_text())
    assert (record["table"][0]["ratios"], record["table"][0]["pairs"]) == ([2.0], [[0, 0]])
    assert record["starts_s"] == {"split": [1.0], "stock-fa3": [1.0, 1.0]}
    assert record["environment"]["commit"] == ""


def test_passes_can_be_split_over_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[int]]] = []

    def lines_of(job_file: Path, name: str, most_s: float, gpu: int | None) -> list[dict[str, Any]]:
        ran.append((name, json.loads(job_file.read_text())["order"]))
        return [{"cell": i, "seed": 0, "seconds": 1.0} for i in range(2)]

    monkeypatch.setattr(bench_gpu, "lines_of", lines_of)
    out = tmp_path / "o.json"
    bench_gpu.main([*COMMAND[:-3], "transformers", "split", "--first-pass", "3", "--passes", "1", "--out", str(out)])
    assert ran == [("split", [1, 0]), ("transformers", [1, 0])]
    record = json.loads(out.read_text())
    assert [row["pairs"] for row in record["table"]] == [[[3, 0]]] * 2
    assert (record["first_pass"], record["passes"]) == (3, 1)


def test_a_contender_ends_itself_in_time_counted_from_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start is in its limit; a cell that would not end in time is left out for one that will; it gives its notes."""
    now_s = [1000.0]
    lasts_s = {"long": 40.0, "short": 5.0}

    class Paced:
        def run(self, cell: Cell, drawn: Any) -> float:
            now_s[0] += lasts_s[cell.work]
            return lasts_s[cell.work]

        def notes(self) -> dict[str, Any]:
            return {"steps": 7}

        def close(self) -> None:
            pass

    def make(job: dict[str, Any], cells: list[Cell]) -> Paced:
        now_s[0] += 60.0
        return Paced()

    monkeypatch.setattr(bench_contender, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(bench_contender, "make", make)
    job = {"cells": [Cell(name, 8, 1, 4).to_dict() for name in lasts_s], "shape": "tiny", "seeds": [0, 1, 2], "order": [0, 1]}
    (tmp_path / "job.json").write_text(json.dumps(job | {"launched_s": 990.0, "limit_s": 175.0}))
    lines = in_process(tmp_path / "job.json", "split", 200.0)
    assert lines[0] == {"start_s": 70.0}
    assert [(line["cell"], line["seed"]) for line in lines if "cell" in line] == [(0, -1), (0, 0), (1, -1), (1, 0), (1, 1), (1, 2)]
    assert [(line["left_out"], line["seed"]) for line in lines if "left_out" in line] == [(0, 1), (0, 2)]
    assert lines[-1] == {"notes": {"steps": 7}}


def test_captures_of_decode_and_mixed_steps_are_told_apart() -> None:
    taken = {Bucket(64, 64, True): 1.0, Bucket(64, 64, False): 2.0, Bucket(64, 8, False, 4): 0.504}
    assert captured_s(taken) == {"64d": 1.0, "64m": 2.5}


def test_passes_side_by_side_each_have_a_gpu_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward on one, backward on the other; seconds are paired within a pass, and so within a GPU."""
    ran: dict[int | None, list[tuple[str, list[int]]]] = {}

    def lines_of(job_file: Path, name: str, most_s: float, gpu: int | None) -> list[dict[str, Any]]:
        order = json.loads(job_file.read_text())["order"]
        ran.setdefault(gpu, []).append((name, order))
        pace = (2.0 if name == "stock-fa3" else 1.0) * (1 + (gpu or 0))  # the second GPU takes twice as long
        return [{"start_s": pace}, {"cell": 0, "seed": -1, "seconds": 9.0}, *({"cell": i, "seed": 0, "seconds": pace} for i in order)]

    monkeypatch.setattr(bench_gpu, "lines_of", lines_of)
    out = tmp_path / "engine.json"
    options = ["--suite", "grid", "--cells", "0", "1", "--contenders", "stock-fa3", "split", "--passes", "3", "--gpus", "4", "7"]
    bench_gpu.main([*options, "--out", str(out)])
    forward, backward = [("stock-fa3", [0, 1]), ("split", [0, 1])], [("split", [1, 0]), ("stock-fa3", [1, 0])]
    assert ran == {4: forward * 2, 7: backward}
    record = json.loads(out.read_text())
    assert [row["ratios"] for row in record["table"]] == [[2.0, 2.0, 2.0]] * 2
    assert record["starts_s"] == {"stock-fa3": [10.0, 10.0, 16.0], "split": [5.0, 5.0, 8.0]}


def test_a_contender_sees_the_gpu_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """echo "BENCH {\\"gpu\\": \\"$CUDA_VISIBLE_DEVICES\\"}"; echo 'BENCH END'"""
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert [list(lines_of(Path("job.json"), "split", 60, gpu)) for gpu in (None, 1)] == [[{"gpu": "3"}], [{"gpu": "1"}]]


def test_scouting_names_the_backends_that_count() -> None:
    cells = [Cell("a", 8, 1, 1), Cell("b", 8, 1, 1)]
    seconds = {"stock-fa3": (1.0, 2.0), "stock-flashinfer": (1.09, 1.0), "stock-triton": (1.2, 1.2), "split": (0.5, 0.5)}
    times: Any = {name: {i: [(0, 0, s)] for i, s in enumerate(found)} for name, found in seconds.items()}
    assert bench_gpu.close_backends(cells, times) == ["stock-fa3", "stock-flashinfer"]
    rows = bench_gpu.summarise(cells, times)["table"]
    assert [(row["best_stock"], row["ratio"]) for row in rows] == [("stock-fa3", 2.0), ("stock-flashinfer", 2.0)]


def test_draws_are_exact_and_repeat() -> None:
    cell = Cell("x", 100, 5, 20, documents=3, question_tokens=7, spread=9, cap=30, cached=False)
    drawn = draw(cell, 1, 500, range(1000, 4000))
    assert [len(ids) for ids in drawn.documents] == [100] * 3
    assert all(ids == list(range(ids[0], ids[0] + 100)) and ids[0] >= 1000 for ids in drawn.documents)
    assert [len(tail) for tails in drawn.tails for tail in tails] == [7] * 15
    lengths = [length for own in drawn.lengths for length in own]
    assert all(1 <= length <= 30 for length in lengths)
    assert len(set(lengths)) > 5
    assert draw(cell, 1, 500, range(1000, 4000)) == drawn
    assert draw(cell, 2, 500, range(1000, 4000)) != drawn
    assert draw(Cell("y", 50, 2, 4), 0, 300).lengths == [[4, 4]]


def test_suites_are_the_published_sizes() -> None:
    found = suites()
    assert {(cell.document_tokens, cell.questions) for cell in found["grid"]} == {(a, b) for a in (8192, 16384) for b in (64, 128, 256)}
    assert len(found["worst"]) == 30
    (loogle,) = found["loogle"]
    assert (loogle.documents, loogle.most_tokens, loogle.cached) == (6, 300, False)
    assert {name for name in SHAPES if "7b" in name} == {"codellama-7b", "qwen2.5-7b"}
    assert bench_shares.wall_budget_s(found["grid"], ["stock-fa3", "split"], 3, 2) > 200


def test_means_intervals_and_fits() -> None:
    assert geometric_mean([1.0, 4.0]) == 2.0
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([1.0, 0.0])
    low, high = interval([2.0, 2.2, 1.9, 2.1])
    assert 1.9 <= low < 2.05 < high <= 2.2
    low, high = grid_interval([[2.0, 2.0], [8.0, 8.0]])
    assert low == pytest.approx(4.0)
    assert high == pytest.approx(4.0)


def test_a_plot_needs_more_than_one_value(tmp_path: Path) -> None:
    row = {"layout": "split", "document_tokens": 8, "questions": 2, "new_tokens": 4, "documents": 1, "ratio": 2.0}
    row |= {"ours_s": 1.0, "stock_s": 2.0}
    assert plot({"table": [row]}, tmp_path) == []
    assert [path.name for path in plot({"table": [row, row | {"new_tokens": 8}]}, tmp_path)] == ["speedup-new_tokens.svg"]
    assert plot({"table": [row, row | {"new_tokens": 8, "questions": 4}]}, tmp_path) == [], "rows that differ in two sizes are no line"
