"""Attention kernels side by side on one GPU: python -m askmany.jobs.bench_kernels --out jobs/measurements/kernels-h200.json

One layer of one decode step inside a CUDA graph, layers rotated so that no cache holds the next one's keys. A kernel's output is judged
against the fp64 oracle before its time is taken; one that fails has its error printed and no time. Ends with the marks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from askmany.jobs import baselines_kernels as baselines
from askmany.jobs.baselines_kernels import LayerCall
from askmany.jobs.bench_inputs import PAGE, Cell, Inputs, pool_for
from askmany.kernels import vendor
from askmany.kernels.measure import elapsed_ms
from askmany.kernels.oracle import relative_error
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.stream_mask import MaskPlan, choose_splits, choose_tile, stream_mask
from askmany.kernels.tables import NodeEntry, StepLimits, StreamEntry
from askmany.kernels.tiles import AttentionShape
from askmany.kernels.vendor_attention import VendorAttention

HEADS = ("32/32", "28/4", "12/2")  # CodeLlama-7B, Qwen2.5-7B, Qwen2.5-1.5B: query heads/KV heads, of 128 dims
DOCUMENTS = (512, 4096, 8192, 16384, 32768)
STREAMS = (4, 16, 64, 256)
PRIVATES = (96, 1024)
ERROR_BOUND = 4e-3
SAMPLED_STREAMS = 4
PARTS = ("fa3_document_pass", "stream_document_pass")  # not a whole answer: timed without a check of their own

Builder = Callable[[Inputs], LayerCall | None]


def stream_attention(inputs: Inputs) -> LayerCall:
    """Our split layout: work list built once, as once a step."""
    return _split_call(inputs, _stream_attention(inputs), inputs.cell.private)


def stream_document_pass(inputs: Inputs) -> LayerCall:
    """Our document pass and merge: the same streams without private keys."""
    return _split_call(inputs, _stream_attention(inputs), 0)


def fa3_split(inputs: Inputs) -> LayerCall | None:
    """FA3's document pass with our private pass and merge."""
    if "fa3" not in vendor.available(inputs.q.device, torch.bfloat16):
        return None
    shape, limits = _shape_and_limits(inputs)
    document = vendor.FlashDocumentPass()
    attention = VendorAttention(shape, limits, inputs.q.device, document, levels=1, node_pages=inputs.document_pages)
    return _split_call(inputs, attention, inputs.cell.private)


