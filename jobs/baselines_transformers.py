"""A baseline without askmany's engine: `transformers.generate` on each full prompt, one after another, greedy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from askmany.engine.models import ResolvedModel
from askmany.engine.prompts import PromptBuilder
from askmany.pipeline.eval_batch_prompt import legal_answer
from askmany.pipeline.score_items import Item


@dataclass(frozen=True, slots=True)
class Generated:
    """Items to score, and the seconds that generating took."""

    items: list[Item]
    seconds: float


def generate(
    model: ResolvedModel, prompts: PromptBuilder, rows: Sequence[Mapping[str, Any]], max_new_tokens: int, stop: Sequence[str]
) -> Generated:
    """Answer every question of every row by itself; answers end before the first stop string."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder: Any = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32 if device == "cpu" else "auto")
    decoder.to(device).eval()
    items = []
    began = time.perf_counter()
    for row in rows:
        for question in row["questions"]:
            prompt = prompts.reference_ids(row["text"], question["question"])
            text = _answer(decoder, prompts, prompt, max_new_tokens, stop, model.eos_token_ids)
            answer, kind = legal_answer(question, text)
            status = "invalid_output" if answer is None else "ok"
            items.append(Item((row["doc_id"], question["qid"], 0), kind, status, answer or "", tuple(question["answers"])))
    return Generated(items, time.perf_counter() - began)


@torch.inference_mode()
def _answer(
    decoder: Any, prompts: PromptBuilder, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[str], ends: Sequence[int]
) -> str:
    ids = torch.tensor([list(prompt)], device=decoder.device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": list(ends), "pad_token_id": ends[0]}
    output = decoder.generate(ids, attention_mask=torch.ones_like(ids), **options)
    text = prompts.decode(output[0, ids.shape[1] :].tolist())
    cuts = [at for mark in stop if (at := text.find(mark)) >= 0]
    return text[: min(cuts)] if cuts else text
