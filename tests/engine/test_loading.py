"""From a model folder to an engine: what `auto` becomes, what is refused before or after loading, and an answer at the end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from askmany.engine import loading, memory
from askmany.engine.build import build_engine
from askmany.engine.choice import Expected
from askmany.engine.config import EngineConfig
from askmany.engine.errors import ConfigError
from askmany.engine.loading import load_executor
from askmany.engine.models import ResolvedModel, resolve_model
from askmany.engine.request import Document, Question, Sampling
from tests.helpers.hand_models import word_level, write_folder
from tests.helpers.tiny_models import tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> ResolvedModel:
    tiny_model("qwen3").save_pretrained(write_folder(tmp_path / "tiny", word_level()))
    return resolve_model(str(tmp_path / "tiny"))


def test_an_engine_from_a_folder_answers(tiny: ResolvedModel) -> None:
    engine = build_engine(tiny, EngineConfig(device="cpu", kv_tokens=512))
    engine.submit(Document("d", ((1, 2, 3),), (Question("q", (4, 5), Sampling(4)),)))
    (result,) = engine.drain()
    assert len(result.answer_token_ids) <= 4
    assert isinstance(result.text, str)
    assert engine.metrics.kv_bytes_read > 0


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_what_is_expected_changes_no_answer(tiny: ResolvedModel, layout: Literal["split", "interleaved"]) -> None:
    config = EngineConfig(layout=layout, device="cpu", dtype="float32", kv_tokens=512, page_size=8)
    documents = [
        Document(f"d{i}", ((1, 2, 3), (4 + i, 5, 6)), tuple(Question(f"q{j}", (7 + j, 8), Sampling(5)) for j in range(5))) for i in range(5)
    ]
    answers = []
    for expected in (None, Expected(6, 5, 2, 5, most_questions=5, streams=25)):
        engine = build_engine(tiny, config, expected=expected)
        for document in documents:
            engine.submit(document)
        answers.append({(r.document_key, r.question_id): r.answer_token_ids for r in engine.drain()})
    assert len(answers[0]) == 25
    assert answers[0] == answers[1]
    assert engine.choice is not None
    assert (engine.choice.layout, engine.choice.streams, engine.choice.rows) == (layout, 5, 25)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_auto_on_a_machine_without_a_gpu(tiny: ResolvedModel) -> None:
    executor, config = load_executor(tiny, EngineConfig(), tiny.context_tokens)
    assert (config.device, config.dtype, config.kv_tokens) == ("cpu", "float32", memory.USEFUL_TOKENS)
    assert executor.pool.slots == memory.USEFUL_TOKENS
    assert executor.pool.shape.head_dim == 20
    with pytest.raises(ConfigError, match=r"engine\.device cuda: PyTorch sees no CUDA device"):
        load_executor(tiny, EngineConfig(device="cuda"), 100)


def test_what_the_user_set_stays(tiny: ResolvedModel) -> None:
    executor, config = load_executor(tiny, EngineConfig(device="cpu", dtype="bfloat16", kv_tokens=100, page_size=8), tiny.context_tokens)
    assert (config.dtype, config.kv_tokens, executor.pool.slots) == ("bfloat16", 100, 96)
    assert executor.pool.k[0].dtype == torch.bfloat16


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tiny: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_bytes = (tiny.folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(memory, "free_bytes", lambda device: weight_bytes - 1)
    with pytest.raises(ConfigError, match="its weights take"):
        load_executor(tiny, EngineConfig(device="cpu"), 100)
    monkeypatch.setattr(memory, "free_bytes", lambda device: weight_bytes // 2 + 1)
    with pytest.raises(ConfigError, match="KV for a context of 100 tokens"):
        load_executor(tiny, EngineConfig(device="cpu", dtype="bfloat16"), 100)


def test_a_pool_that_does_not_fit_is_refused(tiny: ResolvedModel) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens 1000000000000"):
        load_executor(tiny, EngineConfig(device="cpu", kv_tokens=10**12), 100)


class _Refusing:
    """Stands in for `SglangModel`: refuses every model."""

    asked: list[Path]

    @classmethod
    def load(cls, folder: Path, *arguments: object, **named: object) -> None:
        cls.asked.append(folder)
        raise ConfigError(f"model {folder} is not supported on sglang 0.5.23: its attention asks for sinks")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> type[_Refusing]:
    """SGLang, installed, on what counts as a GPU."""
    _Refusing.asked = []
    monkeypatch.setattr(loading, "SglangModel", _Refusing)
    monkeypatch.setattr(loading, "installed_release", lambda: "0.5.23")
    return _Refusing


def test_sglang_is_taken_when_named_and_its_refusal_is_final(tiny: ResolvedModel, refusing: type[_Refusing]) -> None:
    with pytest.raises(ConfigError, match="asks for sinks"):
        load_executor(tiny, EngineConfig(backend="sglang", device="cpu"), 64)
    assert refusing.asked == [tiny.folder]


def test_auto_takes_sglang_on_a_gpu_alone(tiny: ResolvedModel, refusing: type[_Refusing]) -> None:
    load_executor(tiny, EngineConfig(device="cpu"), 64)
    assert refusing.asked == []
    assert loading._prefers_sglang(torch.device("cuda"))
    assert not loading._prefers_sglang(torch.device("cpu"))


def test_auto_falls_back_with_a_warning(
    tiny: ResolvedModel, refusing: type[_Refusing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "_prefers_sglang", lambda device: True)
    executor, _ = load_executor(tiny, EngineConfig(device="cpu"), 64)
    assert refusing.asked == [tiny.folder]
    assert type(executor.model).__name__ == "TransformersModel"
    assert "asks for sinks; Transformers runs it instead" in caplog.text


def test_sglang_that_is_not_installed_is_refused(tiny: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("askmany.engine.model_sglang.installed_release", lambda: None)
    with pytest.raises(ConfigError, match=r"^engine\.backend sglang: the package sglang is not installed$"):
        load_executor(tiny, EngineConfig(backend="sglang", device="cpu"), 64)


def test_deterministic_mode_is_not_sglangs_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="deterministic on a CPU needs backend transformers, the backend is sglang"):
        EngineConfig(backend="sglang", deterministic=True, device="cpu")
    assert EngineConfig(backend="sglang", deterministic=True, device="cuda").deterministic


def test_deterministic_mode_on_a_gpu_is_the_split_layouts() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.raises(ConfigError, match="on a GPU it needs layout split, the layout is interleaved"):
        loading.check_deterministic(EngineConfig(layout="interleaved", deterministic=True), cuda)
    loading.check_deterministic(EngineConfig(layout="interleaved", deterministic=True), cpu)
    loading.check_deterministic(EngineConfig(layout="interleaved"), cuda)
    loading.check_deterministic(EngineConfig(deterministic=True), cuda)


@pytest.mark.parametrize(
    ("packed", "values", "device", "said"),
    [
        ("gptq", {}, "cuda", "weights packed as 'gptq' are not supported (fp8, awq are, by SGLang on a GPU)"),
        ("fp8", {}, "cpu", "weights packed as 'fp8' need engine.backend sglang on a GPU, the device is cpu"),
        ("awq", {"backend": "transformers"}, "cuda", "weights packed as 'awq' need engine.backend sglang on a GPU"),
        ("awq", {"deterministic": True}, "cuda", "deterministic needs plain weights, these are packed as 'awq'"),
    ],
)
def test_packed_weights_run_where_sglang_runs_them(
    tiny: ResolvedModel, monkeypatch: pytest.MonkeyPatch, packed: str, values: dict[str, Any], device: str, said: str
) -> None:
    monkeypatch.setattr(loading, "installed_release", lambda: "0.5.23")
    with pytest.raises(ConfigError, match=re.escape(said)):
        loading.check_quantization(replace(tiny, quantization=packed), EngineConfig(**values), torch.device(device))
    loading.check_quantization(replace(tiny, quantization="fp8"), EngineConfig(), torch.device("cuda"))
    loading.check_quantization(tiny, EngineConfig(deterministic=True), torch.device(device))


def test_a_checkpoint_says_how_it_is_packed(tiny: ResolvedModel) -> None:
    assert tiny.quantization is None
    config = json.loads((tiny.folder / "config.json").read_text())
    (tiny.folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "AWQ", "bits": 4}}))
    assert resolve_model(str(tiny.folder)).quantization == "awq"
    with pytest.raises(ConfigError, match=r"packed as 'awq' need engine\.backend sglang on a GPU, the device is cpu"):
        load_executor(resolve_model(str(tiny.folder)), EngineConfig(device="cpu"), 64)
