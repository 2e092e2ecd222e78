"""The engine against stock SGLang on one GPU, paired: python -m askmany.jobs.bench_engine gpu --shape qwen2.5-7b --suite grid --out FILE

Every contender runs in a process of its own, one after the other, started once a pass for all cells. A pass goes through the contenders
forward, the next one backward; with `--gpus`, passes run side by side, each on a GPU of its own. Each cell is asked with the same tokens
of every contender, by seeds, after a warm-up seed. A cell's ratio is the geometric mean, over seeds and passes, of the best stock
backend's seconds over ours, with a 95 % bootstrap interval. Which stock backends are timed is found out by a scouting pass over one seed
(`--scout`), whose result a later call takes (`--stock`): all within 1.1x of the best of any cell. What a call will take is printed first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from askmany.jobs.bench_cells import Cell, suites
from askmany.jobs.bench_contender import RUN_TO_COMPLETION
from askmany.jobs.bench_process import lines_of
from askmany.jobs.bench_ratios import geometric_mean, interval, means
from askmany.jobs.bench_shapes import SHAPES, shape_folder

START_S = {"stock": 75.0, "ours": 45.0}  # a start with import, weights and graphs, as the wall budget counts it
MINIMUM_S = 30.0  # that each contender is left for its cells
STOP_S = 20.0
CLOSE = 1.1  # a stock backend this close to the best of a cell is timed
Times = dict[str, dict[int, list[tuple[int, int, float]]]]  # by contender and cell: (pass, seed, seconds)
Timed = tuple[Times, dict[str, list[float]], dict[str, Any]]  # and by contender: seconds of its starts, and what it notes


def main(arguments: list[str] | None = None) -> None:
    """Parse, announce, time, write."""
    options = _parser().parse_args(arguments)
    cells = [cell for name in options.suite for cell in suites()[name]]
    if options.cells:
        cells = [cells[index] for index in options.cells]
    stock = [f"stock-{name}" for name in options.stock]
    contenders = options.contenders or (stock if options.scout else [*stock, "interleaved", "split"])
    console = Console()
    passes = 1 if options.scout else options.passes
    seeds = list(range(1 if options.scout else options.seeds))
    _announce(console, cells, contenders, len(seeds), passes, options)
    with tempfile.TemporaryDirectory(prefix="askmany-bench-") as scratch:
        folder = Path(options.model) if options.model else shape_folder(options.shape, Path(scratch))
        job = {
            "folder": str(folder), "shape": "" if options.model else options.shape, "vocabulary": options.vocabulary,
            "random_weights": options.model is None, "device": options.device, "max_rows": options.max_rows,
            "cells": [c.to_dict() for c in cells], "seeds": seeds, "text": str(options.text or ""),
            "setup": json.loads(options.setup), "order": list(range(len(cells))),
        }  # fmt: skip
        times, starts, notes = run_passes(job, contenders, passes, Path(scratch), options.limit_s, options.gpus or [None])
    labels = {"model": Path(options.model).name if options.model else options.shape, "setup": json.loads(options.setup)}
    record = summarise(cells, times, labels) | labels | {
        "shape": options.shape, "starts_s": starts, "notes": notes, "seeds": seeds, "passes": passes, "scouting": options.scout,
        "environment": environment(options.commit),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    show(console, record)
    if options.plots:
        from askmany.jobs.bench_plots import plot

        plot(record, options.plots)


def run_passes(
    job: dict[str, Any], contenders: Sequence[str], passes: int, scratch: Path, limit_s: float, gpus: Sequence[int | None] = (None,)
) -> Timed:
    """Every contender in its own process, forward and backward in turn; pass n runs on GPU n % len(gpus), in order there. A contender may
    take what is left of `limit_s` when those that follow on its GPU have had their start and MINIMUM_S each; what it could not begin is
    left out, and it is stopped STOP_S later."""
    with ThreadPoolExecutor(len(gpus)) as pool:
        shares = [
            pool.submit(_run_on, gpu, range(index, passes, len(gpus)), job, contenders, scratch, limit_s) for index, gpu in enumerate(gpus)
        ]
    times, starts, notes = _nothing_timed()
    for part in (share.result() for share in shares):
        for name, by_cell in part[0].items():
            for index, found in by_cell.items():
                times[name][index] += found
        for name, seconds in part[1].items():
            starts[name] += seconds
        for name, said in part[2].items():
            notes[name] = notes.get(name, {}) | said
    return times, starts, notes


def _nothing_timed() -> Timed:
    return defaultdict(lambda: defaultdict(list)), defaultdict(list), {}


def _run_on(gpu: int | None, passes: Iterable[int], job: dict[str, Any], contenders: Sequence[str], scratch: Path, limit_s: float) -> Timed:
    """One GPU's passes."""
    times, starts, notes = _nothing_timed()
    began = time.monotonic()
    turns = [(number, name) for number in passes for name in (reversed(contenders) if number % 2 else contenders)]
    for turn, (number, name) in enumerate(turns):
        kept_s = sum(_start_s(later) + MINIMUM_S for _, later in turns[turn + 1 :])
        share_s = limit_s - (time.monotonic() - began) - kept_s
        if share_s <= 0:
            print(f"LEFT OUT for time: {name}, pass {number + 1}", flush=True)
            continue
        order = job["order"][::-1] if number % 2 else job["order"]
        file = scratch / f"{name}-{number}.json"
        file.write_text(json.dumps(job | {"contender": name, "order": order, "limit_s": share_s}))
        for line in lines_of(file, name, share_s + STOP_S, gpu):
            print(f"{time.monotonic() - began:6.1f} s {name}, pass {number + 1}: {json.dumps(line)}", flush=True)
            if "start_s" in line:
                starts[name].append(line["start_s"])
            elif "notes" in line or "calibrated" in line:
                notes[name] = notes.get(name, {}) | line.get("notes", line)
            elif line.get("seed", -1) >= 0 and "cell" in line:
                times[name][line["cell"]].append((number, line["seed"], line["seconds"]))
    return times, starts, notes


