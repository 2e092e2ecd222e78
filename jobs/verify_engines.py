"""Greedy answers with every token's log-probability and gap, by each kind of engine that `verify` compares."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from askmany.engine.executor import Pending, TorchExecutor
from askmany.engine.step import Sampled, StepPlan
from askmany.jobs.bench_ours import OursContender, OursSetup, load_ours
from askmany.jobs.verify import Trace

Prompts = list[tuple[list[int], list[list[int]]]]  # documents, each with its questions


def answers(name: str, options: Namespace) -> list[Trace]:
    """One answer for each question of each document, in order."""
    lines = options.prompts.read_text().splitlines()
    prompts = [(item["document"], item["questions"]) for item in map(json.loads, lines)]
    if name == "ours":
        return ours(options.model, prompts, options.new_tokens, torch.device(options.device), json.loads(options.setup))
    if name == "transformers":
        return plain(options.model, prompts, options.new_tokens)
    return stock(name.removeprefix("stock-"), options.model, prompts, options.new_tokens)


def ours(folder: str, prompts: Prompts, new_tokens: int, device: torch.device, setup: dict[str, Any]) -> list[Trace]:
    """All questions of all documents together. Raises RuntimeError when what was drawn is not what the engine answered."""
    context = _context(prompts, new_tokens)
    model = load_ours(Path(folder), device, context, False, setup.get("deterministic", False))
    contender = OursContender(model, OursSetup(**setup), context, [])
    notes: dict[tuple[str, str], list[Sampled]] = defaultdict(list)
    _note_samples(contender.executor, notes)
    _, results = contender.answer([(document, questions, [new_tokens] * len(questions)) for document, questions in prompts])
    answered = {(result.document_key, result.question_id): result.answer_token_ids for result in results}
    keys = [(f"d{d}", f"q{q}") for d, (_, questions) in enumerate(prompts) for q in range(len(questions))]
    found = [notes[key][:new_tokens] for key in keys]
    for key, own in zip(keys, found, strict=True):
        if tuple(s.token_id for s in own) != answered[key] or len(own) != new_tokens:
            raise RuntimeError(f"question {key} was answered with {len(answered[key])} tokens, and {len(notes[key])} were drawn")
    return [Trace([s.token_id for s in own], [s.logprob for s in own], [s.margin for s in own]) for own in found]


@torch.inference_mode()
def plain(folder: str, prompts: Prompts, new_tokens: int) -> list[Trace]:
    """Transformers, each prompt alone and from its first token at every step: slow, and as plain as can be."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    traces = []
    for document, questions in prompts:
        for question in questions:
            ids, trace = document + question, Trace([], [], [])
            for _ in range(new_tokens):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
                first, second = torch.topk(logits, 2).values.tolist()
                token = int(logits.argmax())
                trace.token_ids.append(token)
                trace.logprobs.append(float(logits[token] - torch.logsumexp(logits, dim=-1)))
                trace.gaps.append(first - second)
                ids = [*ids, token]
            traces.append(trace)
    return traces


def stock(backend: str, folder: str, prompts: Prompts, new_tokens: int) -> list[Trace]:
    """SGLang's own engine."""
    from askmany.jobs.baselines_sglang import StockContender

    flat = [document + question for document, questions in prompts for question in questions]
    engine = StockContender(Path(folder), backend, len(flat), _context(prompts, new_tokens), False)
    try:
        return [Trace(**answer) for answer in engine.answers(flat, new_tokens)]
    finally:
        engine.close()


def _context(prompts: Prompts, new_tokens: int) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(len(document) + len(question) for document, questions in prompts for question in questions) + new_tokens


def _note_samples(executor: TorchExecutor, notes: dict[tuple[str, str], list[Sampled]]) -> None:
    """Keep every token that the executor draws, void rows aside."""
    launch = executor.launch

    def noting(plan: StepPlan) -> Pending:
        pending = launch(plan)

        def collected() -> list[Sampled]:
            sampled = pending.collect()
            for sample in sampled:
                notes[sample.stream.document.document.key, sample.stream.question.question_id].append(sample)
            return sampled

        return Pending(collected, pending.ahead, pending.draw)

    executor.launch = noting  # type: ignore[method-assign]
