"""What the pipeline itself costs, on this machine, with engines that cost nothing or only sleep.

    python -m askmany.jobs.bench_pipeline overhead --documents 20000 --questions 6
    python -m askmany.jobs.bench_pipeline memory   --documents 1000000
    python -m askmany.jobs.bench_pipeline resume   --documents 1000000
    python -m askmany.jobs.bench_pipeline balance  --documents 400
    python -m askmany.jobs.bench_pipeline busy     --documents 60 --questions 20

Each command makes its own input in a temporary folder, runs real launches on a local Ray, each in a process of its own, checks that every
key is there, and only then prints figures. The last line is one JSON document; `--out` merges it into a file.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from askmany.jobs.bench_launch import Changes, Launched, launch, launch_until
from askmany.jobs.bench_sleep import Stretch, stretches
from askmany.pipeline.commit import read_manifest
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.storage import ObjectStore

TEXT = "the town lay by a wide river and every boat that passed brought news of the war to its people"
WORDS = tuple(TEXT.split())
SMALL_DOCUMENTS = 1_000
QUICK = Changes(preparer="askmany.jobs.bench_preparer:build_remembering_preparer")

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
Out = Annotated[Path | None, typer.Option(help="JSON file that the figures are merged into, by command")]
Model = Annotated[str, typer.Option(help="whose tokenizer cuts the documents; its weights only for `busy`")]


@app.command()
def overhead(documents: int = 20_000, questions: int = 6, workers: int = 2, model: Model = "smollm2", out: Out = None) -> None:
    """Answers a second with the fake engine, and where the time goes."""
    with workspace() as folder:
        config = fake_config(folder, documents, questions, workers, model)
        launched = launch(config)
        check(config, documents * questions)
        seconds = launched.ended_at - launched.dispatching_at
        figures = {"answers_per_s": documents * questions / seconds, "dispatching_s": seconds, **shares(launched, config, seconds)}
    tell("overhead", {"documents": documents, "questions": questions, "workers": workers} | figures, out)


@app.command()
def memory(documents: int = 1_000_000, questions: int = 1, model: Model = "smollm2", out: Out = None) -> None:
    """The driver's peak memory a planned document, over a run of 1,000 documents; and the same with four times the answers."""
    tenth = documents // 10
    sizes = {"small": (SMALL_DOCUMENTS, 1), "large": (documents, questions)}
    sizes |= {"few_answers": (tenth, questions), "many_answers": (tenth, questions * 4)}
    peaks = {}
    for name, (count, asked) in sizes.items():
        with workspace() as folder:
            config = fake_config(folder, count, asked, 2, model)
            peaks[name] = launch(config, QUICK).driver_peak_bytes
            check(config, count * asked)
    each = (peaks["large"] - peaks["small"]) / (documents - SMALL_DOCUMENTS)
    answers = (peaks["many_answers"] - peaks["few_answers"]) / (tenth * questions * 3)
    tell("memory", {"documents": documents, "peak_bytes": peaks, "bytes_per_document": each, "bytes_per_further_answer": answers}, out)


@app.command()
def resume(documents: int = 1_000_000, done: float = 0.9, model: Model = "smollm2", out: Out = None) -> None:
    """Kill a run that is nine tenths done; how long until the next launch hands out work, and what it opens of what is finished. The
    memory of both drivers a planned document, over a run of 1,000 documents."""
    with workspace() as folder:
        small = launch(fake_config(folder, SMALL_DOCUMENTS, 1, 2, model), QUICK).driver_peak_bytes
    with workspace() as folder:
        config = fake_config(folder, documents, 1, 2, model)
        store = ObjectStore(config["output"]["uri"], {})
        killed = launch_until(config, QUICK, lambda: finished_share(store, documents) >= done)
        before = store.list("answers")
        launched = launch(config, QUICK)
        check(config, documents)
        reopened = sorted({name.rpartition("/")[2] for name in launched.opened} & {name.rpartition("/")[2] for name in before})
        figures = {"documents": documents, "finished_shards": len(before), "to_first_work_s": launched.dispatching_at - launched.started_at}
        figures |= {"finished_shards_opened_before_work": len(reopened)}
    for name, peak in (("small", small), ("killed", killed), ("resumed", launched.driver_peak_bytes)):
        figures |= {f"{name}_peak_bytes": peak}
        if name != "small":
            figures |= {f"{name}_bytes_per_document": (peak - small) / (documents - SMALL_DOCUMENTS)}
    tell("resume", figures, out)


