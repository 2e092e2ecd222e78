"""The engine against stock SGLang on one GPU, paired: python -m askmany.jobs.bench_engine gpu --shape qwen2.5-7b --suite grid --out FILE

Every contender runs in a process of its own, one after the other, started once a pass for all cells. An even pass goes through the
contenders forward, an odd one backward; with `--gpus`, passes run side by side, each on a GPU of its own. Each cell is asked with the same
tokens of every contender, by seeds, after a warm-up seed. A cell's ratio is the geometric mean, over seeds and passes, of the best stock
backend's seconds over ours, with a 95 % bootstrap interval. Which stock backends are timed is found out by a scouting pass over one seed
(`--scout`), whose result a later call takes (`--stock`): all within 1.1x of the best of any cell. What a call will take, and how its time
is shared (see `bench_shares`), is printed first. The record is written after every contender of every pass. Passes that do not fit into one
call are run by several (`--passes 1`, then `--passes 1 --first-pass 1`), whose records `merge` pools.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console
from rich.table import Table

from askmany.jobs.bench_cells import Cell, suites
from askmany.jobs.bench_contender import RUN_TO_COMPLETION
from askmany.jobs.bench_process import lines_of
from askmany.jobs.bench_ratios import geometric_mean, means, summary
from askmany.jobs.bench_shapes import SHAPES, shape_folder
from askmany.jobs.bench_shares import STOP_S, Shares, plan, wall_budget_s
from askmany.jobs.bench_variants import Named, label, shown, values_of
from askmany.jobs.record_file import write_record

CLOSE = 1.1  # a stock backend this close to the best of a cell is timed
Times = dict[str, dict[int, list[tuple[int, int, float]]]]  # by contender and cell: (pass, seed, seconds)
Timed = tuple[Times, dict[str, list[float]], dict[str, Any]]  # and by contender: seconds of its starts, and what it notes


def main(arguments: list[str] | None = None) -> None:
    """Parse, announce, time, write."""
    began_s = time.monotonic()
    options = _parser().parse_args(arguments)
    cells = [cell for name in options.suite for cell in suites()[name]]
    if options.cells:
        cells = [cells[index] for index in options.cells]
    contenders = options.contenders or _default_contenders(options)
    for name in contenders:
        Named.parse(name)
    console = Console()
    passes = range(options.first_pass, options.first_pass + (1 if options.scout else options.passes))
    seeds = list(range(1 if options.scout else options.seeds))
    setup = json.loads(options.setup)
    labels = {"model": Path(options.model).name if options.model else options.shape, "setup": setup}
    made_with = {
        "shape": options.shape, "seeds": seeds, "passes": len(passes), "first_pass": options.first_pass, "scouting": options.scout,
        "environment": environment(options.commit),
    }  # fmt: skip
    limit_s = options.limit_s - (time.monotonic() - began_s)
    _announce(console, cells, contenders, len(seeds), passes, limit_s, options)
    if not made_with["environment"]["commit"]:
        console.print("the commit is unknown (no git here): without --commit, merge cannot pool this call's passes with another's")

    def keep(timed: Timed) -> dict[str, Any]:
        times, starts, notes = timed
        record = summarise(cells, times, labels, options.against) | labels | {"starts_s": starts, "notes": notes} | made_with
        write_record(options.out, record)
        return record

    with tempfile.TemporaryDirectory(prefix="askmany-bench-") as scratch:
        folder = Path(options.model) if options.model else shape_folder(options.shape, Path(scratch))
        job = {
            "folder": str(folder), "shape": "" if options.model else options.shape, "vocabulary": options.vocabulary,
            "random_weights": options.model is None, "device": options.device, "max_rows": options.max_rows,
            "cells": [c.to_dict() for c in cells], "seeds": seeds, "text": str(options.text or ""), "setup": setup,
            "order": list(range(len(cells))),
        }  # fmt: skip
        record = keep(run_passes(job, contenders, passes, Path(scratch), limit_s, options.gpus or [None], keep))
    show(console, record)
    if options.plots:
        from askmany.jobs.bench_plots import plot

        plot(record, options.plots)


def run_passes(
    job: dict[str, Any],
    contenders: Sequence[str],
    passes: Sequence[int],
    scratch: Path,
    limit_s: float,
    gpus: Sequence[int | None],
    keep: Callable[[Timed], object],
) -> Timed:
    """Every contender in its own process, all ended within `limit_s`; the n-th pass runs on GPU n % len(gpus), in order there. `keep` is
    called with all that was timed so far whenever a contender has ended."""
    parts = [_nothing_timed() for _ in gpus]
    lock = Lock()

    def ended(index: int, turn: Timed) -> None:
        with lock:
            _add(parts[index], turn)
            keep(_joined(parts))

    with ThreadPoolExecutor(len(gpus)) as pool:
        runs = [
            pool.submit(_run_on, gpu, passes[index :: len(gpus)], job, contenders, scratch, limit_s, partial(ended, index))
            for index, gpu in enumerate(gpus)
        ]
    for run in runs:
        run.result()
    return _joined(parts)


def _nothing_timed() -> Timed:
    return defaultdict(lambda: defaultdict(list)), defaultdict(list), {}


def _joined(parts: Iterable[Timed]) -> Timed:
    whole = _nothing_timed()
    for part in parts:
        _add(whole, part)
    return whole


def _add(whole: Timed, part: Timed) -> None:
    for name, by_cell in part[0].items():
        for index, found in by_cell.items():
            whole[0][name][index] += found
    for name, seconds in part[1].items():
        whole[1][name] += seconds
    for name, said in part[2].items():
        whole[2][name] = whole[2].get(name, {}) | said


def _run_on(
    gpu: int | None,
    passes: Iterable[int],
    job: dict[str, Any],
    contenders: Sequence[str],
    scratch: Path,
    limit_s: float,
    ended: Callable[[Timed], None],
) -> None:
    """One GPU's passes; `ended` is given what each turn timed."""
    shares, began_s = Shares(passes, contenders), time.monotonic()
    starts: dict[str, list[float]] = defaultdict(list)
    for at, (number, name) in enumerate(shares.turns):
        share_s = shares.share_s(at, limit_s - (time.monotonic() - began_s), starts)
        if share_s <= 0:
            print(f"LEFT OUT for time: {name}, pass {number}", flush=True)
            continue
        order = job["order"][::-1] if number % 2 else job["order"]
        file = scratch / f"{name}-{number}.json"
        given = {"contender": name, "order": order, "launched_s": time.monotonic(), "limit_s": share_s - STOP_S}
        file.write_text(json.dumps(job | given))
        turn = _nothing_timed()
        for line in lines_of(file, name, share_s, gpu):
            print(f"{time.monotonic() - began_s:6.1f} s {name}, pass {number}: {json.dumps(line)}", flush=True)
            _take(line, number, name, turn)
        starts[name] += turn[1][name]
        ended(turn)


