"""One host's GPUs, one worker each: python -m askmany.jobs.bench_scaling --output DIR --out jobs/measurements/scaling-h200.json

The same run (1,000 documents of 2,000 to 16,000 random tokens, 32 questions each) on 1, 2, 4, ... workers, up to as many as there are GPUs,
or on those that `--workers` names. A call may measure some of the counts: `--out` keeps what is in it already, and a count that is measured
again takes the place of the former. How a run is timed: see `bench_cluster`. Every run's keys are counted; one that is missing or twice
fails the benchmark, and what was measured before it stays.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from askmany.engine.errors import ConfigError
from askmany.jobs.bench_cluster import MEASURED, Measured, Setup, measure, random_model, write_input
from askmany.jobs.machine_load import device_name
from askmany.pipeline.config import WorkersConfig
from askmany.pipeline.runtime import cluster

Record = dict[str, Any]
OF_CALL = ("output", "workers", "rounds")  # of a setup: what may differ between the calls of one record


def main(
    output: Annotated[Path, typer.Option(help="A folder for inputs, model and answers; what is in it is replaced.")],
    out: Annotated[Path, typer.Option(help="The record, a JSON file.")],
    workers: Annotated[list[int] | None, typer.Option(min=1, help="Counts; left out, powers of two up to the GPUs.")] = None,
    shape: Annotated[str, typer.Option(help="A shape of `bench_shapes`, with random weights.")] = "qwen2.5-7b",
    documents: int = 1000,
    questions: int = 32,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest document.")] = 2000,
    longest: int = 16000,
    new_tokens: int = 24,
    backend: str = "sglang",
    dispatch: str = "direct",
    gpus: Annotated[str, typer.Option(help="GPUs of a worker; 0 for a CPU.")] = "auto",
    engine: Annotated[str, typer.Option(help="JSON: keys of the engine section, beside the backend.")] = json.dumps(MEASURED),
    commit: str = "",
) -> None:
    """Measure and write the record after each count."""
    output.mkdir(parents=True, exist_ok=True)
    drawn = backend == "sglang"
    found_model = str(random_model(shape, output / "model", stored=not drawn))
    setup = Setup(
        found_model, output.resolve(), documents, questions, shortest, new_tokens, backend=backend, dispatch=dispatch,
        gpus=gpus if gpus == "auto" else float(gpus), engine=tuple(json.loads(engine).items()), drawn=drawn, longest_words=longest,
    )  # fmt: skip
    record = record_for(setup, shape, json.loads(out.read_text()) if out.exists() else None)
    write_input(setup)
    with cluster(WorkersConfig()):
        for count in workers or counts_up_to(_gpus()):
            found = measure(setup, f"workers-{count}", count)
            record = with_run(record, found, {"commit": commit, "date": time.strftime("%Y-%m-%d"), "device": device_name()})
            out.write_text(json.dumps(record, indent=1) + "\n")


def counts_up_to(gpus: int) -> list[int]:
    """Powers of two; one without a GPU."""
    return [1 << power for power in range(max(gpus, 1).bit_length())]


def record_for(setup: Setup, shape: str, held: Record | None) -> Record:
    """An empty record, or `held` if it is of the same setup. ConfigError naming what differs."""
    told = json.loads(json.dumps({**asdict(setup), "engine": dict(setup.engine), "model": shape, "output": ""}))
    told = {key: value for key, value in told.items() if key not in OF_CALL}
    if held is None:
        return {"setup": told, "runs": []}
    if differ := [key for key in told if told[key] != held["setup"].get(key)]:
        parts = ", ".join(f"{key} {held['setup'].get(key)!r} there and {told[key]!r} here" for key in differ)
        raise ConfigError(f"the record is of another setup: {parts}")
    return held


def with_run(record: Record, found: Measured, told: Record) -> Record:
    """`record` with one more run, in the order of workers."""
    others = [run for run in record["runs"] if run["workers"] != found.workers]
    return record | {"runs": sorted([*others, asdict(found) | told], key=lambda run: int(run["workers"]))}


def efficiency(record: Record) -> dict[int, float]:
    """By workers: the rate of one of them over that of a worker in the run with the fewest."""
    runs = record["runs"]
    alone = runs[0]["documents_per_hour"] / runs[0]["workers"]
    return {run["workers"]: run["documents_per_hour"] / run["workers"] / alone for run in runs}


def _gpus() -> int:
    import ray

    return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    typer.run(main)
