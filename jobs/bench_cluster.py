"""What a second GPU brings to a run, and what losing a worker costs it: whole runs through `askmany.run` and Ray, paired in one sitting.

    python -m askmany.jobs.bench_cluster --shape qwen2.5-7b --backend sglang --output out/bench-cluster

The same documents and questions with one worker and with `--workers`, in turns, then once more with all workers while one of them is killed
with SIGKILL after a third of the groups: with `--rounds 1` three runs, and as many starts. No worker begins before all are built and warm
(see `bench_together`). Documents an hour count from the first group's start to the last one's commit, so that loading a model is left out
and told beside it. `busy` is the share of that time that engines spent in steps, `gpu` what nvidia-smi saw meanwhile. Weights are random
unless `--model` names a folder; SGLang draws them as it loads, and none are written. Every run's keys are counted; one that is missing or
twice fails the benchmark. The last line is one JSON document, which is also left in the output.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from askmany.engine.errors import ConfigError
from askmany.jobs.bench_together import built_s, drawn_engine, mark_drawn, stored_engine
from askmany.jobs.machine_load import cpu_samples, device_name, gpu_samples, mean_over, repeated, share_of_a_core
from askmany.pipeline.commit import current_answers
from askmany.pipeline.config import WorkersConfig
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.run import run
from askmany.pipeline.runtime import cluster
from askmany.pipeline.storage import ObjectStore

Group = dict[str, Any]
MEASURED = {"page_size": 64, "prefill_chunk": 2048, "max_rows": 128}  # what an H200 ran well with


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured. Documents have about `document_words` words (lognormal, sigma 0.5), one token each with a shape's tokenizer; with
    `longest_words` any number between the two is as likely."""

    model: str
    output: Path
    documents: int = 200
    questions: int = 32
    document_words: int = 5000
    new_tokens: int = 24
    workers: int = 2
    backend: str = "sglang"
    dispatch: str = "direct"
    rounds: int = 2
    seed: int = 0
    gpus: float | str = "auto"
    engine: tuple[tuple[str, Any], ...] = ()
    drawn: bool = False
    longest_words: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. `start_s` is what came before the first group began, `built_s` each engine's own part of it, `span_s` what is measured.
    `bound_s`: no way to give the groups to the workers takes less, by the seconds that engines spent on them; `driver`: the share of one
    core that the driver's process took meanwhile."""

    workers: int
    killed: str
    start_s: float
    built_s: list[float]
    span_s: float
    documents_per_hour: float
    answer_tokens_per_s: float
    busy: float
    gpu: float | None
    groups: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    bound_s: float = 0.0
    driver: float | None = None


def main(
    output: Annotated[Path, typer.Option(help="A folder for inputs, model and answers; what is in it is replaced.")],
    shape: Annotated[str, typer.Option(help="A shape of `bench_shapes`, with random weights.")] = "qwen2.5-7b",
    model: Annotated[str | None, typer.Option(help="A model instead of a shape.")] = None,
    documents: int = 200,
    questions: int = 32,
    document_words: int = 5000,
    new_tokens: int = 24,
    workers: Annotated[int, typer.Option(min=2)] = 2,
    backend: str = "sglang",
    dispatch: str = "direct",
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    gpus: Annotated[str, typer.Option(help="GPUs of a worker; 0 for a CPU.")] = "auto",
    engine: Annotated[str, typer.Option(help="JSON: keys of the engine section, beside the backend.")] = json.dumps(MEASURED),
) -> None:
    """Measure, print a line a run and the JSON document."""
    output.mkdir(parents=True, exist_ok=True)
    drawn = model is None and backend == "sglang"
    found = model or str(random_model(shape, output / "model", stored=not drawn))
    sizes = (documents, questions, document_words, new_tokens)
    setup = Setup(
        found,
        output.resolve(),
        *sizes,
        workers,
        backend,
        dispatch,
        rounds,
        gpus=gpus if gpus == "auto" else float(gpus),
        engine=tuple(json.loads(engine).items()),
        drawn=drawn,
    )
    with cluster(WorkersConfig()):
        found_out = compare(setup)
    (output / "bench-cluster.json").write_text(json.dumps(found_out, indent=1))
    print(json.dumps(found_out, indent=1))


def compare(setup: Setup) -> dict[str, Any]:
    """Every run and what they come to together. ConfigError when a run lost or doubled an answer."""
    write_input(setup)
    runs = []
    for number in range(setup.rounds):
        order = (1, setup.workers) if number % 2 == 0 else (setup.workers, 1)
        runs += [measure(setup, f"round-{number}-{count}", count) for count in order]
    killed = measure(setup, "killed", setup.workers, kill=True)
    alone = median(one.documents_per_hour for one in runs if one.workers == 1)
    together = [one for one in runs if one.workers == setup.workers]
    rate = median(one.documents_per_hour for one in together)
    return {
        "setup": {**asdict(setup), "output": str(setup.output), "engine": dict(setup.engine)},
        "device": device_name(),
        "runs": [asdict(one) for one in (*runs, killed)],
        "scaling": rate / alone,
        "busy": fmean(one.busy for one in together),
        "killed_share_of_rate": killed.documents_per_hour / rate,
    }


