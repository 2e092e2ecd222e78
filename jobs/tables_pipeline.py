"""The README's figures of the pipeline: python -m askmany.jobs.tables_pipeline README.md jobs/measurements/pipeline-cpu.json

Replaces what stands between `<!-- pipeline -->` and `<!-- /pipeline -->` by what `bench_pipeline` measured, each command's line with the
machine's load at the time. `--check` only compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from askmany.jobs.markers import options_of, put

Figures = Mapping[str, Any]
Line = tuple[str, str]


def markdown(record: Mapping[str, Figures]) -> str:
    """A line for every figure that there is."""
    lines = [(what, figure, record[name]) for name, tell in TOLD.items() if name in record for what, figure in tell(record[name])]
    table = [f"| {what} | {figure} | {_conditions(figures)} |" for what, figure, figures in lines]
    return "\n".join(["| what | measured | conditions |", "|---|---|---|", *table])


def _overhead(f: Figures) -> Iterator[Line]:
    what = f"the fake engine, {f['documents']:,} documents x {f['questions']} questions, {f['workers']} workers"
    yield what, f"{f['answers_per_s']:,.0f} answers/s; the driver takes {f['driver_cores']:.2f} of a core"


def _resume(f: Figures) -> Iterator[Line]:
    opened = f["finished_shards_opened_before_work"]
    yield (
        f"resume of {f['documents']:,} documents, {f['finished_shards']:,} shards finished, after SIGKILL",
        f"work handed out after {f['to_first_work_s']:.1f} s, {opened} finished shards opened",
    )
    for name, what in (("killed", "planning and running"), ("resumed", "resuming")):
        yield f"driver's memory a planned document, {what} {f['documents']:,}", f"{f[f'{name}_bytes_per_document']:,.0f} bytes"


def _memory(f: Figures) -> Iterator[Line]:
    yield "driver's memory a further answer", f"{f['bytes_per_further_answer']:,.0f} bytes"


def _balance(f: Figures) -> Iterator[Line]:
    names = {"direct": "direct dispatcher", "ray_data": "Ray Data", "ray_data_input_order": "Ray Data, equal groups in input order"}
    for name, what in names.items():
        yield f"makespan over its lower bound, 2 fast and 2 slow workers that sleep: {what}", f"{f[name]['ratio']:.3f}"


def _busy(f: Figures) -> Iterator[Line]:
    figure = f"{f['busy_share']:.1%}; the driver takes {f['driver_cores']:.2f} of a core"
    yield f"SmolLM2 on the CPU, {f['documents']} documents x {f['questions']} questions: share of time in engine steps", figure


TOLD: Mapping[str, Callable[[Figures], Iterator[Line]]] = {
    "overhead": _overhead, "resume": _resume, "memory": _memory, "balance": _balance, "busy": _busy,
}  # fmt: skip


def _conditions(figures: Figures) -> str:
    machine = figures["machine"]
    return f"{machine['cores']} cores, load {machine['load']:.0f}; commit {figures['commit']}, {figures['date']}"


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    return put(options, "pipeline", markdown(json.loads(options.measurements.read_text())))


if __name__ == "__main__":
    raise SystemExit(main())