def _take(line: dict[str, Any], number: int, name: str, into: Timed) -> None:
    """What a contender said of itself in a pass."""
    times, starts, notes = into
    if "start_s" in line:
        starts[name].append(line["start_s"])
    elif "notes" in line or "calibrated" in line:
        notes[name] = notes.get(name, {}) | line.get("notes", line)
    elif line.get("seed", -1) >= 0 and "cell" in line:
        times[name][line["cell"]].append((number, line["seed"], line["seconds"]))


def summarise(
    cells: Sequence[Cell], times: Times, labels: dict[str, Any] | None = None, against: str = RUN_TO_COMPLETION
) -> dict[str, Any]:
    """Rows of all cells with ratios of the best stock contender to ours (`labels` are put on each), and the geometric mean of each suite.
    `between`: the same of our own contenders against that one of them, where it was timed."""
    labels, rows, between = labels or {}, [], []
    references = [name for name in times if name.startswith("stock-") or name == "transformers"]
    for index, cell in enumerate(cells):
        found = {name: _paired(times[name][index]) for name in times if times[name].get(index)}
        stock = {name: geometric_mean(list(found[name].values())) for name in references if name in found}
        best = min(stock, key=lambda name: stock[name], default=None)
        for name in (name for name in found if name not in references):
            head = cell.to_dict() | labels | _told(name, labels)
            if best is not None and (row := _row(found[name], found[best])):
                rows.append(head | row | {"best_stock": best, "stock_s": stock[best], "stock_all_s": stock})
            if name != against and (row := _row(found[name], found.get(against, {}))):
                between.append(head | {"against": against} | row)
    seconds = {name: {str(i): [s for *_, s in found] for i, found in by_cell.items()} for name, by_cell in times.items()}
    return {
        "table": rows, "means": means(rows, ("work", "layout", "setup_label")), "between": between, "seconds": seconds,
        "cells": [c.to_dict() for c in cells], "close": close_backends(cells, times),
    }  # fmt: skip


def _told(contender: str, labels: dict[str, Any]) -> dict[str, Any]:
    """What a contender's name says of its rows: its setup is the call's and its own."""
    named = Named.parse(contender)
    setup = values_of(labels) | named.setup
    return {"layout": named.layout, "setup": setup, "setup_label": label({"setup": setup})}


