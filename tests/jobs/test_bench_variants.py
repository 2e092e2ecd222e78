"""Contenders with setups of their own: their names, their rows, and how they are compared with one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.jobs import bench_gpu
from askmany.jobs.bench_cells import Cell
from askmany.jobs.bench_merge import merged
from askmany.jobs.bench_variants import Named

DETERMINISTIC = "split:deterministic=true"


def test_a_name_holds_fields_of_the_setup() -> None:
    assert Named.parse("split") == Named("split")
    assert Named.parse("split:deterministic=true,page_size=16") == Named("split", {"deterministic": True, "page_size": 16})
    assert Named.parse("interleaved:streams=calibrate").setup == {"streams": "calibrate"}


@pytest.mark.parametrize("name", ["split:", "split:page_size", "split:=16", "split:page_size=", "split:page_size=16,"])
def test_a_name_that_says_nothing_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no NAME=VALUE"):
        bench_gpu.main(["--contenders", name, "--out", str(tmp_path / "out.json")])


def test_setups_of_one_call_are_compared_with_stock_and_with_each_other() -> None:
    cells = [Cell("a", 8, 1, 1)]
    seconds = {"stock-fa3": 3.0, "split": 1.0, DETERMINISTIC: 1.5}
    times: Any = {name: {0: [(0, seed, s) for seed in range(3)]} for name, s in seconds.items()}
    found = bench_gpu.summarise(cells, times, {"model": "m", "setup": {"page_size": 16}}, against="split")
    assert [(row["layout"], row["setup"], row["ratio"]) for row in found["table"]] == [
        ("split", {"page_size": 16}, pytest.approx(3.0)), ("split", {"page_size": 16, "deterministic": True}, pytest.approx(2.0)),
    ]  # fmt: skip
    assert [(row["setup_label"], row["against"], row["ratio"]) for row in found["between"]] == [
        ("deterministic True, page_size 16", "split", pytest.approx(1 / 1.5))
    ]
    assert [(mean["setup_label"], mean["ratio"]) for mean in found["means"]] == [
        ("page_size 16", pytest.approx(3.0)), ("deterministic True, page_size 16", pytest.approx(2.0)),
    ]  # fmt: skip


def test_what_a_setup_was_compared_with_tells_its_rows_apart() -> None:
    cells, labels = [Cell("a", 8, 1, 1)], {"model": "m", "setup": {}}
    times: Any = {name: {0: [(0, 0, s)]} for name, s in {"split": 1.0, "run-to-completion": 4.0, "interleaved": 2.0}.items()}
    environment = {"environment": {"gpu": "G", "commit": "c", "versions": {}, "date": ""}}
    records = [
        (against, bench_gpu.summarise(cells, times, labels, against) | labels | environment) for against in ("split", "run-to-completion")
    ]
    found = {(row["layout"], row["against"]): row["ratio"] for row in merged(None, records)["between"]}
    assert found == {
        ("run-to-completion", "split"): 0.25, ("interleaved", "split"): 0.5,
        ("split", "run-to-completion"): 4.0, ("interleaved", "run-to-completion"): 2.0,
    }  # fmt: skip


def test_the_command_times_setups_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_gpu, "suites", lambda: {"grid": [Cell("grid", 40, 3, 4)]})
    out = tmp_path / "out.json"
    options = ["--shape", "tiny", "--device", "cpu", "--seeds", "1", "--passes", "1", "--limit-s", "200", "--setup", '{"page_size": 16}']
    bench_gpu.main([*options, "--contenders", "split", DETERMINISTIC, "--against", "split", "--out", str(out)])
    record = json.loads(out.read_text())
    assert [(row["layout"], row["setup"]) for row in record["between"]] == [("split", {"page_size": 16, "deterministic": True})]
    assert record["between"][0]["ours_s"] > 0
    assert "split (deterministic True, page_size 16) against split" in " ".join(capsys.readouterr().out.split())
