"""A decode step's floor by hand, and the benchmark that holds steps against it, on a CPU with a tiny shape and peaks of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.metrics import Metrics
from askmany.jobs import bench_floor, bench_merge, tables_engine
from askmany.jobs.bench_cells import Cell, Drawn
from askmany.jobs.bench_inputs import Cell as LayerCell
from askmany.jobs.bench_shapes import SHAPES
from askmany.jobs.step_floor import WORK, Decoder, DecodeStep, Operation, Peaks, apart, floor_s, operations

SMALL = Decoder(hidden=8, inner=12, layers=2, q_heads=4, kv_heads=2, head_dim=2, vocabulary=20)
COMMAND = ["--device", "cpu", "--shape", "tiny", "--document-tokens", "40", "64", "--rows", "3", "--new-tokens", "2", "5", "--runs", "2"]
PEAKS = ["--bytes-per-s", "1e10", "--flop-per-s", "1e12"]


def test_every_operation_of_a_small_step_by_hand() -> None:
    """3 rows over one document of 10 tokens with 4 keys of their own, elements of 2 bytes; queries are 8 wide, keys and values 4."""
    found = {o.name: (o.count, o.bytes, o.flops) for o in operations(SMALL, DecodeStep(3, 1, 10, 4, 2))}
    assert found == {
        "embedding": (1, 2 * 3 * 16, 0),
        "first norm": (1, 2 * (3 * 16 + 8), 0),
        "query, key and value": (2, 2 * (8 * 16 + 3 * 24), 2 * 3 * 8 * 16),
        "rotary": (2, 2 * 3 * (2 * 12 + 2), 0),
        "storing keys and values": (2, 2 * 3 * 16, 0),
        "attention": (2, 2 * (8 * (10 + 3 * 4) + 2 * 3 * 8), 4 * 3 * 8 * 14),
        "attention's output": (2, 2 * (8 * 8 + 3 * 16), 2 * 3 * 8 * 8),
        "norms with the residual": (3, 2 * (3 * 32 + 8), 0),
        "gate and up": (2, 2 * (8 * 24 + 3 * 32), 2 * 3 * 8 * 24),
        "activation": (2, 2 * 3 * 36, 0),
        "down": (2, 2 * (12 * 8 + 3 * 20), 2 * 3 * 12 * 8),
        "last norm": (1, 2 * (3 * 24 + 8), 0),
        "output layer": (1, 2 * (8 * 20 + 3 * 28), 2 * 3 * 8 * 20),
        "picking tokens": (1, 2 * 3 * 20, 0),
    }


def test_each_operation_takes_the_longer_of_its_two_times() -> None:
    one, other = Operation("a", 3, bytes=100.0, flops=1000.0), Operation("b", 1, bytes=100.0, flops=10.0)
    assert one.floor_s(Peaks(10.0, 50.0)) == pytest.approx(3 * 20.0)
    assert floor_s([one, other], Peaks(10.0, 50.0)) == pytest.approx(3 * 20.0 + 10.0)


def test_a_document_is_read_once_however_many_rows_read_it() -> None:
    def attention(rows: int, documents: int) -> Operation:
        return next(o for o in operations(SMALL, DecodeStep(rows, documents, 1000, 0, 2)) if o.name == "attention")

    assert attention(64, 1).bytes - attention(1, 1).bytes == 63 * 2 * 2 * 8
    assert attention(64, 2).bytes - attention(64, 1).bytes == 2 * 8 * 1000
    assert attention(64, 2).flops == attention(64, 1).flops == 64 * attention(1, 1).flops


@pytest.mark.parametrize(("name", "weights", "heads"), [("codellama-7b", 6.6e9, (32, 32)), ("qwen2.5-7b", 7.07e9, (28, 4))])
def test_floors_of_the_published_shapes(name: str, weights: float, heads: tuple[int, int]) -> None:
    """Weights but the embedding's are read once a step; a layer's attention is that of the kernel benchmark's floor."""
    model, step = Decoder.of(SHAPES[name]), DecodeStep(64, 1, 8192, 96, 2)
    assert sum(o.count * o.bytes for o in operations(model, DecodeStep(0, 0, 0, 0, 2))) == pytest.approx(2 * weights, rel=0.01)
    attention = next(o for o in operations(model, step) if o.name == "attention")
    layer = LayerCell(*heads, 128, 8192, 64, 96)
    assert (attention.bytes, attention.flops) == (layer.moved_bytes, layer.flops)
    assert 3e-3 < floor_s(operations(model, step), Peaks(4.3e12, 790e12)) < 6e-3


