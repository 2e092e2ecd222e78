"""Grammars on a device with kernels, interpreted: the pipelined engine runs ahead, and its answers are those of the passes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from askmany.engine.build import build_scheduler
from askmany.engine.constraints import Constraints
from askmany.engine.engine import Engine
from askmany.engine.labels import label_trie
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.request import Document, Question, Sampling, StreamResult
from tests.engine.test_kernel_steps import config_of
from tests.engine.test_typed_answers import CHOICE, WHOLE, asked
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import kernel_steps
from tests.helpers.tiny_models import random_model
from tests.helpers.torch_engines import PoisoningExecutor
from tests.helpers.typed_engines import END, PIECES, PieceDetokenizer, compiler, spell

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone run on a CPU"),
    pytest.mark.timeout(300),
]
SMALL = LlamaConfig(
    vocab_size=len(PIECES), hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1,
    max_position_embeddings=512,
)  # fmt: skip


class CountingExecutor(PoisoningExecutor):
    """Notes which steps ran ahead."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.ahead: list[bool] = []

    def launch(self, plan: Any) -> Any:
        pending = super().launch(plan)
        self.ahead.append(pending.ahead)
        return pending


def typed(model: TransformersModel, layout: str, kernels: bool) -> Engine:
    from askmany.engine.kv_pool import KVPool

    config = config_of(layout, streams=4)
    scheduler = build_scheduler(config)
    pool = KVPool(model.kv_shape, config.kv_pages * config.page_size, model.device, poisoned=True)
    steps = kernel_steps(model, pool, config) if kernels else None
    executor = CountingExecutor(model, pool, config.page_size, Constraints(compiler), steps)
    executor.free_pages = scheduler.tree.pool.free_pages
    return (PipelinedEngine if kernels else Engine)(scheduler, executor, PieceDetokenizer(), [END])  # type: ignore[arg-type]


def run(engine: Engine, questions: list[Question]) -> dict[str, StreamResult]:
    engine.submit(Document("d", (spell("Read this."), spell("It rose in 1973.")), tuple(questions)))
    return {result.question_id: result for result in engine.drain()}


def same(got: dict[str, StreamResult], wanted: dict[str, StreamResult]) -> None:
    assert got.keys() == wanted.keys()
    for name, result in got.items():
        assert (result.answer_token_ids, result.finish_reason) == (wanted[name].answer_token_ids, wanted[name].finish_reason), name
        assert result.logprob == pytest.approx(wanted[name].logprob, abs=1e-3)
        assert result.margin == pytest.approx(wanted[name].margin, abs=1e-3)


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_steps_under_grammars_run_ahead_and_answer_as_the_passes_do(layout: str) -> None:
    """Answers of other lengths end while others go on; a free one beside them; every step may be followed before it is read."""
    torch.manual_seed(3)
    model = TransformersModel(random_model(SMALL))
    questions = [asked(f"q{i}", kind, " Q?"[: 1 + i % 3], max_new_tokens=6) for i, kind in enumerate([CHOICE, WHOLE, None, CHOICE, WHOLE])]
    engine = typed(model, layout, kernels=True)
    got = run(engine, questions)
    same(got, run(typed(model, layout, kernels=False), questions))
    assert len({result.answer_token_ids for result in got.values()}) > 2
    assert any(len(result.answer_token_ids) < 6 for result in got.values())
    executor = engine.executor
    assert isinstance(executor, CountingExecutor)
    assert all(executor.ahead)
    assert executor.steps is not None
    assert executor.steps.held_steps > 4
    assert not executor._constraints._held  # type: ignore[union-attr]


def test_what_the_host_draws_beside_grammars_is_what_the_passes_draw() -> None:
    """Temperatures, with and without a grammar, and a tree of labels that the passes run, between steps that run ahead."""
    torch.manual_seed(4)
    model = TransformersModel(random_model(SMALL))
    labels = ("yes", "no", "not stated")
    rng = random.Random(2)
    questions = [
        asked("choice", CHOICE, " Q?", max_new_tokens=5),
        asked("hot", WHOLE, " A", max_new_tokens=3, temperature=1.2, seed=rng.randrange(100)),
        asked("whole", WHOLE, " B", max_new_tokens=5),
        Question("tree", spell(" C"), Sampling(1), labels=label_trie(labels, [spell(label) for label in labels], END)),
        asked("free", None, " D", max_new_tokens=3, temperature=0.8, seed=7),
    ]
    engine = typed(model, "split", kernels=True)
    same(run(engine, questions), run(typed(model, "split", kernels=False), questions))
    assert set(engine.executor.ahead) == {True, False}  # type: ignore[attr-defined]
