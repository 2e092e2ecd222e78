"""Models of many families: run with our attention, or refused in one line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from askmany.engine.errors import ConfigError
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_probe import TOKENS, logits_complaint, probe_batch
from askmany.engine.model_transformers import TransformersModel
from tests.helpers.tiny_models import CONFIGS, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 12,
    "pad_token_id": 0,
}
RUN = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "gemma": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "gpt_neox": {},
    "gpt2": {},
    "smollm3": {},
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 64}, r"sliding_attention over 64 tokens \(the context is 512\)"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_attention over 64"),
    ("gemma2", {}, "softcap"),
    ("gpt_oss", {}, "s_aux"),
    ("llama4_text", {"attention_chunk_size": 128}, "chunked_attention over 128"),
    ("mamba", {}, "attention"),
    ("bloom", {}, "0 of its 2 layers are plain attention"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "rope type dynamic"),
]


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(SIZES | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.2)
    return model


@pytest.mark.parametrize(("family", "changes"), RUN.items(), ids=RUN)
def test_families_with_plain_attention_run(family: str, changes: dict[str, Any]) -> None:
    model = make_model(family, **changes)
    with torch.inference_mode():
        wanted = model(input_ids=probe_batch(97, 1).token_ids[None], use_cache=False).logits[0]
        ours = TransformersModel(model)
        pool = KVPool(ours.kv_shape, TOKENS, ours.device, poisoned=True)
        torch.testing.assert_close(ours.forward(probe_batch(97, 1), pool), wanted, rtol=0, atol=1e-4)
    assert ours.kv_shape.layers == 2
    assert not any(torch.isnan(cache).any() for cache in (*pool.k, *pool.v))


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(REFUSED)])
def test_other_attention_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"\({family}\) is not supported: .*{reason}") as refusal:
        TransformersModel(make_model(family, **changes))
    assert "\n" not in str(refusal.value)


def test_a_window_no_prompt_reaches_is_none() -> None:
    assert TransformersModel(make_model("mistral", sliding_window=64), context_tokens=64).kv_shape.head_dim == 12
    assert TransformersModel(make_model("mistral", sliding_window=512)).kv_shape.head_dim == 12


def test_experts_are_refused_in_deterministic_mode_alone() -> None:
    """Their products run over as many rows as were routed to them."""
    changes = RUN["mixtral"]
    TransformersModel(make_model("mixtral", **changes))
    with pytest.raises(ConfigError, match="do not run with deterministic mode"):
        TransformersModel(make_model("mixtral", **changes), deterministic=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_loading_from_a_folder_changes_no_logit(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    loaded = TransformersModel.load(tmp_path, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        wanted = model(input_ids=probe_batch(97, 1).token_ids[None], use_cache=False).logits[0]
        got = loaded.forward(probe_batch(97, 1), KVPool(loaded.kv_shape, TOKENS, loaded.device))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no safetensors")


def missing_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "never-heard-of"}))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("harm", [damaged_weights, missing_weights, unknown_type, no_weights], ids=lambda harm: harm.__name__)
def test_a_folder_that_cannot_be_loaded_is_one_line(harm: Callable[[Path], None], tmp_path: Path) -> None:
    tiny_model("llama-gqa").save_pretrained(tmp_path)
    harm(tmp_path)
    with pytest.raises(ConfigError, match=str(tmp_path)) as refusal:
        TransformersModel.load(tmp_path, torch.device("cpu"), torch.float32)
    assert "\n" not in str(refusal.value)


def test_sixteen_bit_weights_run_on_a_cpu(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    loaded = TransformersModel.load(tmp_path, torch.device("cpu"), torch.bfloat16)
    assert loaded.kv_shape.dtype == torch.bfloat16


def test_the_check_of_logits_sees_what_is_wrong() -> None:
    expected = torch.randn(TOKENS, 50)
    off = expected * 1.01
    last_bit = expected.clone()
    last_bit[3, 7] = torch.nextafter(last_bit[3, 7], torch.tensor(float("inf")))
    cases: list[tuple[Tensor, Tensor, bool, str | None]] = [
        (expected, expected, True, None),
        (expected, last_bit, False, None),
        (expected, last_bit, True, "deterministic"),
        (off, expected, False, "off by 0.01"),
        (expected, off, False, "off by 0.01"),
        (expected, expected * float("nan"), False, "off by nan"),
    ]
    for alone, among, deterministic, reason in cases:
        complaint = logits_complaint(expected, alone, among, torch.float32, deterministic)
        assert (complaint is None) if reason is None else (complaint is not None and reason in complaint)
    assert logits_complaint(expected, off, off, torch.bfloat16, deterministic=False) is None
    assert logits_complaint(expected, torch.randn(TOKENS, 50), expected, torch.bfloat16, deterministic=False) is not None
