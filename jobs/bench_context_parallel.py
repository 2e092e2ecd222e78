"""Context parallelism over the GPUs of one host: python -m askmany.jobs.bench_context_parallel --ranks 2 --out FILE.json

Starts a process a rank (NCCL between GPUs, gloo on a CPU) and measures, each result judged against fp64 before its time is taken:
attention of a prefill over N ranks against one, and what of the exchange is hidden; pass-KV against pass-Q from 1 % to 100 % new tokens and
what the rules choose; a decode step of many streams; whole models; a document that no single GPU's pool holds. `--cells` takes cells
whose label (printed with the seconds that each took) contains one of the words, `--add` keeps the rows of other cells that FILE.json has
already. `--small` is the same on two CPU processes with tiny shapes. Rows are written as they come; the table is printed last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from askmany.engine.context_parallel import Groups
from askmany.engine.context_parallel_join import MeetingPlace, join
from askmany.engine.model_transformers import TransformersModel
from askmany.jobs.bench_context_attention import Bench, crossover_row, prefill_cell
from askmany.jobs.bench_context_model import CODELLAMA, QWEN, ModelCell, Shape, model_cell, random_model
from askmany.jobs.bench_context_model import Bench as ModelBench
from askmany.jobs.bench_context_streams import stream_cell
from askmany.jobs.bench_context_table import modelled, printed
from askmany.jobs.record_file import write_record
from askmany.kernels.block_attention import best_blocks
from askmany.kernels.ring_choice import Rules
from askmany.kernels.ring_measure import calibrated
from askmany.kernels.tiles import AttentionShape

LEAVE_S = 20.0
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
    rounds: int


K = 1024
STEP = 32 * K  # tokens of a prefill step: cached keys travel once a step, so the longer, the better they hide behind its attention
FULL = Programme(
    shapes=(CODELLAMA, QWEN),
    prefills=(32 * K, 128 * K),
    crossovers=(32 * K, 128 * K),
    miss_percent=(1, 2.5, 5, 10, 20, 40, 70, 100),
    stream_document=128 * K,
    streams=(64, 256),
    private=96,
    models=(
        ModelCell(CODELLAMA, 8, 512 * K, 16, STEP, ("ring",)),
        ModelCell(QWEN, 14, 512 * K, 16, STEP, ("ring",)),
        *(ModelCell(CODELLAMA, 32, 128 * K, streams, STEP) for streams in (16, 64, 256)),
        *(ModelCell(CODELLAMA, 8, 128 * K, streams, STEP) for streams in (64, 256)),
        ModelCell(CODELLAMA, 32, 32 * K, 16, STEP),
        *(ModelCell(QWEN, 28, length, 16, STEP) for length in (32 * K, 128 * K)),
    ),
    over_long=(ModelCell(CODELLAMA, 4, 128 * K, 64, STEP),),
    calibration=(
        (64, 0),
        (64, 4 * K),
        (64, 128 * K),
        (512, 0),
        (512, 8 * K),
        *(
            (max(1, total * percent // 100), total - max(1, total * percent // 100))
            for total in (32 * K, 128 * K)
            for percent in (1, 3, 8, 15, 30, 55, 85, 100)
        ),
    ),
    rounds=3,
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
    rounds=1,
)


@dataclass(frozen=True, slots=True)
class Options:
    """What of a programme is measured, and how it is written down."""

    small: bool
    sections: tuple[str, ...]
    cells: tuple[str, ...]
    alone: tuple[str, ...]
    out: Path
    add: bool
    commit: str
    graphs: bool = True

    def asks_for(self, section: str, label: str) -> bool:
        return section in self.sections and (not self.cells or any(word in label for word in self.cells))


class Measuring:
    """One rank's run through a programme. `book(section, row)` gets each row on rank 0."""

    def __init__(self, groups: Groups, programme: Programme, options: Options, device: torch.device, book: Callable[..., None]) -> None:
        self._groups, self._programme, self._options, self._device, self._book = groups, programme, options, device, book
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._rules: dict[str, Rules] = {}
        self._model: tuple[tuple[str, int], TransformersModel] | None = None

    def run(self) -> None:
        for shape in self._programme.shapes:
            self._attention(shape)
        for section, cells in (("model", self._programme.models), ("over_long", self._programme.over_long)):
            for cell in cells:
                self._told(section, cell.label, partial(self._whole_model, cell, section == "model"))

    def _attention(self, shape: Shape) -> None:
        programme, heads, bench = self._programme, shape.heads(self._dtype), self._bench(shape)
        name = {"shape": shape.name, "attention": type(bench.blocks).__name__}
        plain = Rules(heads, self._groups.data.size)
        for length in programme.prefills:
            self._told("prefill", f"{shape.name}/{length}", partial(prefill_cell, plain, length, 0, bench), name)
        for total in programme.crossovers:
            for percent in programme.miss_percent:
                cell = partial(self._crossover, shape, max(1, round(total * percent / 100)), total)
                self._told("crossover", f"{shape.name}/{total}/{percent}%", cell, name)
        for streams in programme.streams:
            cell = partial(stream_cell, heads, programme.stream_document, streams, programme.private, bench)
            self._told("streams", f"{shape.name}/{programme.stream_document}/{streams}", cell, name)

    def _crossover(self, shape: Shape, new: int, total: int) -> dict[str, Any]:
        rules = self._calibrated(shape)
        return crossover_row(rules, prefill_cell(rules, new, total - new, self._bench(shape), alone=False))

    def _whole_model(self, cell: ModelCell, fits_one: bool) -> dict[str, Any] | None:
        rules = self._calibrated(cell.shape)
        key = cell.shape.name, cell.layers
        if self._model is None or self._model[0] != key:
            self._model = None
            context = max(one.document for one in (*self._programme.models, *self._programme.over_long)) + 1024
            self._model = key, random_model(cell.shape, cell.layers, context, self._device, self._dtype)
        return model_cell(
            cell, self._model[1], rules, ModelBench(self._groups, self._device, self._options.alone, self._options.graphs), fits_one
        )

    def _calibrated(self, shape: Shape) -> Rules:
        if shape.name not in self._rules:
            bench, plain = self._bench(shape), Rules(shape.heads(self._dtype), self._groups.data.size)
            self._rules[shape.name] = calibrated(plain, self._programme.calibration, bench.blocks, bench.group, self._device, self._dtype)
            if bench.group.rank == 0:
                self._book("rules", {"shape": shape.name, "link": repr(self._rules[shape.name].link)})
        return self._rules[shape.name]

    def _bench(self, shape: Shape) -> Bench:
        heads = shape.heads(self._dtype)
        tiles = AttentionShape(heads.q_heads, heads.kv_heads, heads.head_dim, 1, self._dtype)
        return Bench(self._groups.data, best_blocks(self._device, self._dtype, tiles), self._device, self._dtype, self._programme.rounds)

    def _told(self, section: str, label: str, cell: Callable[[], dict[str, Any] | None], name: Mapping[str, str] | None = None) -> None:
        if not self._options.asks_for(section, label):
            return
        started = time.perf_counter()
        row = cell()
        if self._groups.data.rank == 0 and row is not None:
            self._book(section, dict(name or {}) | row | {"label": label, "took_s": round(time.perf_counter() - started, 1)})


