"""Kernels compile for every generation of GPU that askmany is meant for, and fit its shared memory; no GPU is needed to know that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from askmany.kernels.tiles import SHARED_MEMORY

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = {"group_rows", "size_work", "emit_work", "settle", "attend_work", "merge_partials", "attend_masked", "merge_splits", "merge_rows"}
ALWAYS |= {"rotate_rows", "store_rows", "store_row_ids", "scan_rows", "pick_rows", "scan_legal_rows", "pick_legal_rows", "feed_rows"}
ALWAYS |= {"multiply_tiles"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("generation", [pytest.param(80, marks=pytest.mark.slow), 86, 90])
def test_every_kernel_compiles_and_fits(tmp_path: Path, generation: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.helpers.compile_kernels", str(generation)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    hopper = {"attend_work_hopper"} if generation == 90 else set()
    assert {row["kernel"] for row in rows} == ALWAYS | hopper
    room = SHARED_MEMORY[divmod(generation, 10)] * 1024
    assert [row for row in rows if row["shared"] > room] == []
    spilled = [row for row in rows if row["kernel"] in hopper and row["stack"] > 16]  # softmax lives in registers
    assert {(row["case"], row["stack"]) for row in spilled} <= {("32/32 heads, 128, pages of 64, torch.bfloat16, 16 rows, 64 x 128", 24)}
    assert [row for row in rows if row["kernel"] == "merge_partials" and row["stack"]] == []
