"""Weights laid out anew compute the same; row blocks make a row's bits its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from askmany.engine.model_surgery import ROWS, RowBlocks, in_row_blocks, lay_out_weights
from tests.helpers.tiny_models import tiny_model


def test_laid_out_weights_keep_values_shapes_and_ties() -> None:
    model = tiny_model("qwen2")
    model.lm_head.weight = model.model.embed_tokens.weight  # tied
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    lay_out_weights(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_contiguous()
    assert model.model.layers[0].mlp.up_proj.weight.stride() == (1, 80)


@pytest.mark.parametrize("count", [0, 1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
@pytest.mark.parametrize("inner", [nn.Linear(24, 70), nn.LayerNorm(24), nn.SiLU()], ids=lambda inner: type(inner).__name__)
def test_row_blocks_compute_the_same(inner: nn.Module, count: int) -> None:
    x = torch.randn(1, count, 24)
    torch.testing.assert_close(RowBlocks(inner, ROWS)(x), inner(x))


def test_a_row_has_the_same_bits_in_every_place_of_every_size() -> None:
    torch.manual_seed(1)
    layers = [(RowBlocks(nn.Linear(48, 100), ROWS), 48), (RowBlocks(nn.LayerNorm(61), ROWS), 61), (RowBlocks(nn.SiLU(), 1), 61)]
    with torch.inference_mode():
        for layer, width in layers:
            row, seen = torch.randn(width), []
            for count in (1, 2, 31, 33, 70):
                for place in {0, count // 2, count - 1}:
                    x = torch.randn(1, count, width)
                    x[0, place] = row
                    seen.append(layer(x)[0, place])
            assert all(torch.equal(result, seen[0]) for result in seen)


def test_every_layer_that_computes_is_wrapped_once() -> None:
    model = tiny_model("qwen3")
    in_row_blocks(model)
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, RowBlocks)}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert all(name.endswith(".inner") and name.removesuffix(".inner") in wrapped for name in linear)
    assert not any(isinstance(module.inner, (RowBlocks, nn.Embedding)) for module in wrapped.values())
    assert wrapped["model.layers.0.mlp.act_fn"].rows == 1
    assert {"lm_head", "model.norm", "model.layers.0.self_attn.q_norm", "model.layers.1.mlp.down_proj"} <= wrapped.keys()
