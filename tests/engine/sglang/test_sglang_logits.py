"""Logits come in the dtype of their product, unless SGLang does more to them than casting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from askmany.engine import model_probe, sglang_compat
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_sglang import SglangModel
from tests.helpers.sglang_models import DEVICE, Loader


@pytest.fixture
def narrow(load: Loader) -> Iterator[SglangModel]:
    folder, _ = load.folder("qwen2")
    load.close()
    loaded = SglangModel.load(folder, DEVICE, torch.bfloat16)
    yield loaded
    loaded.close()


def logits(loaded: SglangModel) -> torch.Tensor:
    pool = KVPool(loaded.kv_shape, model_probe.TOKENS, loaded.device)
    return loaded.forward(model_probe.probe_batch(loaded.vocabulary, 1), pool).clone()


@torch.inference_mode()
def test_nothing_is_lost_without_the_cast(narrow: SglangModel) -> None:
    kept = logits(narrow)
    assert kept.dtype == torch.bfloat16
    processor = narrow._hosted.model.logits_processor
    delattr(processor, sglang_compat.CAST_OF_LOGITS)  # SGLang's own again
    widened = logits(narrow)
    assert widened.dtype == torch.float32
    assert torch.equal(kept.float(), widened)


@torch.inference_mode()
def test_capped_logits_stay_with_sglang(narrow: SglangModel) -> None:
    processor = narrow._hosted.model.logits_processor
    delattr(processor, sglang_compat.CAST_OF_LOGITS)
    processor.final_logit_softcapping = 0.5
    assert narrow._hosted.leave_logits_in_their_dtype() is None
    processor.final_logit_softcapping = None
    expected = logits(narrow)
    undo = narrow._hosted.leave_logits_in_their_dtype()
    assert undo is not None
    undo()
    assert torch.equal(logits(narrow), expected)


@torch.inference_mode()
def test_logits_that_would_change_are_left_to_sglang(narrow: SglangModel, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = narrow._hosted.model.logits_processor
    delattr(processor, sglang_compat.CAST_OF_LOGITS)
    monkeypatch.setattr(type(processor), sglang_compat.CAST_OF_LOGITS, lambda self, logits, *more, **named: logits.float() * 3)
    expected = narrow._check_logits()
    narrow._leave_logits(expected)
    assert sglang_compat.CAST_OF_LOGITS not in vars(processor)
