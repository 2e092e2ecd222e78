"""Loading a model into SGLang: what is built, what is refused, what a failure leaves behind, and which of SGLang's names we lean on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from askmany.engine.batch import StepBatch
from askmany.engine.errors import ConfigError, EngineError
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_sglang import SglangModel, StreamBackend
from askmany.engine.sglang_layers import layer_problem
from askmany.kernels.layout import PrivateItem, SplitBatch
from tests.helpers.sglang_models import DEVICE, REFUSED, Loader
from tests.helpers.sglang_seams import layer_attributes, seams, snapshot


def lone_batch(ids: list[int], start: int = 0) -> StepBatch:
    """One prompt, all of whose rows ask for logits."""
    rows = torch.arange(len(ids))
    return StepBatch(torch.tensor(ids), rows + start, rows, SplitBatch((), (PrivateItem(0, len(ids), rows),)), rows, ())


def test_a_model_is_sglangs_own_class_in_one_process(load: Loader) -> None:
    first, _ = load("llama-gqa")
    assert type(first._hosted.model).__module__ == "sglang.srt.models.llama"
    assert torch.distributed.get_world_size() == 1
    assert (first.vocabulary, first.context_tokens) == (97, 512)
    pool = KVPool(first.kv_shape, 8, DEVICE)
    with torch.inference_mode():
        before = first.forward(lone_batch([1, 2, 3]), pool).clone()
    second, _ = load("qwen3")
    assert (second.kv_shape.kv_heads, second.kv_shape.head_dim, second.kv_shape.dtype) == (2, 20, torch.float32)
    with torch.inference_mode():
        second.forward(lone_batch([1, 2, 3]), KVPool(second.kv_shape, 8, DEVICE))
        assert torch.equal(first.forward(lone_batch([1, 2, 3]), pool), before)


def test_nothing_listens_and_the_environment_stays(load: Loader) -> None:
    before = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_DISTRIBUTED")}
    loaded, _ = load("llama-mha")
    assert {name: value for name, value in os.environ.items() if name.startswith("SGLANG_DISTRIBUTED")} == before
    assert not hasattr(loaded._hosted.runner, "token_to_kv_pool") or loaded._hosted.runner.token_to_kv_pool is None


@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused(load: Loader, name: str) -> None:
    path, _ = load.folder(name)
    with pytest.raises(ConfigError, match=r"^model .* (is not supported on|cannot be loaded by) sglang [0-9.post]+: "):
        load.open(path)
    load("llama-mha")  # the process is as good as before


@pytest.mark.parametrize(("architecture", "reason"), [("NoSuchForCausalLM", "cannot be loaded"), (None, "cannot be loaded")])
def test_a_folder_that_cannot_be_loaded_is_one_line(load: Loader, tmp_path: Path, architecture: str | None, reason: str) -> None:
    path, _ = load.folder("llama-mha")
    config = json.loads((path / "config.json").read_text())
    if architecture:
        (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    else:
        (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=reason) as caught:
        load.open(path)
    assert "\n" not in str(caught.value)
    assert torch.get_default_dtype() == torch.float32
    load("qwen2")


def test_dummy_weights_need_a_config_alone(load: Loader) -> None:
    path, _ = load.folder("qwen2")
    (path / "model.safetensors").unlink()
    loaded = load.open(path, load_format="dummy")
    with torch.inference_mode():
        logits = loaded.forward(lone_batch([1, 2, 3]), KVPool(loaded.kv_shape, 8, DEVICE))
    assert logits.shape == (3, 97)
    assert torch.isfinite(logits).all()


def test_positions_beyond_the_context_are_refused(load: Loader) -> None:
    loaded, _ = load("llama-mha")
    assert loaded._hosted.rope_rows is not None
    assert loaded._hosted.rope_rows >= loaded.context_tokens
    pool = KVPool(loaded.kv_shape, 8, DEVICE)
    with torch.inference_mode():
        loaded.forward(lone_batch([1, 2], loaded.context_tokens - 2), pool)
        with pytest.raises(EngineError, match="position 512 lies beyond its context of 512 tokens"):
            loaded.forward(lone_batch([1, 2], loaded.context_tokens - 1), pool)


PLAIN = {
    "qk_head_dim": 64,
    "v_head_dim": 64,
    "logit_cap": 0.0,
    "sliding_window_size": -1,
    "is_cross_attention": False,
    "attn_type": SimpleNamespace(value="decoder"),
    "use_irope": False,
    "pos_encoding_mode": "NONE",
    "xai_temperature_len": -1,
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"sliding_window_size": 511}, None),
        ({"sliding_window_size": 510}, "a sliding window of 511 tokens (the context is 512)"),
        ({"sliding_window_size": 0}, "a sliding window of 1 tokens (the context is 512)"),
        ({"v_head_dim": 128}, "keys of 64 and values of 128"),
        ({"logit_cap": 50.0}, "scores capped at 50.0"),
        ({"is_cross_attention": True}, "more than causal self-attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "more than causal self-attention"),
        ({"use_irope": True}, "scores that change with the position"),
        ({"pos_encoding_mode": "ALIBI"}, "scores that change with the position"),
        ({"xai_temperature_len": 1024}, "scores that change with the position"),
    ],
)
def test_what_a_layer_says_of_itself_is_honoured(changed: dict[str, Any], reason: str | None) -> None:
    found = layer_problem(SimpleNamespace(**(PLAIN | changed)), 512)
    assert found == reason if reason is None else reason in str(found)


def test_a_layer_has_all_that_is_read_of_it(load: Loader) -> None:
    loaded, _ = load("llama-gqa")
    layer = loaded._hosted.attention_layers[0]
    assert layer_attributes() >= set(PLAIN) | {"layer_id", "scaling", "tp_q_head_num"}
    assert [name for name in layer_attributes() if not hasattr(layer, name)] == []


@pytest.mark.parametrize(("more", "named"), [({"sinks": torch.zeros(2)}, "sinks"), ({"k_rope": torch.zeros(2)}, "k_rope")])
def test_what_a_layer_asks_for_is_refused(more: dict[str, Any], named: str) -> None:
    layer, kv = SimpleNamespace(layer_id=3), torch.zeros(1, 1, 8)
    backend = StreamBackend(SimpleNamespace(attend=None))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"layer 3 asks for {named}"):
        backend.forward(kv[0], kv, kv, layer, None, **more)
    with pytest.raises(RuntimeError, match="keys that it stores itself"):
        backend.forward(kv[0], kv, kv, layer, None, save_kv_cache=False)


def test_sglang_absent_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("askmany.engine.model_sglang.installed_release", lambda: None)
    with pytest.raises(ConfigError, match=r"^engine\.backend sglang: the package sglang is not installed$"):
        SglangModel.load(tmp_path, DEVICE)


def test_the_seams_are_those_of_the_release(release: str) -> None:
    """Signatures of everything of SGLang's that we call. A new release fails here with the difference; write its file when understood."""
    known = snapshot(release)
    found = seams()
    assert known, f"no snapshot of release {release}:\n{json.dumps(found, indent=1)}"
    assert found == known["seams"]
