"""How much faster one engine asks many questions of one document than asking them one after the other.

    python -m askmany.jobs.bench_engine --threads 2

Three ways to the same greedy answers, paired in one run, the document's prefill inside each:
(a) `transformers.generate` for each question, on the document's KV cache, which is cropped (or copied, whichever is faster) in between;
(b) this engine, one question at a time (`streams: 1`); (c) this engine, all questions together.
No token ends an answer, so all make the same number of tokens. Answers are compared before a time is printed; one that differs is listed
with the gap of the two largest logits where it parts, and the run fails unless that is a near-tie. Then peak memory over that after
loading, for 1, 8 and all questions in flight, each in a process of its own. The last line is one JSON object.

On a GPU, against stock SGLang: `python -m askmany.jobs.bench_engine gpu --help` (see `bench_gpu`), and `merge --help` (see
`bench_merge`) for the records of several such calls. P of the interleaved layout on a run's own documents: `calibrate --help`.
"""

from __future__ import annotations

import copy
import inspect
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, __version__

from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.loading import load_executor
from askmany.engine.models import ResolvedModel, resolve_model
from askmany.engine.request import Document, Question, Sampling
from askmany.engine.tokenizer import TextTokenizer

NEAR_TIE = 1e-3  # gap of the two largest logits under which fp32 rounding may decide
MEMORY_SLACK_BYTES = 300_000_000  # over the KV cache: activations of one step, logits, workspaces
SUBJECTS = ("tide gauge", "signal lamp", "grain store", "ferry ledger", "copper still", "survey chain", "bell foundry", "orchard wall")

Answers = list[tuple[int, ...]]


@dataclass(frozen=True)
class Work:
    """One document and its questions, as tokens."""

    prefix: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    new_tokens: int

    def document(self, questions: int | None = None) -> Document:
        sampling = Sampling(self.new_tokens)
        asked = tuple(Question(f"q{i}", tail, sampling) for i, tail in enumerate(self.tails[:questions]))
        return Document("document", (self.prefix,), asked)


def main(
    model: Annotated[str, typer.Option(help="A known name, a local folder or a hub id.")] = "smollm2",
    document_tokens: Annotated[int, typer.Option(min=1)] = 2000,
    questions: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(min=1)] = 32,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of PyTorch.")] = 2,
    memory_of: Annotated[int, typer.Option(hidden=True, help="Only measure this many questions in flight.")] = 0,
) -> None:
    """Time the three ways, check that they agree, and measure peak memory."""
    torch.set_num_threads(threads)
    resolved = resolve_model(model)
    work = make_work(TextTokenizer(resolved.folder), document_tokens, questions, new_tokens)
    if memory_of:
        print(json.dumps(measure_memory(resolved, work, memory_of)))
        return
    console = Console()
    contenders = time_contenders(resolved, work, console)
    counts = sorted({1, min(8, questions), questions})
    arguments = ["--model", model, "--document-tokens", str(document_tokens), "--questions", str(questions)]
    arguments += ["--new-tokens", str(new_tokens), "--threads", str(threads)]
    memory = [memory_in_own_process(arguments, count) for count in counts]
    show_memory(console, memory)
    figures = {
        "bench": "engine", "model": resolved.name, "document_tokens": document_tokens, "questions": questions, "new_tokens": new_tokens,
        "threads": threads, **contenders, "memory": memory, "torch": torch.__version__, "transformers": __version__,
        "machine": platform.processor() or platform.machine(),
    }  # fmt: skip
    print(json.dumps(figures))
    if not all(row["within_bound"] for row in memory):
        raise typer.Exit(1)


def make_work(tokenizer: TextTokenizer, document_tokens: int, questions: int, new_tokens: int) -> Work:
    """An invented inventory, cut to the wanted length, and a question on each of its entries."""
    text, entry = "", 0
    while len(ids := tokenizer.encode(text).ids) < document_tokens:
        thing, entry = SUBJECTS[entry % len(SUBJECTS)], entry + 1
        year, crowns, house = 1700 + 7 * entry % 211, entry * 37 % 90 + 10, entry * 5 % 23
        text += f"Entry {entry}. The {thing} of {year} was paid with {crowns} crowns by house {house}. "
    asked = (f"\n\nQuestion: what does entry {i + 1} say about the {SUBJECTS[i % len(SUBJECTS)]}?\nAnswer:" for i in range(questions))
    return Work(tokenizer.with_front(ids)[:document_tokens], tuple(tuple(tokenizer.encode(text).ids) for text in asked), new_tokens)


def time_contenders(resolved: ResolvedModel, work: Work, console: Console) -> dict[str, Any]:
    """Run the three ways, compare their answers, print the table; their seconds and the speed-up."""
    one, together = (engine_way(resolved, work, EngineConfig(device="cpu", streams=streams)) for streams in (1, "auto"))
    plain = AutoModelForCausalLM.from_pretrained(resolved.folder, dtype=torch.float32, local_files_only=True)
    ways = {"a_generate": lambda: generate_each(plain, work), "b_one_at_a_time": one, "c_together": together}
    answers, seconds, cpu_seconds = {}, {}, {}
    for name, way in ways.items():
        started_s, started_cpu_s = perf_counter(), process_time()
        answers[name] = way()
        seconds[name], cpu_seconds[name] = perf_counter() - started_s, process_time() - started_cpu_s
    ties = compare(plain, work, answers, console)
    better = min(seconds["a_generate"], seconds["b_one_at_a_time"])
    table = Table("way", "seconds", "CPU seconds", "answer tokens/s", "times (c)")
    for name, taken_s in seconds.items():
        produced = len(work.tails) * work.new_tokens
        rate, times = produced / taken_s, taken_s / seconds["c_together"]
        table.add_row(name, f"{taken_s:.2f}", f"{cpu_seconds[name]:.2f}", f"{rate:.1f}", f"{times:.2f}")
    console.print(table)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "speedup": better / seconds["c_together"], "near_ties": ties}