def run_rank(rank: int, place: tuple[str, int], ranks: int, options: Options) -> None:
    """One process. Rank 0 writes the record after every row."""
    cuda = torch.cuda.is_available() and not options.small
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    record: dict[str, Any] = environment(cuda, ranks) | {"commit": options.commit, "table": {}}
    if options.add and options.out.exists():
        record["table"] = json.loads(options.out.read_text())["table"]

    def book(section: str, row: dict[str, Any]) -> None:
        kept = [old for old in record["table"].get(section, []) if old.get("label") != row.get("label") or "label" not in row]
        record["table"][section] = [*kept, row | {"commit": options.commit}]
        print(section, json.dumps(row), flush=True)
        write_record(options.out, record)

    with torch.inference_mode():
        groups = join(*place, rank, ranks, "cuda" if cuda else "cpu")
        Measuring(groups, SMALL if options.small else FULL, options, device, book).run()
        groups.control.agree([0.0])
    if rank == 0:
        record["table"]["by_ranks"] = modelled(record["table"].get("prefill", []))
        write_record(options.out, record)
        print(printed(record), flush=True)
    leave()


def leave() -> None:
    """Take the groups down, or, where that does not end, just go: everything is written. A rank that fails ends the others by itself."""
    gc.collect()  # graphs that hold messages go before the groups do
    thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
    thread.start()
    thread.join(LEAVE_S)
    if thread.is_alive():
        os._exit(0)


def environment(cuda: bool, ranks: int) -> dict[str, Any]:
    """What the figures were taken with."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": ranks,
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--cells", nargs="*", default=[], help="words of the labels of cells to measure, default all")
    parser.add_argument("--alone", nargs="*", choices=("own", "ring"), default=["own", "ring"], help="engines that stand for one GPU")
    parser.add_argument("--add", action="store_true", help="keep the rows of other cells that the file has")
    parser.add_argument("--no-graphs", action="store_true", help="the group's decode steps run eagerly")
    parser.add_argument("--small", action="store_true", help="tiny shapes on CPU processes: tries the job out")
    parser.add_argument("--commit", default="", help="commit of the measured tree")
    given = parser.parse_args(arguments)
    if not given.small and torch.cuda.device_count() < given.ranks:
        parser.error(f"--ranks {given.ranks}: this host has {torch.cuda.device_count()} GPUs")
    place = MeetingPlace("127.0.0.1")
    chosen = tuple(given.sections), tuple(given.cells), tuple(given.alone)
    options = Options(given.small, *chosen, given.out, given.add, given.commit, not given.no_graphs)
    mp.spawn(run_rank, args=(place.address, given.ranks, options), nprocs=given.ranks)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
