"""SGLang's layers under the kernels, interpreted: rows as static tensors with dummies, and whole steps recorded and replayed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from askmany.engine import model_probe
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import StepRows, Wanted
from askmany.engine.model_sglang import SglangModel
from askmany.engine.request import Document, Question, Sampling
from askmany.engine.step_attention import StepAttention
from askmany.kernels.rotary import launch_rotate_and_store
from tests.engine.test_isolation import tokens
from tests.engine.test_kernel_steps import config_of, same
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import CONFIGS, kernel_engine
from tests.helpers.recorded import RecordingCapturer
from tests.helpers.sglang_models import Loader
from tests.helpers.tiny_models import random_model
from tests.helpers.torch_engines import poisoned_engine


@pytest.fixture
def loaded(load: Loader, tmp_path: Path) -> SglangModel:
    folder = tmp_path / "kernels"
    random_model(CONFIGS["gqa"]).save_pretrained(folder)
    return load.open(folder)


@torch.inference_mode()
def test_wanted_rows_alone_get_logits(loaded: SglangModel) -> None:
    """Fewer wanted rows than places: the rest is any row."""
    batch = model_probe.probe_batch(loaded.vocabulary, 1)
    pool = KVPool(loaded.kv_shape, model_probe.TOKENS, loaded.device)
    attention = StepAttention.of(batch, pool, loaded.device, None)
    everything = loaded.run_rows(StepRows(batch.token_ids, batch.positions, batch.store_slots, None), attention).clone()
    lengths = torch.tensor([4, 5, 3, 0, 0], dtype=torch.int32)
    wanted = Wanted(torch.tensor([3, 8, 0, 0, 0]), lengths)
    some = loaded.run_rows(StepRows(batch.token_ids, batch.positions, batch.store_slots, wanted), attention)
    assert some.shape == (5, loaded.vocabulary)
    torch.testing.assert_close(some[:2], everything[[3, 8]], rtol=0, atol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone can be recorded")
def test_a_recorded_step_serves_other_documents(loaded: SglangModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded.rotary is not None  # so that steps rotate and store in one launch
    monkeypatch.setattr("askmany.engine.space.rotate_and_store", launch_rotate_and_store)
    monkeypatch.setattr("askmany.engine.workspaces.MIXED_ROWS", (16,))
    monkeypatch.setattr("askmany.engine.graphs.PATIENCE_FIRST", 0)  # steps with chunks and tails are recorded at once, too
    rng = random.Random(3)
    questions = tuple(Question(f"q{i}", tokens(rng, 1 + i), Sampling(2 + i)) for i in range(2))
    documents = [Document(f"d{i}", (tokens(rng, 5 + 6 * i),), questions[: 2 - i]) for i in range(2)]
    config, capturer, results = config_of("split", max_rows=4, streams=4), RecordingCapturer(), []
    engine = kernel_engine(loaded, config, capturer)
    engine.executor.steps.warm([4])  # type: ignore[attr-defined]
    for one in (engine, poisoned_engine(loaded, config)):
        for document in documents:
            one.submit(document)
        results.append({(result.document_key, result.question_id): result for result in one.drain()})
    same(*results)
    assert len(capturer.recorders) == 2
