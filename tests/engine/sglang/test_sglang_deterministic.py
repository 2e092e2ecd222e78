"""Deterministic mode through SGLang's layers: a question's answer and log-probability are the same bits for any P, order and neighbours."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from askmany.engine.config import EngineConfig
from askmany.engine.errors import ConfigError
from askmany.engine.invariant_rows import BLOCK, multiply
from askmany.engine.model_sglang import SglangModel
from askmany.engine.request import Document, Question, Sampling, StreamResult
from askmany.kernels.plan import Chunking
from tests.engine.test_isolation import tokens
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import CONFIGS, kernel_engine
from tests.helpers.sglang_models import DEVICE, FAMILIES, Loader
from tests.helpers.tiny_models import random_model
from tests.helpers.torch_engines import Key, answers, poisoned_engine


def config_of(**values: Any) -> EngineConfig:
    standing = {"deterministic": True, "device": "cpu", "dtype": "float32", "page_size": 16, "kv_tokens": 4096, "max_rows": 24}
    return EngineConfig(**(standing | {"step_tokens": 64, "prefill_chunk": 32, "tail_piece": 8} | values))


def documents(questions: int = 16, most_tokens: int = 8) -> tuple[Document, Document]:
    """One to look at, one beside it."""
    rng = random.Random(2)

    def drawn(key: str, count: int) -> Document:
        asked = (Question(f"q{i}", tokens(rng, rng.randint(1, 20)), Sampling(rng.randint(2, most_tokens))) for i in range(count))
        return Document(key, (tokens(rng, rng.randint(70, 90)),), tuple(asked))

    return drawn("d", questions), drawn("beside", 7)


def of(key: str, found: dict[Key, StreamResult]) -> dict[Key, StreamResult]:
    return {one: result for one, result in found.items() if one[0] == key}


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3"])  # a CPU's GELU, gemma's, rounds by an element's place
def test_answers_are_bitwise_whatever_rides_along(load: Loader, name: str) -> None:
    folder, _ = load.folder(name)
    loaded, (watched, beside) = load.open(folder, deterministic=True), documents()
    wanted = answers(poisoned_engine(loaded, config_of(streams=16)), [watched])
    assert len({result.answer_token_ids for result in wanted.values()}) > 8
    for streams in (1, 7, 16):
        config = config_of(streams=streams)
        assert of("d", answers(poisoned_engine(loaded, config), [beside, watched])) == wanted
    backwards = Document("d", watched.segments, watched.questions[::-1])
    assert answers(poisoned_engine(loaded, config_of(streams=7)), [backwards]) == wanted


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels need a GPU")
def test_answers_through_the_kernels_are_bitwise_too(load: Loader, tmp_path: Path) -> None:
    random_model(CONFIGS["gqa"]).save_pretrained(tmp_path / "kernels")
    loaded, rng = load.open(tmp_path / "kernels", deterministic=True), random.Random(5)
    watched, beside = (
        Document(key, (tokens(rng, 20),), tuple(Question(f"q{i}", tokens(rng, 3), Sampling(2)) for i in range(2)))
        for key in ("d", "beside")
    )

    def answered(streams: int, *asked: Document) -> dict[Key, StreamResult]:
        config = config_of(streams=streams, max_rows=4, step_tokens=20, prefill_chunk=20, kv_tokens=256)
        return of("d", answers(kernel_engine(loaded, config, context=64, chunking=Chunking(deterministic=True)), asked))

    assert answered(1, watched) == answered(2, beside, watched)


def test_every_product_of_the_layers_is_seen(load: Loader) -> None:
    """Queries with keys and values, output, gate with up, down, and the output layer; whatever the step, in whole blocks."""
    folder, _ = load.folder("qwen2")
    loaded = load.open(folder, deterministic=True)
    assert loaded._alone is not None
    assert loaded._alone.slow == set()
    seen: list[tuple[int, ...]] = []

    def noting(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        seen.append((*rows.shape, weight.shape[1]))
        multiply(rows, weight, bias, out)

    loaded._alone.by_library = noting
    answers(poisoned_engine(loaded, config_of()), documents(2))
    assert {rows for rows, _, _ in seen} == {BLOCK}
    config, shapes = FAMILIES["qwen2"], {(k, n) for _, k, n in seen}
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    (inner,) = {k for k, n in shapes if n == hidden} - {hidden}  # padded on a CPU
    projected = hidden // heads * (heads + 2 * kv_heads)
    assert shapes > {(hidden, projected), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)}
    assert len(shapes) == 5


def test_the_process_is_left_as_it_was(load: Loader) -> None:
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    folder, _ = load.folder("llama-gqa")
    deterministic = load.open(folder, deterministic=True)
    answers(poisoned_engine(deterministic, config_of()), documents(2))
    assert not is_batch_invariant_mode_enabled()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert load.open(folder)._alone is None


def test_experts_are_refused(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = load.folder("llama-gqa")
    monkeypatch.setattr("askmany.engine.model_probe.experts", lambda config: 8)
    with pytest.raises(ConfigError, match="its experts do not run with deterministic mode"):
        load.open(folder, deterministic=True)


def test_rows_that_are_not_by_themselves_are_refused(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.activation import SiluAndMul

    forward = SiluAndMul.forward_native
    monkeypatch.setattr(SiluAndMul, "forward_native", lambda self, x: forward(self, x) * (1 + 1e-6 * len(x)))
    folder, _ = load.folder("llama-gqa")
    with pytest.raises(ConfigError, match="does not make its logits independent of the rows around them"):
        load.open(folder, deterministic=True)


def test_it_runs_in_bf16(load: Loader) -> None:
    folder, _ = load.folder("qwen3")
    loaded = SglangModel.load(folder, DEVICE, torch.bfloat16, deterministic=True)
    try:
        watched, beside = documents(8)
        wanted = answers(poisoned_engine(loaded, config_of(streams=8, dtype="bfloat16")), [watched])
        among = answers(poisoned_engine(loaded, config_of(streams=3, dtype="bfloat16")), [beside, watched])
        assert of("d", among) == wanted
    finally:
        loaded.close()
