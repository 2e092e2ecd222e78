"""A decode step against its floor on one GPU: python -m askmany.jobs.bench_floor --shape codellama-7b --out FILE

Split layout, one document in the cache, as many streams as rows. A step's seconds are those of long answers less those of short ones, over
the steps between: the host, the work list and the drawing of tokens included, what comes before and after left out. Its floor is that of
`step_floor`, at the streams' mean length between. FILE is a record for `bench_engine merge`, written after every cell: in its rows `ours_s`
and `stock_s` are a step's and its floor's, `ratio` is the median run's step over the floor (the less, the better), `low` and `high` are the
least and the largest of all runs, and `idle_ratio` is the GPU's idle share in these steps. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from askmany.engine.garbage import leave_out_what_is_loaded
from askmany.engine.metrics import Metrics
from askmany.jobs.bench_cells import Cell, Drawn, draw
from askmany.jobs.bench_gpu import environment
from askmany.jobs.bench_inputs import FLOP_PER_S, READ_BYTES_PER_S
from askmany.jobs.bench_ours import OursContender, OursSetup, load_ours
from askmany.jobs.bench_shapes import SHAPES, shape_folder, vocabulary
from askmany.jobs.record_file import write_record
from askmany.jobs.step_floor import OVER, WORK, Decoder, DecodeStep, Peaks, floor_s, operations
from askmany.jobs.step_profile import profiled, text

MEASURED = "H200"  # the GPU whose peaks are known here
PROFILED = 8  # steps


@dataclass(frozen=True, slots=True)
class Run:
    """Long answers beside short ones: seconds of a step between their lengths, the device's busy and idle seconds in all of these."""

    step_s: float
    busy_s: float
    idle_s: float


class Bench:
    """An engine with the document of `cell` in its cache; its answers have the cell's length, or `short`."""

    def __init__(self, contender: OursContender, cell: Cell, drawn: Drawn, short: int) -> None:
        self._contender, self._cell, self._drawn, self._short = contender, cell, drawn, short
        contender.run(replace(cell, new_tokens=short), replace(drawn, lengths=[[short] * cell.questions]))

    def run(self) -> Run:
        """RuntimeError when the two differ by more than steps of all rows."""
        short_s, short = self._answer(self._short)
        long_s, long = self._answer(self._cell.new_tokens)
        steps = self._cell.new_tokens - self._short
        if long.steps - short.steps != steps or long.decode_tokens - short.decode_tokens != steps * self._cell.questions:
            raise RuntimeError(f"{long.steps - short.steps} steps lie between answers of {self._short} and {self._cell.new_tokens} tokens")
        if long.prefill_tokens or short.prefill_tokens:
            raise RuntimeError(f"the document of {self._cell.document_tokens} tokens did not stay in the cache")
        busy_s, idle_s = long.device_busy_s - short.device_busy_s, long.device_idle_s - short.device_idle_s
        return Run((long_s - short_s) / steps, busy_s, idle_s)

    def profile(self, device: torch.device) -> dict[str, Any]:
        """`step_profile`'s account of PROFILED steps behind the short answers."""
        short = profiled(lambda: self._answer(self._short), device)
        return profiled(lambda: self._answer(self._short + PROFILED), device).step(short, PROFILED)

    def _answer(self, new_tokens: int) -> tuple[float, Metrics]:
        """Seconds, and what was counted in them."""
        before = self._contender.metrics
        asked = (self._drawn.documents[0], self._drawn.tails[0], [new_tokens] * self._cell.questions)
        taken_s, _ = self._contender.answer([asked])
        return taken_s, difference(self._contender.metrics, before)


def difference(after: Metrics, before: Metrics) -> Metrics:
    """What this benchmark looks at, counted from `before` on."""
    names = ("steps", "decode_tokens", "prefill_tokens", "device_busy_s", "device_idle_s")
    return Metrics(**{name: getattr(after, name) - getattr(before, name) for name in names})


def decode_step(cell: Cell, short: int, element_bytes: int) -> DecodeStep:
    """The mean step between answers of `short` tokens and the cell's: a stream's first answer token is drawn with its question's last, so
    that the step which feeds answer token n reads the question and n tokens."""
    private = cell.question_tokens + (short + cell.new_tokens - 1) / 2
    return DecodeStep(cell.questions, cell.documents, cell.document_tokens, private, element_bytes)


