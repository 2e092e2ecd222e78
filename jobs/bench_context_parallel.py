"""Context parallelism over the GPUs of one host: python -m askmany.jobs.bench_context_parallel --ranks 2 --out FILE.json

Starts a process a rank (NCCL between GPUs, gloo on a CPU) and measures, each result judged against fp64 before its time is taken:
attention of a prefill over N ranks against one, and what of the exchange is hidden; pass-KV against pass-Q from 1 % to 100 % new tokens and
what the rules choose; a decode step of many streams; whole models; a document that no single GPU's pool holds. `--small` is the same on
two CPU processes with tiny shapes. Rows are written as they come; the table is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from askmany.engine.context_parallel import Groups
from askmany.engine.context_parallel_join import MeetingPlace, join
from askmany.jobs.bench_context_attention import Bench, crossover_row, prefill_cell
from askmany.jobs.bench_context_model import CODELLAMA, QWEN, ModelCell, Shape, model_cell
from askmany.jobs.bench_context_streams import stream_cell
from askmany.jobs.bench_context_table import modelled, printed
from askmany.kernels.block_attention import best_blocks
from askmany.kernels.ring_choice import Rules
from askmany.kernels.ring_measure import calibrated
from askmany.kernels.tiles import AttentionShape

TINY = Shape("Tiny", 4, 2, 16, 64, 96, 2, 97)
SECTIONS = ("prefill", "crossover", "streams", "model", "over_long")


@dataclass(frozen=True, slots=True)
class Programme:
    """What is measured. `models`: (cell, whether one GPU holds it). `calibration`: (new, cached) tokens of the start-up fit."""

    shapes: tuple[Shape, ...]
    prefills: tuple[int, ...]
    crossovers: tuple[int, ...]
    miss_percent: tuple[float, ...]
    stream_document: int
    streams: tuple[int, ...]
    private: int
    models: tuple[ModelCell, ...]
    over_long: tuple[ModelCell, ...]
    calibration: tuple[tuple[int, int], ...]
    repeats: int


K = 1024
FULL = Programme(
    shapes=(CODELLAMA, QWEN),
    prefills=(32 * K, 128 * K),
    crossovers=(32 * K, 128 * K),
    miss_percent=(1, 2.5, 5, 10, 20, 40, 70, 100),
    stream_document=128 * K,
    streams=(64, 256),
    private=96,
    models=(
        *(ModelCell(shape, shape.layers, length, 16, 16 * K) for shape in (CODELLAMA, QWEN) for length in (32 * K, 128 * K)),
        ModelCell(QWEN, 14, 512 * K, 16, 16 * K),
        ModelCell(CODELLAMA, 8, 512 * K, 16, 16 * K),
        ModelCell(CODELLAMA, 8, 128 * K, 64, 16 * K),
        ModelCell(CODELLAMA, 8, 128 * K, 256, 16 * K),
    ),
    over_long=(ModelCell(CODELLAMA, 4, 128 * K, 64, 16 * K),),
    calibration=((256, 0), (256, 16 * K), (256, 128 * K), (4 * K, 0), (4 * K, 32 * K), (8 * K, 120 * K), (32 * K, 0), (32 * K, 64 * K)),
    repeats=3,
)
SMALL = Programme(
    shapes=(TINY,),
    prefills=(96,),
    crossovers=(200,),
    miss_percent=(1, 20, 100),
    stream_document=101,
    streams=(5,),
    private=3,
    models=(ModelCell(TINY, 2, 130, 3, 64),),
    over_long=(ModelCell(TINY, 2, 300, 2, 64),),
    calibration=((16, 0), (16, 64), (64, 0), (8, 150)),
    repeats=1,
)


def measure(rank: int, groups: Groups, programme: Programme, sections: list[str], device: torch.device, book: Callable[..., None]) -> None:
    """Everything, on this rank; `book(section, row)` gets each row on rank 0."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ranks = groups.data.size

    def told(section: str, row: dict[str, Any] | None) -> None:
        if rank == 0 and row is not None:
            book(section, row)

    rules: dict[str, Rules] = {}
    for shape in programme.shapes:
        heads = shape.heads(dtype)
        tiles = AttentionShape(heads.q_heads, heads.kv_heads, heads.head_dim, 1, dtype)
        blocks = best_blocks(device, dtype, tiles)
        bench = Bench(groups.data, blocks, device, dtype, programme.repeats)
        name = {"shape": shape.name, "attention": type(blocks).__name__}
        rules[shape.name] = calibrated(Rules(heads, ranks), programme.calibration, blocks, groups.data, device, dtype)
        told("rules", name | {"link": repr(rules[shape.name].link), "fit": repr(rules[shape.name].fit)})
        if "prefill" in sections:
            for length in programme.prefills:
                told("prefill", name | prefill_cell(rules[shape.name], length, 0, bench))
        if "crossover" in sections:
            for total in programme.crossovers:
                for percent in programme.miss_percent:
                    new = max(1, round(total * percent / 100))
                    told("crossover", name | crossover_row(rules[shape.name], prefill_cell(rules[shape.name], new, total - new, bench)))
        if "streams" in sections:
            for streams in programme.streams:
                told("streams", name | stream_cell(heads, programme.stream_document, streams, programme.private, bench))
    for section, cells in (("model", programme.models), ("over_long", programme.over_long)):
        if section in sections:
            for cell in cells:
                fresh = rules.get(cell.shape.name, Rules(cell.shape.heads(dtype), ranks))
                told(section, model_cell(cell, groups, fresh, device, dtype, fits_one=section == "model"))


def run_rank(rank: int, place: tuple[str, int], ranks: int, small: bool, sections: list[str], out: str, commit: str) -> None:
    """One process. Rank 0 writes the record after every row."""
    cuda = torch.cuda.is_available() and not small
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    record: dict[str, Any] = environment(cuda, ranks) | {"commit": commit, "table": {}}

    def book(section: str, row: dict[str, Any]) -> None:
        record["table"].setdefault(section, []).append(row)
        print(section, json.dumps(row), flush=True)
        write(Path(out), record)

    with torch.inference_mode():
        measure(rank, join(*place, rank, ranks, "cuda" if cuda else "cpu"), SMALL if small else FULL, sections, device, book)
    if rank == 0:
        record["table"]["by_ranks"] = modelled(record["table"].get("prefill", []))
        write(Path(out), record)
        print(printed(record))


def environment(cuda: bool, ranks: int) -> dict[str, Any]:
    """What the figures were taken with."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": ranks,
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """The record so far, whole at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--small", action="store_true", help="tiny shapes on CPU processes: tries the job out")
    parser.add_argument("--commit", default="", help="commit of the measured tree")
    options = parser.parse_args(arguments)
    if not options.small and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks {options.ranks}: this host has {torch.cuda.device_count()} GPUs")
    place = MeetingPlace("127.0.0.1")
    run = place.address, options.ranks, options.small, options.sections, str(options.out), options.commit
    mp.spawn(run_rank, args=run, nprocs=options.ranks)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