def engine_way(resolved: ResolvedModel, work: Work, config: EngineConfig) -> Callable[[], Answers]:
    engine = make_engine(resolved, config, len(work.prefix) + max(map(len, work.tails)) + work.new_tokens)

    def run() -> Answers:
        engine.submit(work.document())
        found = {result.question_id: result.answer_token_ids for result in engine.drain()}
        return [found[f"q{i}"] for i in range(len(work.tails))]

    return run


def make_engine(resolved: ResolvedModel, config: EngineConfig, context_tokens: int) -> Engine:
    """An engine that knows no end-of-answer token."""
    executor, config = load_executor(resolved, config, context_tokens)
    return Engine(build_scheduler(config), executor, TextTokenizer(resolved.folder))


@torch.inference_mode()
def generate_each(model: PreTrainedModel, work: Work) -> Answers:
    """Hugging Face's own way: prefill the document once, then `generate` on its cache for one question after the other."""
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"  # renamed in Transformers 5.24
    prefill: dict[str, Any] = {name: cache}
    model(input_ids=torch.tensor([work.prefix]), use_cache=True, logits_to_keep=1, **prefill)
    crop = crop_is_faster(cache)
    options: dict[str, Any] = {"max_new_tokens": work.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answers = []
    for tail in work.tails:
        prompt = torch.tensor([work.prefix + tail])
        options[name] = cache if crop else copy.deepcopy(cache)
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[operator]
        answers.append(tuple(output[0, prompt.shape[1] :].tolist()))
        if crop:
            cache.crop(len(work.prefix) - cache.get_seq_length())
    return answers


def crop_is_faster(cache: DynamicCache) -> bool:
    started_s = perf_counter()
    copied = copy.deepcopy(cache)
    copied_s = perf_counter()
    copied.crop(-1)
    return perf_counter() - copied_s < copied_s - started_s


def compare(model: PreTrainedModel, work: Work, answers: dict[str, Answers], console: Console) -> int:
    """How many answers differ by a near-tie. Fails the run when one differs by more."""
    ties = 0
    for name, others in answers.items():
        for i, (wanted, got) in enumerate(zip(answers["a_generate"], others, strict=True)):
            if wanted != got:
                at = next(j for j, pair in enumerate(zip(wanted, got, strict=True)) if pair[0] != pair[1])
                gap = top_two_gap(model, work.prefix + work.tails[i] + wanted[:at])
                console.print(f"{name}: question {i} parts from (a) at token {at}, where the two largest logits are {gap:.2g} apart")
                if gap >= NEAR_TIE:
                    raise typer.Exit(1)
                ties += 1
    return ties


@torch.inference_mode()
def top_two_gap(model: PreTrainedModel, token_ids: tuple[int, ...]) -> float:
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
    first, second = torch.topk(logits, 2).values.tolist()
    return float(first - second)


def measure_memory(resolved: ResolvedModel, work: Work, count: int) -> dict[str, Any]:
    """Peak resident memory over that after loading, while `count` questions are answered together; and the bound it must keep."""
    context_tokens = len(work.prefix) + max(map(len, work.tails)) + work.new_tokens
    executor, config = load_executor(resolved, EngineConfig(device="cpu"), context_tokens)
    engine = Engine(build_scheduler(config), executor, TextTokenizer(resolved.folder))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    engine.submit(work.document(count))
    assert len(list(engine.drain())) == count
    kv_tokens = len(work.prefix) + sum(len(tail) + work.new_tokens for tail in work.tails[:count])
    kv_bytes = kv_tokens * executor.pool.shape.token_bytes
    grown = resident("VmHWM") - before
    return {
        "questions": count, "loaded_bytes": before, "grown_bytes": grown, "kv_bytes": kv_bytes,
        "within_bound": grown <= kv_bytes + MEMORY_SLACK_BYTES,
    }  # fmt: skip


def resident(field: str) -> int:
    """A memory figure of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def memory_in_own_process(arguments: list[str], count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "askmany.jobs.bench_engine", *arguments, "--memory-of", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring {count} questions failed: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def show_memory(console: Console, memory: list[dict[str, Any]]) -> None:
    table = Table("questions in flight", "after loading, MB", "peak over that, MB", "KV, MB", "bound (KV + 300 MB)")
    for row in memory:
        sizes = (f"{row[name] / 1e6:.0f}" for name in ("loaded_bytes", "grown_bytes", "kv_bytes"))
        table.add_row(str(row["questions"]), *sizes, "kept" if row["within_bound"] else "BROKEN")
    console.print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["gpu"]:
        from askmany.jobs import bench_gpu

        bench_gpu.main(sys.argv[2:])
    elif sys.argv[1:2] == ["merge"]:
        from askmany.jobs import bench_merge

        raise SystemExit(bench_merge.main(sys.argv[2:]))
    elif sys.argv[1:2] == ["calibrate"]:
        from askmany.jobs import bench_calibrate

        raise SystemExit(bench_calibrate.main(sys.argv[2:]))
    else:
        typer.run(main)