@app.command()
def balance(documents: int = 400, work_s: float = 120.0, model: Model = "smollm2", out: Out = None) -> None:
    """Makespan over the lower bound with two fast and two slow sleeping workers: the plan dispatched directly and through Ray Data, and
    Ray Data with equal groups in input order."""
    figures: dict[str, Any] = {"documents": documents, "work_s": work_s}
    ways = {"direct": ("direct", False), "ray_data": ("ray_data", False), "ray_data_input_order": ("ray_data", True)}
    for name, (dispatch, input_order) in ways.items():
        with workspace() as folder:
            config = fake_config(folder, documents, 1, 4, model, lognormal=True)
            config["workers"] |= {"dispatch": dispatch, "cpus": 0.25}
            config["output"]["shard_documents"] = max(1, documents // 60) if input_order else 1024
            sleeping = Changes("askmany.jobs.bench_sleep:sleeping_engine", environment={"ASKMANY_SLEEP_S": str(work_s)})
            launch(config, replace(sleeping, input_order=input_order))
            check(config, documents)
            figures[name] = makespan(stretches(Path(config["output"]["uri"])))
    tell("balance", figures, out)


@app.command()
def busy(documents: int = 60, questions: int = 20, model: Model = "smollm2", out: Out = None) -> None:
    """The share of time that the CPU engine spends in steps, from its first group's start to its last group's commit, and what the driver
    takes of a core meanwhile."""
    with workspace() as folder:
        config = fake_config(folder, documents, questions, 1, model, backend="auto", shard_documents=max(1, documents // 10), new_tokens=8)
        launched = launch(config)
        check(config, documents * questions)
        groups = acknowledged(config)
        seconds = groups[-1]["at"] - min(group["at"] - group["seconds"] for group in groups)
        share = sum(group["usage"].get("busy_s", 0.0) for group in groups) / seconds
        core = launched.driver_cpu_s / (launched.ended_at - launched.started_at)
    figures = {"documents": documents, "questions": questions, "groups": len(groups), "busy_share": share, "driver_cores": core}
    tell("busy", figures | {"measured_s": seconds}, out)


def fake_config(
    folder: Path,
    documents: int,
    questions: int,
    workers: int,
    model: str,
    lognormal: bool = False,
    backend: str = "fake",
    shard_documents: int = 1024,
    new_tokens: int = 2,
) -> dict[str, Any]:
    """A run's mapping over documents made for it: equally long, or with lengths as those of real collections are."""
    import numpy as np

    rng = np.random.default_rng(documents)
    lengths = np.minimum(rng.lognormal(5.0, 1.0, documents).astype(int) + 20, 3000) if lognormal else np.full(documents, len(WORDS))
    with open(folder / "documents.jsonl", "w") as file:
        for number, length in enumerate(lengths):
            text = " ".join(WORDS[index % len(WORDS)] for index in range(length))
            file.write(json.dumps({"doc_id": f"d{number:07d}", "text": text}) + "\n")
    return {
        "model": model,
        "input": {"uri": str(folder / "documents.jsonl")},
        "questions": [f"What does it say about number {number}?" for number in range(questions)],
        "output": {"uri": str(folder / "out"), "shard_documents": shard_documents},
        "engine": {"backend": backend},
        "sampling": {"max_new_tokens": new_tokens},
        "workers": {"count": workers, "cpus": 1, "gpus": 0},
    }


def check(config: dict[str, Any], records: int) -> None:
    """Every key once, by what the manifest says of its sealed shards. Raises AssertionError."""
    manifest = read_manifest(ObjectStore(config["output"]["uri"], {}))
    assert manifest.complete, "the run is not complete"
    assert manifest.records == records, f"{manifest.records} records of {records}"
    assert manifest.statuses.get("ok") == records, manifest.statuses


def acknowledged(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The ledger's lines on groups, by time."""
    lines = [line for line in read_ledger(ObjectStore(config["output"]["uri"], {})) if line.get("kind") == "group"]
    return sorted(lines, key=lambda line: line["at"])


def finished_share(store: ObjectStore, documents: int) -> float:
    """Roughly: by the shards in the listing, none of which holds more than 1,024 documents."""
    return len(store.list("answers")) / max(1, documents / 1024)


def shares(launched: Launched, config: dict[str, Any], seconds: float) -> dict[str, float]:
    """Where a launch's time went: steps of the engines, the driver's CPU, planning before the first group."""
    usage = [group["usage"].get("busy_s", 0.0) for group in acknowledged(config)]
    workers = config["workers"]["count"]
    return {
        "planning_s": launched.dispatching_at - launched.started_at,
        "engine_busy_share": sum(usage) / (workers * seconds),
        "driver_cores": launched.driver_cpu_s / (launched.ended_at - launched.started_at),
    }


def makespan(found: list[Stretch]) -> dict[str, float]:
    """From the first document's begin to the last one's end, over what the same speeds need for the same work at best."""
    speeds = {stretch.worker: stretch.speed for stretch in found}
    work_s = sum(stretch.work_s for stretch in found)
    bound_s = work_s / sum(speeds.values())
    seconds = max(stretch.end for stretch in found) - min(stretch.begin for stretch in found)
    return {
        "makespan_s": seconds,
        "bound_s": bound_s,
        "ratio": seconds * sum(speeds.values()) / work_s,
        "workers": len(speeds),
    }


@contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="askmany-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tell(name: str, figures: dict[str, Any], out: Path | None) -> None:
    """Print the figures as one line of JSON; put them into `out` beside what other commands found."""
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    versions = {"python": platform.python_version(), "ray": version("ray"), "pyarrow": version("pyarrow")}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    commit = head.stdout.strip() or "unknown"
    record = {**figures, "machine": machine, "versions": versions, "commit": commit, "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({name: record}))
    if out is not None:
        known = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(json.dumps({**known, name: record}, indent=1) + "\n")


if __name__ == "__main__":
    app()