def summarise(cells: Sequence[Cell], times: Times, labels: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rows of all cells with ratios of the best stock contender to ours (`labels` are put on each), and the geometric mean of each suite.
    `between`: the same of our own contenders against RUN_TO_COMPLETION, where that was timed."""
    rows, between = [], []
    references = [name for name in times if name.startswith("stock-") or name == "transformers"]
    for index, cell in enumerate(cells):
        found = {name: _paired(times[name][index]) for name in times if times[name].get(index)}
        stock = {name: geometric_mean(list(found[name].values())) for name in references if name in found}
        best = min(stock, key=lambda name: stock[name], default=None)
        head = cell.to_dict() | (labels or {})
        for name in (name for name in found if name not in references):
            if best is not None and (row := _row(found[name], found[best])):
                rows.append(head | {"layout": name} | row | {"best_stock": best, "stock_s": stock[best], "stock_all_s": stock})
            if name != RUN_TO_COMPLETION and (row := _row(found[name], found.get(RUN_TO_COMPLETION, {}))):
                between.append(head | {"layout": name, "against": RUN_TO_COMPLETION} | row)
    seconds = {name: {str(i): [s for *_, s in found] for i, found in by_cell.items()} for name, by_cell in times.items()}
    return {
        "table": rows, "means": means(rows, ("work", "layout")), "between": between, "seconds": seconds,
        "cells": [c.to_dict() for c in cells], "close": close_backends(cells, times),
    }  # fmt: skip


def _row(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Ratios over the (pass, seed) pairs that both were timed under; nothing where there are none."""
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return {}
    ratios = [theirs[key] / ours[key] for key in shared]
    low, high = interval(ratios)
    ours_s = geometric_mean([ours[key] for key in shared])
    return {"ratio": geometric_mean(ratios), "low": low, "high": high, "ratios": ratios, "ours_s": ours_s}


def close_backends(cells: Sequence[Cell], times: Times) -> list[str]:
    """Stock contenders within CLOSE of the best in some cell."""
    found: set[str] = set()
    for index in range(len(cells)):
        own = {n: geometric_mean([s for *_, s in t[index]]) for n, t in times.items() if n.startswith("stock-") and t.get(index)}
        found |= {name for name, seconds in own.items() if seconds <= CLOSE * min(own.values())}
    return sorted(found)


def wall_budget_s(cells: Iterable[Cell], contenders: Sequence[str], seeds: int, passes: int) -> float:
    """A rough upper estimate of a call's seconds: starts, and each cell's prefill and answers at rates of an H200 with a 7B model."""
    starts = sum(map(_start_s, contenders))
    work = sum((_prefill_s(cell) + _answers_s(cell)) for cell in cells)
    return passes * (starts + len(contenders) * (seeds + 1) * work)


def _start_s(contender: str) -> float:
    return START_S["stock" if contender.startswith("stock-") else "ours"]


def _prefill_s(cell: Cell) -> float:
    return cell.documents * cell.document_tokens / 25_000


def _answers_s(cell: Cell) -> float:
    rows = min(256, cell.documents * cell.questions)
    steps = cell.new_tokens * max(1, cell.documents * cell.questions / rows)
    return steps * (0.006 + rows * cell.document_tokens * 1.5e-8)


def show(console: Console, record: dict[str, Any]) -> None:
    """The table of all cells, then the means."""
    table = Table("work", "documents", "tokens", "questions", "new", "layout", "ours s", "stock s", "best stock", "ratio", "95 %")
    for row in record["table"]:
        sizes = (str(row[name]) for name in ("documents", "document_tokens", "questions", "new_tokens"))
        figures = (f"{row['ours_s']:.3f}", f"{row['stock_s']:.3f}", row["best_stock"], f"{row['ratio']:.2f}")
        table.add_row(row["work"], *sizes, row["layout"], *figures, f"{row['low']:.2f} to {row['high']:.2f}")
    console.print(table)
    for mean in record["means"]:
        console.print(
            f"{mean['work']}, {mean['layout']}: {mean['ratio']:.2f}x ({mean['low']:.2f} to {mean['high']:.2f}), {mean['cells']} cells"
        )
    console.print(f"stock backends within {CLOSE}x of the best of some cell: {', '.join(record['close']) or 'none timed'}")


def environment(commit: str) -> dict[str, Any]:
    """What the figures were taken with."""
    import importlib.metadata
    import platform

    import torch

    packages = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "transformers")
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    if not commit:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return {"gpu": gpu, "versions": versions, "commit": commit, "date": time.strftime("%Y-%m-%d")}


