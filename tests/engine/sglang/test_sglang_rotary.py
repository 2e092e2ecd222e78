"""Rotation is left to our attention where it is the plain one, and to SGLang where it is not; answers are the same either way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from askmany.engine import model_probe, model_sglang
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import StepRows
from askmany.engine.model_sglang import SglangModel
from askmany.engine.sglang_rotary import Turned, own_rotary
from askmany.engine.step_attention import StepAttention
from tests.helpers.sglang_models import FAMILIES, Loader


def logits(loaded: SglangModel, unrotated: bool) -> Tensor:
    """Of the probe's rows, by SGLang's rotation or ours."""
    batch = model_probe.probe_batch(loaded.vocabulary, 1)
    pool = KVPool(loaded.kv_shape, model_probe.TOKENS, loaded.device)
    attention: Any = StepAttention.of(batch, pool, loaded.device, None)
    if unrotated:
        assert loaded.rotary is not None
        attention = Turned(loaded.rotary, batch.positions, attention)
    rows = StepRows(batch.token_ids, batch.positions, batch.store_slots, None, unrotated)
    return loaded.run_rows(rows, attention).clone()


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_leaves_its_rotation(family: str, load: Loader) -> None:
    loaded, _ = load(family)
    own, ours = logits(loaded, False), logits(loaded, True)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(loaded, False), own, rtol=0, atol=0)  # the module is as it was


@torch.inference_mode()
def test_another_kind_of_rotation_stays_with_sglang(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = load("llama-mha")
    hosted, shape, heads = loaded._hosted, loaded.kv_shape, loaded.q_heads
    module = hosted.rotary_modules[0]
    assert own_rotary(hosted, shape, heads) is not None
    theirs = module.forward
    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", lambda positions, q, k: tuple(1.01 * x for x in theirs(positions, q, k)))
        assert own_rotary(hosted, shape, heads) is None  # a scale that the table does not hold
    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", lambda positions, q, k: theirs(positions - (positions > 20).long(), q, k))
        assert own_rotary(hosted, shape, heads) is None  # angles that change far out
    assert own_rotary(hosted, replace(shape, head_dim=module.rotary_dim // 2), heads) is None


@torch.inference_mode()
def test_a_layer_that_does_not_rotate_keeps_all_with_sglang(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = load("llama-mha")
    expected = logits(loaded, False)
    layer = loaded._hosted.model.model.layers[0].self_attn
    shared = layer.rotary_emb
    del layer.rotary_emb
    layer.__dict__["rotary_emb"] = lambda positions, q, k: (q, k)
    try:
        assert loaded._left_rotary(expected) is None
    finally:
        del layer.__dict__["rotary_emb"]
        layer.rotary_emb = shared
    assert loaded._left_rotary(expected) is not None


@torch.inference_mode()
def test_without_a_rotation_of_ours_rows_come_rotated(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_sglang, "own_rotary", lambda *_: None)
    loaded, _ = load("qwen2")
    assert loaded.rotary is None
    assert logits(loaded, False).isfinite().all()
    batch = model_probe.probe_batch(loaded.vocabulary, 1)
    rows = StepRows(batch.token_ids, batch.positions, batch.store_slots, None, True)
    attention = StepAttention.of(batch, KVPool(loaded.kv_shape, model_probe.TOKENS, loaded.device), loaded.device, None)
    with pytest.raises(RuntimeError, match="turns queries and keys by itself"):
        loaded.run_rows(rows, attention)
