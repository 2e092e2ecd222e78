"""The parts of the kernel benchmark that need no GPU: which cells a kernel is measured in, whose outputs are judged."""

from __future__ import annotations

import pytest
import torch

from askmany.jobs.bench_inputs import Cell, Inputs, pool_for
from askmany.jobs.bench_kernels import BUILDERS, PARTS, measure, sample_of, wanted
from askmany.jobs.tables import COLUMNS, STOCK


def test_the_sample_holds_first_and_last_stream() -> None:
    assert sample_of(Cell(4, 4, 64, 10, 1, 1)) == [0]
    assert sample_of(Cell(4, 4, 64, 10, 2, 1)) == [0, 1]
    assert sample_of(Cell(4, 4, 64, 10, 256, 1)) == [0, 85, 170, 255]


def test_parts_and_the_dense_mask_are_measured_once_a_shape() -> None:
    cells = [Cell(28, 4, 128, 8192, 64, private) for private in (96, 1024)]
    for kernel in (*PARTS, "sglang_extend_mask"):
        assert [wanted(kernel, cell) for cell in cells] == [True, False]
    assert not wanted("sglang_extend_mask", Cell(28, 4, 128, 32768, 64, 96))
    assert all(wanted("stream_attention", cell) for cell in cells)


def test_the_table_names_kernels_that_exist() -> None:
    assert set(COLUMNS) - {"floor_us"} <= set(BUILDERS)
    assert set(STOCK) <= set(BUILDERS)
    assert set(PARTS) <= set(BUILDERS)


def test_a_wrong_output_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(4, 2, 64, 130, 3, 70)
    inputs = Inputs(cell, pool_for([cell], torch.device("cpu")), seed=1)
    want = inputs.truth(sample_of(cell))
    monkeypatch.setitem(BUILDERS, "fa3_decode", lambda inputs: lambda k, v: inputs.q * float("nan"))
    row = measure("fa3_decode", inputs, want, 1.0)
    assert row is not None
    assert row["us"] is None
    monkeypatch.setitem(BUILDERS, "fa3_decode", lambda inputs: None)
    assert measure("fa3_decode", inputs, want, 1.0) is None
