"""What a plain Hugging Face model answers to one whole prompt alone, and how sure it was where another answer parts from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from askmany.engine.models import ResolvedModel
from askmany.engine.request import Document, Question

NEAR_TIE = 1e-3  # gap of the two largest logits under which the rounding of fp32 products may decide


def plain_model(resolved: ResolvedModel) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(resolved.folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


def prompt_of(document: Document, question: Question) -> list[int]:
    return [token for segment in document.segments for token in segment] + list(question.token_ids)


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Greedy answer of `transformers.generate`, without the token that ended it."""
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": list(eos_token_ids), "pad_token_id": 0}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return tuple(token for token in answer if token not in eos_token_ids)


@torch.inference_mode()
def gap_after(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], other: Sequence[int]) -> float:
    """The gap of the two largest logits at the first token in which `other` differs from `answer` (one may simply be shorter)."""
    same = next((i for i, pair in enumerate(zip(answer, other, strict=False)) if pair[0] != pair[1]), min(len(answer), len(other)))
    logits = model(input_ids=torch.tensor([[*prompt, *answer[:same]]]), use_cache=False, logits_to_keep=1).logits[0, -1]
    first, second = torch.topk(logits, 2).values.tolist()
    return float(first - second)
