"""The kernel table and its marks, from made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from askmany.jobs.markers import between
from askmany.jobs.tables import Measurements, main, marks


def _row(
    kernel: str, us: float | None, heads: tuple[int, int] = (28, 4), document: int = 8192, streams: int = 16, private: int = 96
) -> dict[str, object]:
    row = {"kernel": kernel, "q_heads": heads[0], "kv_heads": heads[1], "head_dim": 128, "document_tokens": document, "streams": streams}
    flops, moved = 4 * streams * heads[0] * 128 * (document + private), 512 * heads[1] * (document + streams * private)
    floor = max(flops / 790e6, moved / 4.3e6)
    return row | {"private_tokens": private, "us": us, "floor_us": floor, "max_error": 1e-3, "flops": flops, "bytes": moved}


def _record(*rows: dict[str, object]) -> dict[str, object]:
    return {
        "gpu": "Some GPU",
        "versions": {"torch": "2.11", "sglang": None},
        "commit": "abcdef0123456789",
        "date": "2026-01-01",
        "table": list(rows),
    }


def _mark(record: dict[str, object], words: str) -> str:
    return next(str(mark) for mark in marks(Measurements(record)) if words in mark.claim)


def test_stock_is_the_best_of_both() -> None:
    record = _record(_row("fa3_decode", 40.0), _row("flashinfer_decode", 30.0), _row("stream_attention", 33.0))
    assert "holds in 0 of 1 cells, worst 1.10" in _mark(record, "best stock decode")
    record = _record(_row("fa3_decode", 40.0), _row("stream_attention", 33.0))
    assert "holds in 1 of 1 cells, worst 0.82" in _mark(record, "best stock decode")


def test_a_wrong_kernel_has_no_time_and_no_mark() -> None:
    record = _record(_row("fa3_decode", 40.0), _row("stream_attention", None))
    assert _mark(record, "best stock decode").endswith("not measured")


def test_the_document_pass_is_held_against_fa3() -> None:
    record = _record(
        _row("stream_document_pass", 15.0, private=0), _row("fa3_document_pass", 18.0, private=0), _row("stream_attention", 20.0)
    )
    assert "holds in 1 of 1" in _mark(record, "no slower than FA3's")
    assert "holds in 0 of 1" in _mark(record, "1.3x faster")
    assert "worst 5.00 (bound 6.00)" in _mark(record, "6 us over")


def test_compute_and_memory_bound_cells_are_told_apart() -> None:
    small = _row("stream_attention", 150.0, (32, 32), 32768, 16)
    large = _row("stream_document_pass", 160.0, (32, 32), 32768, 256, 0)
    slow = _row("stream_document_pass", 400.0, (32, 32), 32768, 256, 0)
    record = _record(small, large)
    assert "holds in 1 of 1" in _mark(record, "above 200 MB")
    assert "not measured" in _mark(record, "100 to 200 MB")
    assert "holds in 0 of 1" in _mark(_record(slow), "450 TFLOP/s")
    assert "holds in 1 of 1" in _mark(record, "450 TFLOP/s")


def test_the_readme_follows_the_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme, measured = tmp_path / "README.md", tmp_path / "m.json"
    readme.write_text("before\n<!-- kernels -->\nold\n<!-- /kernels -->\nafter\n")
    measured.write_text(json.dumps(_record(_row("fa3_decode", 40.0), _row("stream_attention", 20.0))))
    paths = [str(readme), str(measured)]
    assert main([*paths, "--check"]) == 1
    assert "old" in readme.read_text()
    assert main(paths) == 0
    text = readme.read_text()
    assert "| 28/4 | 8,192 | 16 |" in text
    assert "| 2.0x |" in text
    assert text.startswith("before\n<!-- kernels -->\nSome GPU, torch 2.11; commit abcdef012345, 2026-01-01.")
    assert text.endswith("<!-- /kernels -->\nafter\n")
    assert main([*paths, "--check"]) == 0
    assert "no slower than the best stock decode: holds in 1 of 1" in capsys.readouterr().out


def test_missing_markers_are_named() -> None:
    with pytest.raises(ValueError, match="<!-- kernels -->"):
        between("no markers", "kernels", "table")


def test_the_published_measurements_are_whole() -> None:
    """Every row of the repository's own file has its fields, a time and an error within bounds; one run, one commit."""
    record = json.loads((Path(__file__).parents[2] / "jobs/measurements/kernels-h200.json").read_text())
    fields = {"kernel", "q_heads", "kv_heads", "head_dim", "document_tokens", "streams", "private_tokens", "us", "floor_us", "max_error"}
    assert record["gpu"] == "NVIDIA H200"
    assert len(record["commit"]) == 40
    for row in record["table"]:
        assert fields <= set(row)
        assert row["us"] > 0
        assert row["max_error"] is None or row["max_error"] < 0.009