def _paired(found: Sequence[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    return {(number, seed): seconds for number, seed, seconds in found}


def _announce(console: Console, cells: list[Cell], contenders: list[str], seeds: int, passes: int, options: argparse.Namespace) -> None:
    budget_s = wall_budget_s(cells, contenders, seeds, -(-passes // max(1, len(options.gpus))))
    console.print(f"{options.shape}: {len(cells)} cells, {', '.join(contenders)}, {seeds} seeds and a warm-up, {passes} passes")
    console.print(f"wall budget: about {budget_s:.0f} s; nothing begins after {options.limit_s:.0f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_engine gpu", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--model", help="a folder with real weights instead of a shape with random ones")
    parser.add_argument("--vocabulary", type=int, default=32000, help="of --model")
    parser.add_argument("--suite", nargs="+", choices=sorted(suites()), default=["grid"])
    parser.add_argument("--cells", nargs="*", type=int, help="only these, counted from 0")
    parser.add_argument("--stock", nargs="*", default=["fa3", "flashinfer", "triton"], help="stock backends")
    parser.add_argument(
        "--contenders", nargs="*", help="instead of the stock backends, interleaved and split; run-to-completion: interleaved so"
    )
    parser.add_argument("--scout", action="store_true", help="one seed, one pass: find out which stock backends count")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--gpus", nargs="*", type=int, default=[], help="run passes side by side on these; default: one GPU")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--setup", default="{}", help="JSON: fields of OursSetup (page_size, streams, batching, kv_tokens, ...)")
    parser.add_argument("--text", type=Path, help="JSON list of token ids that documents are cut from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--plots", type=Path, help="folder for plots")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