def masked(inputs: Inputs) -> LayerCall:
    """Our interleaved kernel over the same keys."""
    cell, device = inputs.cell, inputs.q.device
    indices, sid = baselines.interleaved(inputs)
    slot_sid = torch.full((inputs.slots,), -1, dtype=torch.int32, device=device)
    slot_sid[indices] = sid
    group = cell.q_heads // cell.kv_heads
    tile = choose_tile(cell.streams, group, cell.head_dim, torch.bfloat16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    plan = MaskPlan(
        q_indptr=ints(0, cell.streams),
        new_keys=ints(cell.streams),
        kv_indptr=ints(0, indices.shape[0]),
        kv_indices=indices.to(torch.int32),
        q_sid=torch.arange(cell.streams, dtype=torch.int32, device=device),
        splits=choose_splits(cell.streams, group, cell.kv_heads, indices.shape[0], tile, processors),
    )
    newest = baselines.newest_keys(inputs)
    return lambda k, v: stream_mask(inputs.q, *newest[k.data_ptr()], k, v, slot_sid, plan, inputs.scale, tile)[0]


BUILDERS: dict[str, Builder] = {
    "fa3_decode": baselines.fa3_decode,
    "flashinfer_decode": baselines.flashinfer_decode,
    "flashinfer_cascade": baselines.flashinfer_cascade,
    "fa3_document_pass": baselines.fa3_document_pass,
    "fa3_split": fa3_split,
    "stream_mask": masked,
    "stream_document_pass": stream_document_pass,
    "stream_attention": stream_attention,
    "sglang_extend_mask": baselines.sglang_extend_mask,
}


def wanted(kernel: str, cell: Cell) -> bool:
    """Parts do not depend on private keys, and the dense mask grows with the square of the streams: both are measured once a shape."""
    if kernel in PARTS:
        return cell.private == PRIVATES[0]
    if kernel == "sglang_extend_mask":
        return (cell.document, cell.streams, cell.private) == (8192, 64, PRIVATES[0])
    return True


def sample_of(cell: Cell) -> list[int]:
    """The streams whose outputs are judged: first, last and two between."""
    return sorted({round(i * (cell.streams - 1) / (SAMPLED_STREAMS - 1)) for i in range(SAMPLED_STREAMS)})


def measure(kernel: str, inputs: Inputs, want: Tensor, budget_ms: float) -> dict[str, Any] | None:
    """A row of the table; None where the package is missing. `us` is None when the output is wrong: `want` is the sample's truth."""
    cell = inputs.cell
    call = BUILDERS[kernel](inputs)
    if call is None:
        return None
    got = call(*inputs.layer(0))[sample_of(cell)]
    right = kernel in PARTS or relative_error(got, want) < ERROR_BOUND
    done = replace(cell, private=0) if kernel in PARTS else cell
    row: dict[str, Any] = {"kernel": kernel, "q_heads": cell.q_heads, "kv_heads": cell.kv_heads, "head_dim": cell.head_dim}
    row |= {"document_tokens": cell.document, "streams": cell.streams, "private_tokens": done.private}
    error = None if kernel in PARTS else float((got.double() - want).abs().max())
    us = time_us(call, inputs, budget_ms) if right else None
    row |= {"us": us, "floor_us": done.floor_us, "max_error": error, "bytes": done.moved_bytes, "flops": done.flops}
    return row | {"floor_share": done.floor_us / us if us else None}


def time_us(call: LayerCall, inputs: Inputs, budget_ms: float) -> float:
    """Median microseconds of one layer over five rounds of graph replays that go through all layers of the cell."""
    layers = [inputs.layer(i) for i in range(inputs.cell.layers)]
    call(*layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            call(*layer)
    first = _elapsed_ms(graph, 1)
    repeats = max(1, min(20, int(budget_ms / 5 / max(_elapsed_ms(graph, 1), 1e-3))))
    rounds = [first] if first > budget_ms else [_elapsed_ms(graph, repeats) / repeats for _ in range(5)]
    return 1e3 * statistics.median(rounds) / len(layers)


def run(cells: list[Cell], kernels: list[str], budget_ms: float, limit_s: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of each cell in turn; cells that would begin after `limit_s` seconds are left out and said to be."""
    started, pool = time.monotonic(), pool_for(cells, torch.device("cuda"))
    for index, cell in enumerate(cells):
        if time.monotonic() - started > limit_s:
            print(f"LEFT OUT for time: {cell}", flush=True)
            continue
        inputs = Inputs(cell, pool, seed=index)
        want = inputs.truth(sample_of(cell))
        found = [_attempt(kernel, inputs, want, budget_ms) for kernel in kernels if wanted(kernel, cell)]
        yield [row for row in found if row is not None]


def environment() -> dict[str, Any]:
    """What the figures were taken with."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "flashinfer-python", "sglang-kernel", "sglang"):
        versions[package] = _version(package)
    return {"gpu": torch.cuda.get_device_name(), "versions": versions, "date": time.strftime("%Y-%m-%d"), "page_size": PAGE}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="commit of the measured tree, where it is no git checkout")
    parser.add_argument("--kernels", nargs="*", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--heads", nargs="*", default=list(HEADS))
    parser.add_argument("--documents", nargs="*", type=int, default=list(DOCUMENTS))
    parser.add_argument("--streams", nargs="*", type=int, default=list(STREAMS))
    parser.add_argument("--privates", nargs="*", type=int, default=list(PRIVATES))
    parser.add_argument("--budget-ms", type=float, default=8.0, help="measuring time of one kernel in one cell")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no new cell is begun after this")
    options = parser.parse_args(arguments)
    grid = itertools.product(options.privates, options.documents, options.streams, options.heads)
    cells = [_cell(*point) for point in grid]
    record: dict[str, Any] = environment() | {"commit": options.commit or _commit(), "table": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for rows in run(cells, options.kernels, options.budget_ms, options.limit_s):
        record["table"] += rows
        options.out.write_text(json.dumps(record, indent=1) + "\n")  # after each cell: a run that is cut short keeps its rows
    print(f"{len(record['table'])} rows in {options.out}")


def _cell(private: int, document: int, streams: int, heads: str) -> Cell:
    q_heads, kv_heads = (int(part) for part in heads.split("/"))
    return Cell(q_heads, kv_heads, 128, document, streams, private)


def _stream_attention(inputs: Inputs) -> StreamAttention:
    """With what an engine tells it: how long the document of a bucket's first step is, and that it was stored by steps before."""
    return StreamAttention(*_shape_and_limits(inputs), inputs.q.device, node_tokens=inputs.cell.document, settled_nodes=True)


def _shape_and_limits(inputs: Inputs) -> tuple[AttentionShape, StepLimits]:
    cell = inputs.cell
    pages = inputs.document_pages + cell.streams * inputs.own_pages
    shape = AttentionShape(cell.q_heads, cell.kv_heads, cell.head_dim, PAGE, torch.bfloat16)
    return shape, StepLimits(rows=cell.streams, streams=cell.streams, nodes=1, pages=pages)


def _split_call(inputs: Inputs, attention: StreamAttention | VendorAttention, private: int) -> LayerCall:
    own = inputs.own_table.tolist()
    streams = [StreamEntry(i, 1, private, own[i], (0,)) for i in range(inputs.cell.streams)]
    attention.tables.load([NodeEntry(inputs.cell.document, inputs.document_table.tolist())], streams)
    attention.plan.build()
    attention.plan.check()
    return lambda k_cache, v_cache: attention.run(inputs.q, k_cache, v_cache, inputs.scale)


def _attempt(kernel: str, inputs: Inputs, want: Tensor, budget_ms: float) -> dict[str, Any] | None:
    """`measure` with a line of output; a kernel that raises is reported and leaves no row."""
    cell = inputs.cell
    try:
        row = measure(kernel, inputs, want, budget_ms)
    except Exception as error:  # another library's failure must not end the run
        print(f"FAILED {kernel} {cell}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    if row is not None:
        shown = "wrong" if row["us"] is None else f"{row['us']:.1f} us"
        place = f"{cell.q_heads}/{cell.kv_heads} L={cell.document} P={cell.streams} private={cell.private}"
        print(f"{kernel:22s} {place}: {shown} {row['max_error']}", flush=True)
    return row


def _elapsed_ms(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    return elapsed_ms(graph.replay, repeats)


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