def test_the_mean_step_between_two_lengths_by_counting() -> None:
    cell, short = Cell(WORK, 40, 3, 9), 4
    own = [cell.question_tokens + fed for fed in range(short, cell.new_tokens)]  # keys of the step that feeds answer token `fed`
    assert bench_floor.decode_step(cell, short, 2) == DecodeStep(3, 1, 40, sum(own) / len(own), 2)


def test_the_command_measures_and_its_record_becomes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, merged, readme = tmp_path / "floor.json", tmp_path / "engine.json", tmp_path / "README.md"
    bench_floor.main([*COMMAND, *PEAKS, "--commit", "abcdef", "--setup", '{"page_size": 8}', "--out", str(out)])
    record = json.loads(out.read_text())
    assert [(row["document_tokens"], row["questions"], row["new_tokens"]) for row in record["table"]] == [(40, 3, 5), (64, 3, 5)]
    for row in record["table"]:
        least_s = floor_s(operations(Decoder.of(SHAPES["tiny"]), DecodeStep(3, 1, row["document_tokens"], 15.0, 4)), Peaks(1e10, 1e12))
        assert row["stock_s"] == pytest.approx(least_s)
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["ratio"] == pytest.approx(row["ours_s"] / least_s)
        assert (row["layout"], row["best_stock"], row["idle_ratio"], len(row["ratios"])) == ("split", "floor", None, 2)
    assert capsys.readouterr().out.count("ms a step, floor") == 2
    readme.write_text("<!-- engine -->\n<!-- /engine -->\n")
    arguments = [str(out), "--out", str(merged), "--readme", str(readme), "--plots", str(tmp_path / "plots")]
    assert bench_merge.main(arguments) == 0
    made = json.loads(merged.read_text())
    assert (made["means"], made["fits"], len(apart(made["table"])[1])) == ([], [], 2)
    assert not list((tmp_path / "plots").iterdir())
    text = readme.read_text()
    assert "at 0.01 TB/s and 1 TFLOP/s), host included:" in text
    first = made["table"][0]
    shown = f"| tiny | split (page_size 8) | 40 | 3 | {first['ours_s'] * 1e3:.2f} | {first['stock_s'] * 1e3:.2f} | {first['ratio']:.2f} |"
    assert shown in text
    assert "Slower than" not in text
    assert tables_engine.main([str(readme), str(merged), "--check"]) == 0


def test_peaks_are_never_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_floor.main([*COMMAND, "--bytes-per-s", "1e10", "--out", str(tmp_path / "o.json")])
    assert "the peaks of this machine are not known" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_floor.main(["--device", "cpu", "--new-tokens", "5", "5", "--out", str(tmp_path / "o.json")])
    assert "SHORT must be below LONG" in capsys.readouterr().err


def test_nothing_begins_after_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_floor.main([*COMMAND, *PEAKS, "--limit-s", "0", "--out", str(tmp_path / "o.json")])
    assert capsys.readouterr().out.count("LEFT OUT for time") == 2
    assert not (tmp_path / "o.json").exists()


class Counted:
    """A contender whose step takes 0.5 s, of which the device idles 0.1 s, after 3 s that every call takes."""

    def __init__(self, **more: int) -> None:
        self.metrics, self._more = Metrics(), more

    def run(self, cell: Cell, drawn: Drawn) -> float:
        return 0.0

    def answer(self, asked: list[Any]) -> tuple[float, list[Any]]:
        ((_, tails, lengths),) = asked
        counted = {"steps": lengths[0] + 1, "decode_tokens": (lengths[0] - 1) * len(tails)} | self._more
        self.metrics += Metrics(**counted, device_busy_s=1.0 + 0.4 * lengths[0], device_idle_s=0.7 + 0.1 * lengths[0])
        return 3.0 + 0.5 * lengths[0], []


def test_what_comes_before_and_after_the_steps_is_left_out() -> None:
    cell, drawn = Cell(WORK, 40, 3, 9), Drawn([[1] * 40], [[[1] * 12] * 3], [[9] * 3])
    run = bench_floor.Bench(Counted(), cell, drawn, 4).run()  # type: ignore[arg-type]
    assert (run.step_s, run.busy_s, run.idle_s) == (pytest.approx(0.5), pytest.approx(2.0), pytest.approx(0.5))
    assert bench_floor.row_of(cell, [run], 0.25)["ratio"] == pytest.approx(2.0)
    assert bench_floor.row_of(cell, [run, run], 0.25)["idle_ratio"] == pytest.approx(0.2)
    with pytest.raises(RuntimeError, match="did not stay in the cache"):
        bench_floor.Bench(Counted(prefill_tokens=40), cell, drawn, 4).run()  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="0 steps lie between answers of 4 and 9 tokens"):
        bench_floor.Bench(Counted(steps=9), cell, drawn, 4).run()  # type: ignore[arg-type]
