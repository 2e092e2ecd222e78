"""The real SmolLM2 over 2 and 4 processes: the logits and the greedy answers of one process."""

from __future__ import annotations

import pytest
import torch

from askmany.engine.build import build_engine
from askmany.engine.config import EngineConfig
from askmany.engine.models import ResolvedModel
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.engine.request import Document, Question, Sampling, StreamResult
from tests.engine.test_generate_oracle import QUESTIONS, TEXT
from tests.helpers.gloo import gloo_ranks
from tests.helpers.group_engines import answer_with_smollm2

CONFIG = EngineConfig(kv_tokens=1024, max_rows=8, step_tokens=256, prefill_chunk=256, device="cpu")


def smollm2_documents(folder: object) -> tuple[Document, ...]:
    prompts = PromptBuilder(folder, PromptConfig())  # type: ignore[arg-type]
    asked = tuple(Question(f"q{i}", prompts.tail(question), Sampling(12)) for i, question in enumerate(QUESTIONS))
    texts = {"light": TEXT * 6, "short": TEXT[:200]}
    return tuple(Document(key, prompts.segments(text), asked) for key, text in texts.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
def test_smollm2_answers_as_one_process(smollm2: ResolvedModel, size: int) -> None:
    documents = smollm2_documents(smollm2.folder)
    engine = build_engine(smollm2, CONFIG.model_copy(update={"kv_tokens": 1024 * size}), 1024)
    logits: dict[tuple[str, str], list[torch.Tensor]] = {}
    model = engine.executor.model  # type: ignore[attr-defined]
    forward = model.forward

    def recorded(batch: object, pool: object) -> torch.Tensor:
        found: torch.Tensor = forward(batch, pool)
        for stream, row in zip(batch.sampled_streams, found, strict=False):  # type: ignore[attr-defined]
            logits.setdefault((stream.document.document.key, stream.question.question_id), []).append(row.clone())
        return found

    model.forward = recorded
    wanted: dict[tuple[str, str], StreamResult] = {}
    for document in documents:
        engine.submit(document)
    wanted.update({(r.document_key, r.question_id): r for r in engine.drain()})
    with gloo_ranks(size) as ranks:
        got = ranks.run(answer_with_smollm2, smollm2, documents, CONFIG)[0]
    assert {key: r.text for key, r in got.results.items()} == {key: r.text for key, r in wanted.items()}
    assert {key: r.answer_token_ids for key, r in got.results.items()} == {key: r.answer_token_ids for key, r in wanted.items()}
    worst = max(float((torch.stack(got.logits[key]) - torch.stack(rows)).abs().max()) for key, rows in logits.items())
    print(f"N={size}: {len(wanted)} answers, largest difference of a logit {worst:.2g}")
    assert worst < 1e-3
