"""Whole engines on SGLang: a stream's logits are those of its lone prompt, by Transformers and by SGLang's own attention.

Every run starts in NaN-filled memory and refills freed pages with NaN before each step.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from askmany.engine.batch import StepBatch
from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.executor import TorchExecutor
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import StepModel
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.models import ResolvedModel
from askmany.engine.request import Document, Question, Sampling
from askmany.engine.tokenizer import TextTokenizer
from askmany.kernels.layout import MaskedBatch
from tests.engine.test_isolation import random_config, random_document, run_late_arrivals, tokens
from tests.helpers.sglang_models import DEVICE, FAMILIES, Loader, Recorder, StockAttention
from tests.helpers.torch_engines import answers, lone_logits, poisoned_engine, recording_engine

LAYOUTS = ("split", "interleaved")
TOLERANCE = 1e-4
TEXT = (
    "The lighthouse at Cape Morrow was built in 1871 by the engineer Anna Brandt. It is 43 metres tall, and its lamp burned whale oil "
    "until 1902, when it was replaced by an electric light. The keeper lived in a stone cottage beside the tower with two goats."
)
ASKED = ("Who built the lighthouse?", "How tall is the lighthouse?", "Which animals did the keeper have?", "What burned in the lamp?")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_lone_prompt(load: Loader, name: str, layout: str) -> None:
    """Random cases: documents in chunks, questions, decode rows and other documents' chunks in one step, late arrivals, page sizes."""
    loaded, model = load(name)
    stock = StockAttention(loaded)
    for seed in range(6):
        rng = random.Random(f"{name} {layout} {seed}")
        recorder = Recorder(loaded)
        instruction = tokens(rng, rng.choice([0, 1, 6]))
        documents = [random_document(rng, f"d{i}", instruction, rng.randint(1, 6)) for i in range(rng.randint(1, 3))]
        results = run_late_arrivals(poisoned_engine(recorder, random_config(rng, layout)), documents, rng)
        for document in documents:
            for question in document.questions:
                result = results[document.key, question.question_id]
                got = torch.stack(recorder.logits[document.key, question.question_id])
                wanted = lone_logits(model, document, question.question_id, result.answer_token_ids)
                torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)
                assert result.answer_token_ids == tuple(got.argmax(dim=-1).tolist())
        prompt = [token for segment in document.segments for token in segment] + list(question.token_ids)
        torch.testing.assert_close(got, stock.logits(prompt, result.answer_token_ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_answers_equal_the_transformers_engine(load: Loader, name: str, layout: str) -> None:
    rng = random.Random(name)
    documents = [random_document(rng, f"d{i}", tokens(rng, 4), 5) for i in range(3)]
    config = random_config(random.Random(7), layout, max_rows=16, step_tokens=64, kv_tokens=2048)
    loaded, model = load(name)
    theirs, _ = recording_engine(model, config)
    wanted = answers(theirs, documents)
    got = answers(poisoned_engine(loaded, config), documents)
    assert {key: result.answer_token_ids for key, result in got.items()} == {key: r.answer_token_ids for key, r in wanted.items()}
    for key, result in got.items():
        assert result.logprob == pytest.approx(wanted[key].logprob, abs=1e-3)


class _Leaking:
    """A model whose streams see their siblings."""

    def __init__(self, inner: StepModel) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def forward(self, batch: StepBatch, pool: KVPool) -> torch.Tensor:
        if not isinstance(batch.attention, MaskedBatch):  # a step of document chunks alone
            return self._inner.forward(batch, pool)
        open_to_all = replace(batch.attention, slot_sid=torch.full_like(batch.attention.slot_sid, -1))
        return self._inner.forward(replace(batch, attention=open_to_all), pool)


def test_without_the_stream_rule_the_comparison_fails(load: Loader) -> None:
    loaded, model = load("llama-gqa")
    rng = random.Random(11)
    document = random_document(rng, "d", tokens(rng, 6), 5)
    recorder = Recorder(_Leaking(loaded))  # type: ignore[arg-type]
    config = random_config(rng, "interleaved", max_rows=8, streams=8, step_tokens=256, kv_tokens=2048)
    results = answers(poisoned_engine(recorder, config), [document])
    gaps = []
    for question in document.questions:
        result = results["d", question.question_id]
        wanted = lone_logits(model, document, question.question_id, result.answer_token_ids)
        gaps.append(float((torch.stack(recorder.logits["d", question.question_id]) - wanted).abs().max()))
    assert max(gaps) > 100 * TOLERANCE


def _ask(model: StepModel, folder: ResolvedModel, layout: str) -> dict[str, str]:
    """The answers to `ASKED` about `TEXT`, greedy."""
    config = EngineConfig(layout=layout, device="cpu", dtype="float32", kv_tokens=1024)  # type: ignore[arg-type]
    pool = KVPool(model.kv_shape, config.kv_pages * config.page_size, model.device)
    tokenizer = TextTokenizer(folder.folder)
    engine = Engine(build_scheduler(config), TorchExecutor(model, pool, config.page_size), tokenizer, folder.eos_token_ids)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(tokenizer.trusted(text)).ids)

    tails = [ids(f"{text} Answer briefly.<|im_end|>\n<|im_start|>assistant\n") for text in ASKED]
    questions = tuple(Question(text, tail, Sampling(24)) for text, tail in zip(ASKED, tails, strict=True))
    engine.submit(Document("lighthouse", (ids(f"<|im_start|>user\n{TEXT}\n\n"),), questions))
    return {result.question_id: result.text for result in engine.drain()}


def test_smollm2_answers_as_through_transformers(load: Loader, smollm2: ResolvedModel) -> None:
    theirs = _ask(TransformersModel.load(smollm2.folder, DEVICE, torch.float32), smollm2, "split")
    loaded = load.open(smollm2.folder)
    assert _ask(loaded, smollm2, "split") == theirs
    assert _ask(loaded, smollm2, "interleaved") == theirs
    assert "Anna Brandt" in theirs[ASKED[0]]
