"""Label distributions of a real model against teacher-forced Transformers on each full prompt.

Needs a data folder: `ASKMANY_DATA` names one that holds squad_v11_dev_paras.jsonl.gz.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from askmany.engine.build import build_engine
from askmany.engine.config import EngineConfig
from askmany.engine.labels import label_trie
from askmany.engine.models import ResolvedModel
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.engine.request import Document, Question, Sampling

LABELS = ("yes", "no", "not stated", "not sure")
PROMPT = PromptConfig(instruction="Read the text.", question="{{ question }}\nIs the answer in the text: yes, no, not stated or not sure?")
PARAGRAPHS = 50


def paragraphs() -> list[dict[str, Any]]:
    path = Path(os.environ.get("ASKMANY_DATA", "")) / "squad_v11_dev_paras.jsonl.gz"
    if not path.is_file():
        pytest.skip("ASKMANY_DATA names no folder with squad_v11_dev_paras.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in itertools.islice(lines, 0, 41 * PARAGRAPHS, 41)]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_label_probabilities_equal_teacher_forced_scoring_of_each_full_prompt(smollm2: ResolvedModel) -> None:
    prompts = PromptBuilder(smollm2.folder, PROMPT)
    engine = build_engine(smollm2, EngineConfig(dtype="float32", kv_tokens=16384))
    rows = paragraphs()
    questions: dict[tuple[str, str], str] = {}
    for row in rows:
        asked = []
        for question in row["questions"][:10]:
            questions[row["doc_id"], question["qid"]] = question["question"]
            ids = [prompts.answer_ids(question["question"], label) for label in LABELS]
            trie = label_trie(LABELS, ids, smollm2.eos_token_ids[0])
            asked.append(Question(question["qid"], prompts.tail(question["question"]), Sampling(1), labels=trie))
        engine.submit(Document(row["doc_id"], prompts.segments(row["text"]), tuple(asked)))
    model = AutoModelForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32).eval()
    texts = {row["doc_id"]: row["text"] for row in rows}
    worst = 0.0
    for result in engine.drain():
        question = questions.pop((result.document_key, result.question_id))
        prompt = prompts.reference_ids(texts[result.document_key], question)
        products = [teacher_forced(model, prompt, prompts.answer_ids(question, label)) for label in LABELS]
        mass = math.fsum(map(math.exp, products))
        assert result.labels is not None
        for probability, product in zip(result.labels.probabilities, products, strict=True):
            worst = max(worst, abs(probability - math.exp(product) / mass))
        assert result.labels.legal_mass == pytest.approx(mass, rel=1e-3, abs=1e-7)
    assert not questions, "every question came back"
    print(f"largest difference of a probability: {worst:.2e}")
    assert worst <= 1e-4


@torch.inference_mode()
def teacher_forced(model: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Log-probability (nats) of an answer after a prompt, one plain forward pass over both."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1].double()
    logprobs = torch.log_softmax(logits, dim=-1)
    return float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum())