def row_of(cell: Cell, runs: Sequence[Run], least_s: float) -> dict[str, Any]:
    """A row of the table, its labels aside."""
    ratios = [run.step_s / least_s for run in runs]
    busy_s, idle_s = sum(run.busy_s for run in runs), sum(run.idle_s for run in runs)
    return cell.to_dict() | {
        "ratio": median(ratios), "low": min(ratios), "high": max(ratios), "ratios": ratios,
        "ours_s": median(run.step_s for run in runs), "best_stock": OVER, "stock_s": least_s, "stock_all_s": {OVER: least_s},
        "idle_ratio": max(0.0, idle_s) / (busy_s + idle_s) if busy_s > 0 else None,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Load, measure cell by cell, write, print."""
    options = _options(arguments)
    started_s = perf_counter()
    cells = [Cell(WORK, length, rows, options.new_tokens[1]) for length, rows in product(options.document_tokens, options.rows)]
    setup = OursSetup(**({"max_rows": max(options.rows)} | json.loads(options.setup)))
    contender, element_bytes = _load(options, setup, cells)
    record = _record(options, setup, cells, perf_counter() - started_s)
    for cell in cells:
        if perf_counter() - started_s > options.limit_s:
            print(f"LEFT OUT for time: {cell}", flush=True)
            continue
        bench = Bench(contender, cell, draw(cell, 0, vocabulary(options.shape)), options.new_tokens[0])
        record["table"].append(_measured(options, setup, bench, cell, element_bytes))
        record["notes"] = {setup.layout: contender.notes()}
        write_record(options.out, record)
        print(line(record["table"][-1]), flush=True)
        if options.profile:
            _tell_launches(options, bench, cell)


def _load(options: argparse.Namespace, setup: OursSetup, cells: Sequence[Cell]) -> tuple[OursContender, int]:
    """The engine, and the bytes of an element of its keys and weights."""
    context = max(cell.document_tokens + cell.question_tokens + cell.most_tokens for cell in cells) + 2
    with tempfile.TemporaryDirectory(prefix="askmany-floor-") as scratch:
        folder = shape_folder(options.shape, Path(scratch))
        model = load_ours(folder, torch.device(options.device), context, True, setup.deterministic)
    contender = OursContender(model, setup, context, cells)
    leave_out_what_is_loaded()
    return contender, model.kv_shape.dtype.itemsize


def _record(options: argparse.Namespace, setup: OursSetup, cells: Sequence[Cell], start_s: float) -> dict[str, Any]:
    """As `bench_engine gpu` has it, the table still empty."""
    return _labels(options) | {
        "shape": options.shape, "table": [], "seconds": {}, "cells": [cell.to_dict() for cell in cells], "scouting": False,
        "starts_s": {setup.layout: [start_s]}, "seeds": [0], "passes": options.runs, "environment": environment(options.commit),
    }  # fmt: skip


def _labels(options: argparse.Namespace) -> dict[str, Any]:
    return {"model": options.shape, "setup": json.loads(options.setup)}


def _measured(options: argparse.Namespace, setup: OursSetup, bench: Bench, cell: Cell, element_bytes: int) -> dict[str, Any]:
    """A cell's row."""
    short, peaks = options.new_tokens[0], Peaks(options.bytes_per_s, options.flop_per_s)
    least_s = floor_s(operations(Decoder.of(SHAPES[options.shape]), decode_step(cell, short, element_bytes)), peaks)
    row = row_of(cell, [bench.run() for _ in range(options.runs)], least_s)
    return _labels(options) | {"layout": setup.layout, "short_tokens": short} | row | asdict(peaks)


def _tell_launches(options: argparse.Namespace, bench: Bench, cell: Cell) -> None:
    step = bench.profile(torch.device(options.device))
    write_record(options.profile.with_name(f"{options.profile.stem}-{cell.document_tokens}-{cell.questions}.json"), step)
    print(text(step), flush=True)


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    idle = "" if row["idle_ratio"] is None else f", GPU idle {row['idle_ratio']:.1%}"
    step = f"{row['ours_s'] * 1e3:.2f} ms a step, floor {row['stock_s'] * 1e3:.2f} ms"
    spread = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['model']}, {row['document_tokens']} tokens, {row['questions']} rows: {step}, {spread}{idle}"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Parsed, and the peaks filled in where this machine's are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="codellama-7b")
    parser.add_argument("--document-tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[32, 160], metavar=("SHORT", "LONG"), help="of an answer")
    parser.add_argument("--runs", type=int, default=7, help="pairs of short and long answers a cell")
    parser.add_argument("--bytes-per-s", type=float, help=f"the memory's peak (default: an {MEASURED}'s, on one)")
    parser.add_argument("--flop-per-s", type=float, help=f"the matrix product's peak (default: an {MEASURED}'s, on one)")
    parser.add_argument("--setup", default="{}", help="JSON: fields of OursSetup")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no cell begins later")
    parser.add_argument("--commit", default="")
    parser.add_argument("--profile", type=Path, metavar="FILE.json", help="tell a step's launches, too: FILE-TOKENS-ROWS.json a cell")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not 0 < options.new_tokens[0] < options.new_tokens[1]:
        parser.error("--new-tokens: SHORT must be below LONG")
    known = options.device != "cpu" and MEASURED in torch.cuda.get_device_name()
    if not known and (options.bytes_per_s is None or options.flop_per_s is None):
        parser.error(f"the peaks of this machine are not known: give --bytes-per-s and --flop-per-s (an {MEASURED} has its own)")
    options.bytes_per_s, options.flop_per_s = options.bytes_per_s or READ_BYTES_PER_S, options.flop_per_s or FLOP_PER_S
    return options


if __name__ == "__main__":
    main()
    if torch.cuda.is_available():
        sys.stdout.flush()
        os._exit(0)  # libraries keep threads and compilers that hold the process open for a minute
