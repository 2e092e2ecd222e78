"""One contender of the engine benchmark in a process of its own: python -m askmany.jobs.bench_contender JOB.json

Started by `bench_gpu`, once for all cells and seeds of a pass. Prints one JSON object a line behind MARK: first how long the start took
from the launch on, then each timing. Begins nothing after its time limit, which counts from the launch as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch

from askmany.engine.choice import calibrated_streams
from askmany.engine.config import DEFAULT_INTERLEAVED_STREAMS
from askmany.engine.garbage import leave_out_what_is_loaded
from askmany.engine.model import LoadedModel
from askmany.jobs.bench_cells import Cell, Drawn, draw
from askmany.jobs.bench_ours import OursContender, OursSetup, free_tokens, hand_back, load_ours
from askmany.jobs.bench_shapes import vocabulary
from askmany.jobs.bench_variants import Named

WARM_UP = -1  # the seed whose time does not count
WARM_UP_TOKENS = 12
CALIBRATION = -2
RUN_TO_COMPLETION = "run-to-completion"
MARK = "BENCH "  # before each object; libraries print, too
END = "BENCH END"  # the last line of a contender that has done all of its work


class Contender(Protocol):
    """An engine that answers cells."""

    def run(self, cell: Cell, drawn: Drawn) -> float:
        """Seconds that the questions of a cell took."""
        ...

    def notes(self) -> dict[str, Any]:
        """What belongs beside the times."""
        ...

    def close(self) -> None:
        """Let the device go, and end the processes that it started."""
        ...


def make(job: dict[str, Any], cells: list[Cell]) -> Contender:
    """The contender that a job names: split, interleaved, run-to-completion (interleaved so), transformers, or stock-BACKEND; ours with
    fields of `OursSetup` as `bench_variants.Named` has them."""
    named, folder = Named.parse(job["contender"]), Path(job["folder"])
    name, setup = named.layout, job["setup"] | named.setup
    context = max(cell.document_tokens + cell.question_tokens + cell.most_tokens for cell in cells) + 1
    rows = max(min(cell.documents * cell.questions, job["max_rows"]) for cell in cells)
    if name.startswith("stock-"):
        from askmany.jobs.baselines_sglang import StockContender

        stock = name.removeprefix("stock-")
        return StockContender(folder, stock, rows, context, job["random_weights"], kv_tokens=setup.get("kv_tokens"))
    if name == "transformers":
        from askmany.jobs.bench_plain import PlainContender

        return PlainContender(folder, job["random_weights"])
    model = load_ours(folder, torch.device(job["device"]), context, job["random_weights"], setup.get("deterministic", False))
    values = {"layout": name, "max_rows": job["max_rows"]} | setup
    if name == RUN_TO_COMPLETION:
        values |= {"layout": "interleaved", "batching": "run_to_completion"}
    if values["layout"] == "interleaved" and values.get("streams") is None:
        values["streams"] = min(DEFAULT_INTERLEAVED_STREAMS, max(cell.questions for cell in cells))
    if values.get("streams") == "calibrate":
        values["kv_tokens"] = values.get("kv_tokens") or free_tokens(model, OursSetup(**values | {"streams": None}), context)
        values["streams"], reason = _calibrated(model, values, context, cells[0], vocabulary(job["shape"]))
        _say(calibrated=reason)
    return OursContender(model, OursSetup(**values), context, cells)


def _calibrated(model: LoadedModel, values: dict[str, Any], context: int, cell: Cell, size: int) -> tuple[int, str]:
    """P of the interleaved layout by the first cell under a seed of its own. Each candidate has the pool of `kv_tokens` in `values`, the
    one before having handed back its own."""
    drawn = draw(cell, CALIBRATION, size)

    def tokens_per_s(streams: int) -> float:
        contender = OursContender(model, OursSetup(**(values | {"streams": streams})), context, [cell])
        contender.run(cell, drawn)
        taken_s = contender.run(cell, drawn)
        del contender
        hand_back(model.device)
        return sum(map(sum, drawn.lengths)) / taken_s

    return calibrated_streams(tokens_per_s, most=min(values["max_rows"], cell.questions))


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    cells = [Cell(**cell) for cell in job["cells"]]
    launched_s, limit_s = job["launched_s"], job["limit_s"]  # `monotonic` is one clock for all processes of a machine
    contender = make(job, cells)
    leave_out_what_is_loaded()
    _say(start_s=monotonic() - launched_s)
    size = vocabulary(job["shape"]) if job["shape"] else int(job["vocabulary"])
    text = json.loads(Path(job["text"]).read_text()) if job.get("text") else ()
    try:
        lasted_s: dict[int, float] = {}  # a cell, when it was last asked
        for seed, index in turns(job["seeds"], job["order"]):
            began_s = monotonic()
            if began_s - launched_s + lasted_s.get(index, 0.0) > limit_s:
                _say(left_out=index, seed=seed)
                continue
            cell = warm_up(cells[index]) if seed == WARM_UP else cells[index]
            _say(cell=index, seed=seed, seconds=contender.run(cell, draw(cell, seed, size, text)))
            lasted_s[index] = monotonic() - began_s
        _say(notes=contender.notes())
    finally:
        contender.close()
    print(END, flush=True)


def turns(seeds: Sequence[int], order: Sequence[int]) -> list[tuple[int, int]]:
    """Seeds and cells. Each cell's warm-up comes right before its first seed: what little time there is makes times, not warm-ups."""
    first = [(seed, index) for index in order for seed in (WARM_UP, *seeds[:1])]
    return first + [(seed, index) for seed in seeds[1:] for index in order]


def warm_up(cell: Cell) -> Cell:
    """What is asked before anything counts. Where all answers are equally long, some steps have seen all that there is to see."""
    return cell if cell.spread else replace(cell, new_tokens=min(cell.new_tokens, WARM_UP_TOKENS))


def _say(**values: Any) -> None:
    print(MARK + json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