def write_input(setup: Setup) -> None:
    """The documents and questions, from words `w0` to `w96`."""
    draw = random.Random(setup.seed)
    with open(setup.output / "documents.jsonl", "w", encoding="utf-8") as file:
        for number in range(setup.documents):
            if setup.longest_words:
                count = draw.randint(setup.document_words, setup.longest_words)
            else:
                count = max(8, int(setup.document_words * draw.lognormvariate(0, 0.5)))
            text = " ".join(f"w{draw.randrange(97)}" for _ in range(count))
            file.write(json.dumps({"doc_id": f"d{number:05d}", "text": text}) + "\n")


def measure(setup: Setup, name: str, workers: int, kill: bool = False) -> Measured:
    """One run into a fresh output, told by its ledger."""
    store = ObjectStore(str(setup.output / name), {})
    shutil.rmtree(setup.output / name, ignore_errors=True)
    launched = time.time()
    with gpu_samples() as samples, cpu_samples() as spent, _killer(store, workers if kill else 0) as victim:
        result = run(config_of(setup, store.uri, workers), build_engine=drawn_engine if setup.drawn else stored_engine)
    groups = [line for line in read_ledger(store) if line.get("kind") == "group"]
    _refuse_losses(setup, store, result.exit_code)
    began = min(group["at"] - group["seconds"] for group in groups)
    span_s = max(group["at"] for group in groups) - began
    busy = [group["usage"].get("busy_s", 0.0) for group in groups]
    found = Measured(
        workers=workers,
        killed=victim[0] if victim else "",
        start_s=round(began - launched, 3),
        built_s=built_s(setup.output / name),
        span_s=round(span_s, 3),
        documents_per_hour=3600 * setup.documents / span_s,
        answer_tokens_per_s=sum(group["usage"].get("answer_tokens", 0) for group in groups) / span_s,
        busy=sum(busy) / (span_s * workers),
        gpu=mean_over(samples, began, began + span_s, workers),
        groups=dict(Counter(group["worker"] for group in groups)),
        statuses=dict(result.statuses),
        bound_s=round(max(sum(busy) / workers, max(busy)), 3),
        driver=share_of_a_core(spent, began, began + span_s),
    )
    print(f"{name}: {found.documents_per_hour:,.0f} documents/hour, busy {found.busy:.3f}, gpu {found.gpu}, {span_s:.1f} s", flush=True)
    return found


def config_of(setup: Setup, output: str, workers: int) -> dict[str, Any]:
    """The run's configuration."""
    questions = [{"id": f"q{n:02d}", "question": f"w{n} w{n + 1} w{n + 2}"} for n in range(setup.questions)]
    return {
        "model": setup.model,
        "input": {"uri": str(setup.output / "documents.jsonl")},
        "questions": questions,
        "output": {"uri": output},
        "prompt": {"instruction": "w1 w2", "chat": False},
        "sampling": {"max_new_tokens": setup.new_tokens},
        "engine": {"backend": setup.backend, **dict(setup.engine)},
        "workers": {"count": workers, "gpus": setup.gpus, "dispatch": setup.dispatch, "cpus": 1},
        "metrics": {"heartbeat_s": 0.5},
    }


def _refuse_losses(setup: Setup, store: ObjectStore, exit_code: int) -> None:
    keys = Counter((row["doc_id"], row["question_id"]) for table in current_answers(store) for row in table.to_pylist())
    wanted = setup.documents * setup.questions
    if exit_code or len(keys) != wanted or max(keys.values()) != 1:
        raise ConfigError(f"{store.uri}: exit code {exit_code}, {len(keys):,} of {wanted:,} keys, {max(keys.values(), default=0)} of one")


@contextmanager
def _killer(store: ObjectStore, workers: int) -> Iterator[list[str]]:
    """Meanwhile, kill one worker of this machine once `workers` of them have committed a third of the plan (0: nobody). Who it was."""
    victim: list[str] = []

    def watch() -> bool:
        groups = [line for line in read_ledger(store) if line.get("kind") == "group"]
        status = _planned(store)
        done = sum(group["records"] for group in groups)
        names = sorted({group["worker"] for group in groups})
        ready = bool(status) and done * 3 >= status and len(names) >= workers
        if ready:
            host, _, pid = names[0].rpartition("/")
            if host == socket.gethostname():
                with suppress(ProcessLookupError):  # the run ended meanwhile
                    os.kill(int(pid), signal.SIGKILL)
                    victim.append(names[0])
        return ready

    with repeated(watch, 0.2) if workers else nullcontext():
        yield victim


def _planned(store: ObjectStore) -> int:
    """Records of the plan, 0 before there is one."""
    try:
        return int(json.loads(store.get("run.json"))["planned_records"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0


def random_model(shape: str, parent: Path, stored: bool = True) -> Path:
    """A folder with a shape's configuration and a tokenizer of one token a word, made once; with random weights in bf16 unless they are to
    be drawn when loaded."""
    from askmany.jobs.bench_shapes import shape_folder

    folder = shape_folder(shape, parent)
    if not any(folder.glob("*.safetensors")):
        _store_random(folder) if stored else mark_drawn(folder)
        _store_tokenizer(shape, folder)
    return folder


def _store_random(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    network.save_pretrained(folder, safe_serialization=True)


def _store_tokenizer(shape: str, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from askmany.jobs.bench_shapes import vocabulary

    words = {"[unk]": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n + 3 for n in range(vocabulary(shape) - 3)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    typer.run(main)
