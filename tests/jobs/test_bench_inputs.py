"""The benchmark's cells: their floors by hand, and that every layout of a cell names the same keys."""

from __future__ import annotations

import pytest
import torch

from askmany.jobs.baselines_kernels import interleaved, newest_keys
from askmany.jobs.bench_inputs import Cell, Inputs, pool_for
from askmany.kernels import reference

CELL = Cell(6, 2, 64, 130, 3, 70)


def test_floors_by_hand() -> None:
    cell = Cell(32, 32, 128, 8192, 64, 96)
    moved = 2 * 2 * 32 * 128 * (8192 + 64 * 96) + 2 * 2 * 64 * 32 * 128
    assert cell.moved_bytes == moved
    assert cell.flops == 4 * 64 * 32 * 128 * (8192 + 96)
    assert cell.floor_us == pytest.approx(1e6 * moved / 4.3e12)
    assert Cell(28, 4, 128, 32768, 256, 96).floor_us == pytest.approx(1e6 * 4 * 256 * 28 * 128 * (32768 + 96) / 790e12)


def test_layers_outlive_the_cache() -> None:
    for cell in (CELL, Cell(32, 32, 128, 512, 4, 96), Cell(32, 32, 128, 32768, 256, 96)):
        assert 2 <= cell.layers <= 48
        assert cell.layers == 48 or cell.layers * cell.moved_bytes >= 2.4e8


def test_every_layout_names_the_same_keys() -> None:
    inputs = Inputs(CELL, pool_for([CELL], torch.device("cpu")), seed=1)
    slots = torch.cat([inputs.document, inputs.own.reshape(-1)])
    assert len(set(slots.tolist())) == CELL.document + CELL.streams * CELL.private == len(slots)
    assert int(slots.max()) < inputs.slots
    indices, sid = interleaved(inputs)
    for stream in range(CELL.streams):
        mine = set(indices[sid == stream].tolist())
        assert mine == set(inputs.own[stream, :-1].tolist())
    assert torch.equal(indices[sid == -1], inputs.document)
    k, v = inputs.layer(1)
    fresh = newest_keys(inputs)[k.data_ptr()]
    assert torch.equal(fresh[0], k[inputs.own[:, -1]])
    assert torch.equal(fresh[1], v[inputs.own[:, -1]])


def test_the_truth_is_attention_over_document_and_own_keys() -> None:
    inputs = Inputs(CELL, pool_for([CELL], torch.device("cpu")), seed=2)
    k, v = inputs.layer(0)
    slots = torch.cat([inputs.document, inputs.own[2]])
    want, _ = reference.attend(inputs.q[2:3].double(), k[slots].double(), v[slots].double(), inputs.scale)
    assert torch.allclose(inputs.truth([2]), want, atol=1e-9)
