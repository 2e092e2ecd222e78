"""What the kernels compile to for a GPU that is not here: `python -m tests.helpers.compile_kernels 86`, with TRITON_INTERPRET=0.

The product's own launches run on host tensors; Triton believes in a device of that generation, compiles for it, and launches nothing. Each
line of the output tells of one launch: the case, the kernel, its shared memory (bytes) and the stack its threads spill to (bytes).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from askmany.kernels.attend import attend
from askmany.kernels.greedy import GreedyPick, LegalPick, launch_feed
from askmany.kernels.layout import MaskedBatch, MaskedItem
from askmany.kernels.merge import merge, merge_tile
from askmany.kernels.merge_into import launch_merge
from askmany.kernels.ordered import ordered_product
from askmany.kernels.rotary import Rotary, launch_rotate_and_store
from askmany.kernels.store import launch_store, launch_store_ids
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.stream_mask import plan_mask, stream_mask
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape, candidates

CPU = torch.device("cpu")
SLOTS = 1024
HALF, FULL = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    generation: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.generation, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


@dataclass(frozen=True)
class Compiled:
    """One kernel of one launch."""

    case: str
    kernel: str
    shared: int
    stack: int


def compiled(generation: int) -> Iterator[Compiled]:
    """Every launch of every case."""
    driver.set_active(AbsentDevice(generation))
    for case, launch in cases(divmod(generation, 10)):
        found: list[tuple[str, Any]] = []
        with mock.patch.object(JITFunction, "run", _compile_only(found)), mock.patch("askmany.kernels.attend._precision", _on_a_gpu):
            launch()
        for name, kernel in found:
            yield Compiled(case, name, kernel.metadata.shared, _stack(kernel.asm["cubin"]))


def cases(capability: tuple[int, int]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Shapes of real models, with what each kind of tile needs; on sm_90 the plain kernel serves fp32 and pages of single slots."""
    shapes = [
        (28, 4, 128, 64, HALF, 16),
        (32, 32, 128, 64, HALF, 16),
        (28, 4, 128, 64, HALF, 256),
        (32, 32, 96, 1, HALF, 4),
        (9, 3, 64, 16, FULL, 16),
    ]
    for q_heads, kv_heads, dim, page, dtype, rows in shapes:
        shape = AttentionShape(q_heads, kv_heads, dim, page, dtype)
        tiles = candidates(shape, rows, 1, capability)
        for choice in tiles if tiles[0].groups and rows == 16 else tiles[:1]:
            name = f"{q_heads}/{kv_heads} heads, {dim}, pages of {page}, {dtype}, {rows} rows, {choice.rows} x {choice.keys}"
            yield name, lambda shape=shape, rows=rows, choice=choice: _split(shape, rows, choice, capability)  # type: ignore[misc]
    for tile in sorted({merge_tile(outputs, splits) for outputs in (100, 500, 2000, 9000) for splits in (2, 9, 40, 70)}):
        for dim in (128, 256) if tile[0] in (1, 16) else (128,):
            yield f"merge of {tile}, {dim}", lambda tile=tile, dim=dim: _merged(tile, dim, capability)  # type: ignore[misc]
    yield "stream mask, 64 rows", lambda: _masked(64, HALF)
    yield "stream mask, fp32", lambda: _masked(8, FULL)
    yield "the rest", lambda: _rest(capability)


def _split(shape: AttentionShape, rows: int, tiles: Any, capability: tuple[int, int]) -> None:
    attention = StreamAttention(shape, StepLimits(rows, rows, 4, SLOTS), CPU, rows_per_stream=1, tiles=tiles, settled_nodes=True)
    attention.plan.build()
    q, k, v = _qkv(shape, rows)
    part_o, part_lse = torch.empty(attention.plan.capacity.partials, shape.head_dim), torch.empty(attention.plan.capacity.partials)
    overlap = capability[0] >= 9
    attend(q, k, v, 0.1, attention.plan, part_o, part_lse, overlap)
    merge(part_o, part_lse, attention.plan, torch.empty_like(q), None, overlap)


def _merged(tile: tuple[int, int, int], dim: int, capability: tuple[int, int]) -> None:
    plan = StreamAttention(AttentionShape(28, 4, dim, 64, HALF), StepLimits(4, 4, 1, SLOTS), CPU).plan
    part_o, part_lse = torch.empty(64, dim), torch.empty(64)
    with mock.patch("askmany.kernels.merge.merge_tile", return_value=tile):
        merge(part_o, part_lse, plan, torch.empty(4, 28, dim, dtype=HALF), None, capability[0] >= 9)


def _qkv(shape: AttentionShape, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    cache = torch.empty(SLOTS, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
    return torch.empty(rows, shape.q_heads, shape.head_dim, dtype=shape.dtype), cache, torch.empty_like(cache)


def _masked(rows: int, dtype: torch.dtype) -> None:
    q, k, v = _qkv(AttentionShape(28, 4, 128, 1, dtype), rows)
    slot_sid = torch.zeros(SLOTS, dtype=torch.int32)
    batch = MaskedBatch((MaskedItem(0, rows, torch.arange(SLOTS)),), slot_sid[:rows], slot_sid)
    stream_mask(q, k[:rows], v[:rows], k, v, slot_sid, plan_mask(batch, splits=4), 0.1)


def _rest(capability: tuple[int, int]) -> None:
    """Store, merge of rings, and the picking of tokens."""
    rows, width = 16, 152_064
    q, k, v = _qkv(AttentionShape(28, 4, 128, 64, HALF), rows)
    rotary = Rotary(torch.empty(SLOTS, 128))
    launch_rotate_and_store(q, k[:rows], v[:rows], torch.arange(rows), rotary, k, v, torch.arange(rows), capability[0] >= 9)
    partly = Rotary(torch.empty(SLOTS, 48), interleaved=True)
    launch_rotate_and_store(q, k[:rows], v[:rows], torch.arange(rows), partly, k, v, torch.arange(rows), capability[0] >= 9)
    launch_store(k[:rows], v[:rows], k, v, torch.arange(rows), capability[0] >= 9)
    launch_store_ids(torch.zeros(rows, dtype=torch.int32), torch.zeros(SLOTS, dtype=torch.int32), torch.arange(rows))
    total, part = ((torch.empty(rows, 28, 128, dtype=dtype), torch.empty(rows, 28)) for dtype in (FULL, HALF))
    launch_merge(total, part, slice(0, rows), first=False)
    pick, legal, logits = GreedyPick(rows, width, CPU), LegalPick(rows, width, CPU), torch.empty(rows, width, dtype=HALF)
    pick.run(logits)
    launch_feed(pick.out.tokens, torch.arange(rows), pick.out.tokens)
    which = torch.zeros(rows, dtype=torch.int32)
    ordered_product(torch.empty(rows, 3584, dtype=HALF), torch.empty(512, 3584, dtype=HALF).t(), None, torch.empty(rows, 512, dtype=HALF))
    legal.run(logits, which, which, torch.zeros(1, -(-width // 32), dtype=torch.int32), pick.out, torch.zeros(rows, dtype=torch.int64))


def _compile_only(found: list[tuple[str, Any]]) -> Callable[..., Any]:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append((self.__name__, kernel))
        return kernel

    return compile_only


def _on_a_gpu(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _stack(cubin: bytes) -> int:
    """Bytes a thread keeps outside its registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(found) for found in re.findall(r"STACK:(\d+)", told.stdout + told.stderr))


if __name__ == "__main__":
    for one in compiled(int(sys.argv[1])):
        print(json.dumps(vars(one)), flush=True)