def _row(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Ratios over the `pairs` (pass, seed) that both were timed under; nothing where there are none."""
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return {}
    ratios = summary([theirs[key] / ours[key] for key in shared])
    return ratios | {"pairs": [list(key) for key in shared], "ours_s": geometric_mean([ours[key] for key in shared])}


def close_backends(cells: Sequence[Cell], times: Times) -> list[str]:
    """Stock contenders within CLOSE of the best in some cell."""
    found: set[str] = set()
    for index in range(len(cells)):
        own = {n: geometric_mean([s for *_, s in t[index]]) for n, t in times.items() if n.startswith("stock-") and t.get(index)}
        found |= {name for name, seconds in own.items() if seconds <= CLOSE * min(own.values())}
    return sorted(found)


def show(console: Console, record: dict[str, Any]) -> None:
    """The table of all cells, then the means."""
    table = Table("work", "documents", "tokens", "questions", "new", "layout", "ours s", "stock s", "best stock", "ratio", "95 %")
    for row in record["table"]:
        sizes = (str(row[name]) for name in ("documents", "document_tokens", "questions", "new_tokens"))
        figures = (f"{row['ours_s']:.3f}", f"{row['stock_s']:.3f}", row["best_stock"])
        table.add_row(row["work"], *sizes, shown(row), *figures, f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}")
    console.print(table)
    for mean in record["means"]:
        console.print(f"{mean['work']}, {shown(mean)}: {_ratio(mean)}, {mean['cells']} cells")
    for row in record["between"]:
        told = ", ".join(f"{row[name]} {name}" for name in ("documents", "document_tokens", "questions", "new_tokens"))
        console.print(f"{row['work']} ({told}), {shown(row)} against {row['against']}: {_ratio(row)}")
    console.print(f"stock backends within {CLOSE}x of the best of some cell: {', '.join(record['close']) or 'none timed'}")


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f})"


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
    return {"gpu": _gpu_name(), "versions": versions, "commit": commit or _commit(), "date": time.strftime("%Y-%m-%d")}


def _gpu_name() -> str:
    """Asked in a process of its own: this one may have to hold no memory of the GPU, or hold some already, when its forks cannot ask."""
    asked = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def _commit() -> str:
    """Of the working folder's checkout; empty where there is none, or no git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _paired(found: Sequence[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    return {(number, seed): seconds for number, seed, seconds in found}


def _default_contenders(options: argparse.Namespace) -> list[str]:
    """Ours before stock: it is timed quickly, and what it leaves of its share is stock's. Scouting is about stock alone."""
    stock = [f"stock-{name}" for name in options.stock]
    return stock if options.scout else ["split", *stock]


def _announce(
    console: Console, cells: list[Cell], contenders: list[str], seeds: int, passes: range, limit_s: float, options: argparse.Namespace
) -> None:
    gpus = options.gpus or [None]
    console.print(f"{options.shape}: {len(cells)} cells, {seeds} seeds and a warm-up, {len(passes)} passes from number {passes.start}")
    console.print(f"contenders, in the order of even passes: {', '.join(contenders)}")
    budget_s = wall_budget_s(cells, contenders, seeds, -(-len(passes) // len(gpus)))
    console.print(f"wall budget: about {budget_s:.0f} s; all has ended after {limit_s:.0f} s")
    for index, gpu in enumerate(gpus):
        for line in plan(passes[index :: len(gpus)], contenders, limit_s):
            console.print(line if gpu is None else f"GPU {gpu}, {line}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_engine gpu", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--model", help="a folder with real weights instead of a shape with random ones")
    parser.add_argument("--vocabulary", type=int, default=32000, help="of --model")
    parser.add_argument("--suite", nargs="+", choices=sorted(suites()), default=["grid"])
    parser.add_argument("--cells", nargs="*", type=int, help="only these, counted from 0")
    parser.add_argument("--stock", nargs="*", default=["fa3", "flashinfer", "triton"], help="stock backends")
    parser.add_argument(
        "--contenders", nargs="*",
        help="instead of split and the stock backends: interleaved, run-to-completion (interleaved so), transformers, stock-BACKEND; ours "
        "with fields of OursSetup of their own as split:deterministic=true,page_size=16",
    )  # fmt: skip
    parser.add_argument("--against", default=RUN_TO_COMPLETION, help="the contender of ours that the others are compared with, too")
    parser.add_argument("--scout", action="store_true", help="one seed, one pass: find out which stock backends count")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--first-pass", type=int, default=0, help="number of the first pass; even ones go forward, odd ones backward")
    parser.add_argument("--gpus", nargs="*", type=int, default=[], help="run passes side by side on these; default: one GPU")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--setup", default="{}", help="JSON: fields of OursSetup (page_size, streams, batching, kv_tokens, ...)")
    parser.add_argument("--text", type=Path, help="JSON list of token ids that documents are cut from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=560.0, help="all contenders have ended by then")
    parser.add_argument("--commit", default="")
    parser.add_argument("--plots", type=Path, help="folder for plots")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
