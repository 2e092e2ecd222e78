"""Label trees through the kernels, interpreted: scores are those of the passes and of the plain model, and no step leaves the kernels.

Every run starts in NaN-filled memory and refills freed pages with NaN before each step.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.labels import LabelTrie, label_trie
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.request import Document, Question, Sampling, StreamResult
from askmany.engine.step import StepPlan, StreamRun
from askmany.kernels.plan import Chunking
from tests.engine.test_isolation import tokens
from tests.engine.test_kernel_steps import config_of, refuse_passes, same
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.kernel_engines import CONFIGS, kernel_engine, reference_chunks
from tests.helpers.tiny_models import random_model
from tests.helpers.torch_engines import Key, answers, poisoned_engine
from tests.helpers.typed_engines import sequence_logprob

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels alone run on a CPU"),
    pytest.mark.timeout(900),
]
END = 2
DETERMINISTIC = {"max_rows": 12, "streams": 6, "step_tokens": 48, "prefill_chunk": 16, "deterministic": True}
SETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "flat": ((3,), (4,), (5,)),
    "one chain": ((3, 5), (3, 6), (4,)),
    "chains": ((3, 5), (4, 6), (7, 8, 9), (10,)),
    "a trunk and shared inner tokens": ((3, 5, 6, 7), (3, 5, 8, 9), (3, 6, 9), (3, 7)),
    "beginnings of others": ((3,), (3, 5), (3, 5, 6), (4, 5)),
    "longer than a page": (tuple(range(3, 15)), (4, *range(20, 31)), (4, 21, 5)),
}


def tree(name: str) -> LabelTrie:
    return label_trie([str(ids) for ids in SETS[name]], SETS[name], END)


def documents(rng: random.Random, count: int, names: list[str]) -> list[Document]:
    """Below one instruction; trees of all kinds with free answers between them."""
    instruction, found = tokens(rng, 3), []
    for number in range(count):
        asked = []
        for i, name in enumerate(names):
            asked.append(Question(f"l{i}", tokens(rng, rng.randint(1, 9)), Sampling(1), labels=tree(name)))
            if i % 2 == number % 2:
                asked.append(Question(f"t{i}", tokens(rng, rng.randint(1, 6)), Sampling(rng.randint(2, 4))))
        found.append(Document(f"d{number}", (instruction, tokens(rng, rng.randint(12, 16) + 16 * number)), tuple(asked)))
    return found


def scored_alike(got: dict[Key, StreamResult], wanted: dict[Key, StreamResult]) -> None:
    same(got, wanted)
    for key, result in wanted.items():
        assert (got[key].labels is None) == (result.labels is None)
        if result.labels is not None:
            assert got[key].labels.logprobs == pytest.approx(result.labels.logprobs, abs=1e-4)  # type: ignore[union-attr]


def exact(model: Any, asked: list[Document], got: dict[Key, StreamResult]) -> None:
    """Every label's log-probability is the plain model's, teacher-forced."""
    for document in asked:
        for question in document.questions:
            if question.labels is None:
                continue
            prompt = [token for segment in document.segments for token in segment] + list(question.token_ids)
            ends = (END,) if question.labels.end_scored else ()
            products = [sequence_logprob(model, prompt, (*ids, *ends)) for ids in question.labels.token_ids]
            scores = got[document.key, question.question_id].labels
            assert scores is not None
            assert scores.logprobs == pytest.approx(products, abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "names", "values"),
    [
        ("mqa", [*SETS][:4], {"max_rows": 12, "streams": 5, "step_tokens": 48}),
        pytest.param("gqa", [*SETS], {"max_rows": 12, "streams": 6, "step_tokens": 48}, marks=pytest.mark.slow),
        pytest.param("gqa", [*SETS], {"max_rows": 3, "step_tokens": 7, "prefill_chunk": 5}, marks=pytest.mark.slow),
        pytest.param("gqa", [*SETS], DETERMINISTIC, marks=pytest.mark.slow),
    ],
    ids=["together", "more", "cut-to-pieces", "deterministic"],
)
def test_scores_are_those_of_the_passes_and_of_the_plain_model(shape: str, names: list[str], values: dict[str, Any]) -> None:
    """Trees, tails, decode rows and chunks of two documents in one step; whole trees and trees that several steps feed."""
    rng = random.Random(f"{shape} {values}")
    asked = documents(rng, 2, names)
    config = config_of("split", **values)
    plain = random_model(CONFIGS[shape])
    model = TransformersModel(copy.deepcopy(plain), config.deterministic)
    engine = kernel_engine(model, config, **setting(config))
    refuse_passes(engine.executor)
    kinds = watched(engine.executor)
    got = answers(engine, asked)
    assert engine.scheduler.check_integrity()
    assert any("chain" in step for step in kinds)
    assert any({"chain", "decode"} <= step for step in kinds) is not config.deterministic
    assert any({"chain", "chunk"} <= step for step in kinds) is not config.deterministic
    scored_alike(got, answers(poisoned_engine(model, config), asked))
    exact(plain, asked, got)


def setting(config: EngineConfig) -> dict[str, Any]:
    own = {"chunking": Chunking(deterministic=True)} if config.deterministic else {"chunk_pass": reference_chunks()}
    return own | {"nodes": config.max_rows + 3}  # the instruction, and one for each place of a step


def watched(executor: Any) -> list[set[str]]:
    """What rides in each step."""
    launch, kinds = executor.launch, []

    def noted(plan: StepPlan) -> Any:
        kinds.append({"chunk" for _ in plan.chunks} | {kind_of(run) for run in plan.runs})
        return launch(plan)

    executor.launch = noted
    return kinds


def kind_of(run: StreamRun) -> str:
    question = run.stream.question
    if question.labels is None:
        return "decode" if run.start >= len(question.token_ids) else "tail"
    return "chain" if run.stop > question.label_pages(8).straight else "labels"


def test_deterministic_scores_do_not_depend_on_neighbours_to_the_last_bit() -> None:
    config = config_of("split", **DETERMINISTIC)
    model = TransformersModel(random_model(CONFIGS["mqa"]), deterministic=True)
    asked = documents(random.Random(5), 2, ["a trunk and shared inner tokens"])
    together = kernel_answers(model, config, asked)
    for document in asked[:1]:
        for question in document.questions[:2]:
            alone = kernel_answers(model, config, [Document(document.key, document.segments, (question,))])
            key = document.key, question.question_id
            assert alone[key] == together[key]


def kernel_answers(model: TransformersModel, config: EngineConfig, asked: list[Document]) -> dict[Key, StreamResult]:
    engine = kernel_engine(model, config, **setting(config))
    refuse_passes(engine.executor)
    return answers(engine, asked)


def test_trees_below_paths_as_deep_as_the_kernels_go_are_left_to_the_passes() -> None:
    """A document below two parts: its tail would be a fourth prefix of the chains. Trees of one chain stay with the kernels."""
    model = TransformersModel(random_model(CONFIGS["mqa"]))
    segments = (tokens(random.Random(1), 3), tokens(random.Random(2), 4), tokens(random.Random(3), 9))
    config = config_of("split")
    for name, refused in (("one chain", True), ("chains", False)):
        document = Document("d", segments, (Question("q", (9, 8), Sampling(1), labels=tree(name)), Question("t", (7,), Sampling(2))))
        engine = kernel_engine(model, config)
        if refused:
            refuse_passes(engine.executor)
        scored_alike(answers(engine, [document]), answers(poisoned_engine(model, config), [document]))


def test_one_token_labels_go_through_the_kernels_in_the_interleaved_layout() -> None:
    model = TransformersModel(random_model(CONFIGS["mqa"]))
    config = config_of("interleaved")
    rng = random.Random(7)
    asked = documents(rng, 2, ["flat"])
    engine = kernel_engine(model, config)
    refuse_passes(engine.executor)
    scored_alike(answers(engine, asked), answers(poisoned_engine(model, config), asked))


def test_steps_with_labels_are_followed_before_they_are_read() -> None:
    """Trees cut over steps and whole ones, one-token labels and free answers: scores come home a step later, and are the same."""
    model = TransformersModel(random_model(CONFIGS["mqa"]))
    config = config_of("split", max_rows=6, streams=6, step_tokens=24)
    asked = documents(random.Random(9), 1, ["chains", "flat", "one chain"])
    executor: Any = kernel_engine(model, config, **setting(config)).executor
    refuse_passes(executor)
    scheduler = build_scheduler(config)
    executor.free_pages = scheduler.tree.pool.free_pages
    launch, ahead = executor.launch, []

    def noted(plan: StepPlan) -> Any:
        pending = launch(plan)
        ahead.append(pending.ahead)
        return pending

    executor.launch = noted
    engine = PipelinedEngine(scheduler, executor, FakeDetokenizer())
    scored_alike(answers(engine, asked), answers(poisoned_engine(model, config), asked))
    assert scheduler.check_integrity()
    assert len(ahead) > 3
    assert all(ahead)


def test_nodes_of_the_step_itself_are_not_read_before_it_stores_them() -> None:
    """A tail of one token, fed together with the chains below it: all its rows are wanted, and it must not take a decode step's graph."""
    model = TransformersModel(random_model(CONFIGS["mqa"]))
    config = config_of("split")
    engine = kernel_engine(model, config, **setting(config))
    maker: Any = engine.executor.steps._maker  # type: ignore[attr-defined]
    read, steps = maker.read, []
    maker.read = lambda plan: steps.append(read(plan)) or steps[-1]
    question = Question("q", (9,), Sampling(1), labels=tree("chains"))
    answers(engine, [Document("d", (tokens(random.Random(1), 12),), (question,))])
    step = next(step for step in steps if step.decodes and not step.settled)
    drawn = torch.zeros(config.max_rows, dtype=torch.int64)
    for bucket in maker.buckets:
        assert maker.fits(bucket, step) is not bucket.decode
        space = maker.space(bucket, maker.empty, drawn)
        assert space.layout._attention.plan.settled_nodes is bucket.decode
        if bucket.decode and bucket.rows >= step.rows:
            with pytest.raises(RuntimeError, match="keys of this very step"):
                space.load(step, [-1] * step.rows)
