"""Rotation is left to our attention where it is the plain one, and to SGLang where it is not; answers are the same either way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from askmany.engine import model_probe, model_sglang, sglang_rotary
from askmany.engine.kv_pool import KVPool, KVShape
from askmany.engine.model import StepRows
from askmany.engine.model_sglang import SglangModel
from askmany.engine.sglang_rotary import own_rotary, turned_and_stored
from askmany.engine.step_attention import LayerAttention, StepAttention
from askmany.kernels.rotary import Rotary, rotate
from tests.helpers.sglang_models import FAMILIES, Loader

SHAPE = KVShape(1, 2, 16, torch.float32)


class Rotating:
    """Turns as steps do, then attends."""

    def __init__(self, rotary: Rotary, positions: Tensor, inner: LayerAttention) -> None:
        self._rotary, self._positions, self._inner = rotary, positions, inner

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._inner.attend(layer, *turned_and_stored(q, k, v, self._positions, self._rotary), scale)


class Stub(nn.Module):
    """A rotary module that turns as told by `rotary`, and says of itself whether pairs are halves."""

    def __init__(self, rotary: Rotary, halves: bool) -> None:
        super().__init__()
        self.cos_sin_cache, self.rotary, self.is_neox_style = rotary.table, rotary, halves

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (rotate(x.unflatten(1, (-1, SHAPE.head_dim)), positions, self.rotary).flatten(1) for x in (q, k))
        return q, k


def stub(width: int = 16, interleaved: bool = False, halves: bool | None = None) -> Stub:
    angles = torch.arange(64)[:, None] / 10 ** (4 * torch.arange(0, width, 2) / width)[None]
    rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1), interleaved)
    return Stub(rotary, not interleaved if halves is None else halves)


def found(*modules: nn.Module) -> Any:
    return own_rotary(SimpleNamespace(rotary_modules=list(modules)), SHAPE, q_heads=6)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_both_kinds_of_pairs_and_partial_widths_are_known(width: int, interleaved: bool) -> None:
    own = found(stub(width, interleaved))
    assert own is not None
    assert (own.rotary.width, own.rotary.interleaved) == (width, interleaved)


def test_what_turns_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() is None
    assert found(stub(), stub()) is None
    assert found(stub(interleaved=True, halves=True)) is None
    assert found(stub(width=32)) is None  # wider than a head
    scaled = stub()
    scaled.rotary = Rotary(scaled.rotary.table * 1.01)
    assert found(scaled) is None
    far = stub()
    far.cos_sin_cache = torch.cat([far.cos_sin_cache[:-1], far.cos_sin_cache[:1]])
    assert found(far) is None  # angles that differ far out
    monkeypatch.setattr(sglang_rotary, "rotate_and_store", lambda q, k, v, positions, rotary, k_cache, v_cache, slots: k_cache.copy_(k))
    assert found(stub()) is None  # our own launch that does not turn


def logits(loaded: SglangModel, unrotated: bool) -> Tensor:
    """Of the probe's rows, by SGLang's rotation or ours."""
    batch = model_probe.probe_batch(loaded.vocabulary, 1)
    pool = KVPool(loaded.kv_shape, model_probe.TOKENS, loaded.device)
    attention: Any = StepAttention.of(batch, pool, loaded.device, None)
    if unrotated:
        assert loaded.rotary is not None
        attention = Rotating(loaded.rotary, batch.positions, attention)
    rows = StepRows(batch.token_ids, batch.positions, batch.store_slots, None, unrotated)
    return loaded.run_rows(rows, attention).clone()


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_leaves_its_rotation(family: str, load: Loader) -> None:
    loaded, _ = load(family)
    own, ours = logits(loaded, False), logits(loaded, True)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(loaded, False), own, rtol=0, atol=0)  # the module is as it was


def elsewhere(rotary: Any) -> Any:
    return lambda positions, q, k: rotary(positions + 1, q, k)


def scaled_after(rotary: Any) -> Any:
    return lambda positions, q, k: tuple(1.001 * x for x in rotary(positions, q, k))


def offset(rotary: Any) -> Any:
    return lambda positions, q, k: rotary(positions, q, k, torch.zeros_like(positions))


def twice(rotary: Any) -> Any:
    return lambda positions, q, k: rotary(positions, *rotary(positions, q, k))


def never(rotary: Any) -> Any:
    return lambda positions, q, k: (q, k)


@torch.inference_mode()
@pytest.mark.parametrize("asking", [elsewhere, scaled_after, offset, twice, never], ids=lambda asking: asking.__name__)
def test_a_layer_that_asks_otherwise_keeps_all_with_sglang(asking: Any, load: Loader) -> None:
    """One of two layers is enough, however little it changes the logits."""
    loaded, _ = load("llama-mha")
    expected = loaded._check_logits()
    layer = loaded._hosted.model.model.layers[1].self_attn
    shared = layer.rotary_emb
    del layer.rotary_emb
    layer.__dict__["rotary_emb"] = asking(shared)
    try:
        assert loaded._left_rotary(expected) is None
    finally:
        del layer.__dict__["rotary_emb"]
        layer.rotary_emb = shared
    assert loaded._left_rotary(expected) is not None
    assert loaded._left_rotary(expected.flip(-1)) is None  # logits that come out otherwise


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
