"""The real SmolLM2: questions asked together get the ids that `transformers.generate` gives to each whole prompt alone."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from askmany.engine.build import build_engine
from askmany.engine.config import EngineConfig
from askmany.engine.models import ResolvedModel
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.engine.request import Document, Question, Sampling
from tests.helpers.generate_oracle import NEAR_TIE, gap_after, generated, plain_model, prompt_of

CONTEXT_TOKENS = 8192
TEXT = (
    "The Harrow Light was lit in 1864 on the reef south of Brannoch. Its keeper, Ingrid Vasquez-Lund, logged 2,317 ships in her first "
    "year; the last keeper left in 1971. The lamp burned colza oil until 1889, then paraffin. 北の灯台 is what sailors called it."
)
QUESTIONS = ("When was the light lit?", "Who was the first keeper, and how many ships did she log?", "Which oil burned after 1889?")


def data_folder() -> Path:
    """Where the articles lie: ASKMANY_TEST_DATA, else `shared/data` beside the checkout."""
    return Path(os.environ.get("ASKMANY_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def documents_of(prompts: PromptBuilder, texts: dict[str, tuple[str, list[str]]], new_tokens: int) -> list[Document]:
    return [
        Document(key, prompts.segments(text), tuple(Question(f"q{i}", prompts.tail(q), Sampling(new_tokens)) for i, q in enumerate(asked)))
        for key, (text, asked) in texts.items()
    ]


def assert_as_alone(resolved: ResolvedModel, documents: list[Document], configs: list[EngineConfig], exceptions: int) -> None:
    """Every config's answers equal the plain model's; at most `exceptions` a config part from it, and those at a near-tie."""
    found = []
    for config in configs:
        engine = build_engine(resolved, config, CONTEXT_TOKENS)
        for document in documents:
            engine.submit(document)
        found.append({(r.document_key, r.question_id): r.answer_token_ids for r in engine.drain()})
    model = plain_model(resolved)
    parted = [0] * len(configs)
    for document in documents:
        for question in document.questions:
            prompt = prompt_of(document, question)
            wanted = generated(model, prompt, question.sampling.max_new_tokens, resolved.eos_token_ids)
            for i, answers in enumerate(found):
                got = answers[document.key, question.question_id]
                if got != wanted:
                    gap = gap_after(model, prompt, wanted, got)
                    print(f"{configs[i].layout}: {document.key} {question.question_id} parts where the largest logits are {gap:.2g} apart")
                    assert gap < NEAR_TIE
                    parted[i] += 1
    assert max(parted) <= exceptions


@pytest.mark.timeout(300)
def test_a_short_text(smollm2: ResolvedModel) -> None:
    prompts = PromptBuilder(smollm2.folder, PromptConfig())
    documents = documents_of(prompts, {"light": (TEXT, list(QUESTIONS))}, new_tokens=10)
    assert_as_alone(smollm2, documents, [EngineConfig(), EngineConfig(layout="interleaved")], exceptions=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_articles(smollm2: ResolvedModel) -> None:
    """3 articles x 8 questions in both layouts; the shortest articles, still thousands of tokens each."""
    file = data_folder() / "squad_v11_dev_articles.jsonl.gz"
    if not file.exists():
        pytest.skip(f"{file} is not there; set ASKMANY_TEST_DATA to the folder that holds it")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        articles = sorted((json.loads(line) for line in lines), key=lambda article: len(article["text"]))[:3]
    texts = {a["doc_id"]: (a["text"], [q["question"] for q in a["questions"][:8]]) for a in articles}
    documents = documents_of(PromptBuilder(smollm2.folder, PromptConfig()), texts, new_tokens=32)
    print({document.key: document.prefix_tokens for document in documents})
    assert_as_alone(smollm2, documents, [EngineConfig(), EngineConfig(layout="interleaved")], exceptions=1)
