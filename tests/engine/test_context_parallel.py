"""Engines over several processes against the single-process engine: logits, greedy streams, placement, and what is counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch

from askmany.engine.config import EngineConfig
from askmany.engine.context_parallel_build import with_group_steps
from askmany.engine.context_parallel_rows import RowPolicy, StreamPolicy
from askmany.engine.labels import label_trie
from askmany.engine.request import Document, Question, Sampling
from askmany.kernels.ring_choice import Way
from tests.helpers.gloo import GlooRanks, gloo_ranks
from tests.helpers.group_engines import GroupAnswers, GroupCase, answer_turns
from tests.helpers.tiny_models import CONFIGS, VOCABULARY, tiny_model
from tests.helpers.torch_engines import answers, recording_engine
from tests.helpers.workload import make_question

CONFIG = EngineConfig(kv_tokens=320, page_size=4, max_rows=6, step_tokens=48, prefill_chunk=40, device="cpu", dtype="float32")
WAYS: tuple[Way, ...] = ("pass_kv", "gather_kv", "pass_q", "gather_q")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda size: f"N{size}")
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with gloo_ranks(request.param) as started:
        yield started


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def document(rng: random.Random, key: str, segments: tuple[tuple[int, ...], ...], questions: int, new: int = 4) -> Document:
    asked = tuple(make_question(f"q{i}", tokens(rng, rng.randint(1, 9)), rng.randint(1, new)) for i in range(questions))
    return Document(key, segments, asked)


def two_turns(seed: int) -> tuple[tuple[Document, ...], ...]:
    """Documents below one instruction, then a follow-up that continues the first one: a partial prefill over its kept KV."""
    rng = random.Random(seed)
    instruction, long, short = tokens(rng, 5), tokens(rng, 101), tokens(rng, 1)
    first = (document(rng, "long", (instruction, long), 5), document(rng, "short", (instruction, short), 2))
    return first, (document(rng, "more", (instruction, long, tokens(rng, 23)), 3),)


def alone(case: GroupCase, size: int) -> tuple[dict[tuple[str, str], tuple[int, ...]], dict[tuple[str, str], list[torch.Tensor]]]:
    """The single-process engine's ids and logits, with as much memory as the group has."""
    config = case.config.model_copy(update={"kv_tokens": int(case.config.kv_tokens) * size})
    engine, recorder = recording_engine(tiny_model(case.model, case.seed), config)
    found = {}
    for turn in case.turns:
        found.update({key: result.answer_token_ids for key, result in answers(engine, turn).items()})
    return found, dict(recorder.logits)


def group(ranks: GlooRanks, case: GroupCase) -> GroupAnswers:
    found: GroupAnswers = ranks.run(answer_turns, case)[0]
    return found


def assert_as_alone(ranks: GlooRanks, case: GroupCase) -> GroupAnswers:
    got = group(ranks, case)
    wanted, logits = alone(case, ranks.size)
    assert {key: result.answer_token_ids for key, result in got.results.items()} == wanted
    for key, rows in logits.items():
        found = torch.stack(got.logits[key])
        assert torch.allclose(found, torch.stack(rows), rtol=1e-4, atol=1e-4), key
    return got


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llama-gqa", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_every_way_answers_as_one_process(ranks: GlooRanks, model: str, way: Way) -> None:
    case = GroupCase(model, CONFIG, two_turns(seed=1), way, RowPolicy("home"))
    got = assert_as_alone(ranks, case)
    assert getattr(got.metrics, f"sections_{way}") > 0
    assert got.metrics.prefix_hit_tokens >= 101  # the follow-up found the first turn's prefix where the ranks had left it


@pytest.mark.parametrize("streams", ["home", "rotate"])
def test_label_trees_are_scored_as_by_one_process(ranks: GlooRanks, streams: StreamPolicy) -> None:
    rng = random.Random(11)
    trie = label_trie("abcd", [(3, 5), (4, 6, 7), (4, 6, 8), (9,)], None)
    asked = tuple(Question(f"l{i}", tokens(rng, 3 + i), Sampling(1), labels=trie) for i in range(3))
    documents = (Document("d", (tokens(rng, 5), tokens(rng, 61)), (*asked, make_question("free", tokens(rng, 4), 3))),)
    got = group(ranks, GroupCase("llama-gqa", CONFIG, (documents,), "pass_kv", RowPolicy(streams))).results
    wanted = answers(recording_engine(tiny_model("llama-gqa", 0), CONFIG)[0], documents)
    assert got.keys() == wanted.keys()
    for key, result in wanted.items():
        found = got[key].labels
        assert (found is None) == (result.labels is None)
        if found is not None and result.labels is not None:
            assert found.logprobs == pytest.approx(result.labels.logprobs, abs=1e-4)


@pytest.mark.parametrize("model", ["qwen3", *(pytest.param(m, marks=pytest.mark.slow) for m in sorted(CONFIGS) if m != "qwen3")])
def test_the_rules_choice_answers_as_one_process(ranks: GlooRanks, model: str) -> None:
    got = assert_as_alone(ranks, GroupCase(model, CONFIG, two_turns(seed=2)))
    assert got.metrics.chosen_by_size > 0
    assert got.metrics.sent_bytes > 0


def test_a_single_sequence_decodes_by_turns_and_grows_evenly(ranks: GlooRanks) -> None:
    """The paper's decode: the owner of the new token rotates, so that ranks hold the same number of slots at each step, to one."""
    rng = random.Random(3)
    one = Document("one", (tokens(rng, 64),), (make_question("q", tokens(rng, 1), 19),))
    case = GroupCase("llama-gqa", replace_config(prefill_chunk=64, step_tokens=64), ((one,),), None, RowPolicy("rotate"))
    got = assert_as_alone(ranks, case)
    assert max(map(sum, got.owned)) > 64 + 16
    assert max(max(held) - min(held) for held in got.owned) <= 1


def test_streams_live_on_one_rank_and_are_spread(ranks: GlooRanks) -> None:
    """Many streams of one document: the document is spread evenly, and so are the streams."""
    rng = random.Random(4)
    many = Document("many", (tokens(rng, 80),), tuple(make_question(f"q{i}", (i + 1, 2), 6) for i in range(8)))
    config = replace_config(max_rows=8, step_tokens=80, prefill_chunk=80)
    got = assert_as_alone(ranks, GroupCase("qwen2", config, ((many,),), None, RowPolicy("home")))
    assert got.owned[0] == [80 // ranks.size] * ranks.size
    assert max(max(held) - min(held) for held in got.owned) <= 2  # two question tokens


def test_a_document_larger_than_one_ranks_pool_is_answered(ranks: GlooRanks) -> None:
    """What a group is for: 200 tokens where a rank has 64 * 4 / N places, and memory that is used over and over."""
    rng = random.Random(5)
    config = replace_config(kv_tokens=256 // ranks.size, max_rows=2)
    turns = tuple((document(rng, f"d{i}", (tokens(rng, 200),), 2),) for i in range(3))
    got = assert_as_alone(ranks, GroupCase("llama-mha", config, turns))
    assert max(max(held) for held in got.owned) <= 256 // ranks.size
    assert got.metrics.prefix_evicted_tokens >= 400


def replace_config(**values: int) -> EngineConfig:
    return CONFIG.model_copy(update=values)


def test_runs_are_bit_equal(ranks: GlooRanks) -> None:
    case = GroupCase("llama-gqa", CONFIG, two_turns(seed=6))
    first, second = (group(ranks, replace(case)) for _ in range(2))
    assert first.logits.keys() == second.logits.keys()
    for key, rows in first.logits.items():
        assert torch.equal(torch.stack(rows), torch.stack(second.logits[key]))


def test_documents_that_fit_one_rank_are_handed_over(ranks: GlooRanks) -> None:
    """Prefilled by all, answered by one: two documents end on one rank each, where their streams exchange nothing. A third, below
    the same instruction, is larger than the room that is left and stays spread."""
    rng = random.Random(7)
    instruction = tokens(rng, 6)
    documents = [
        Document(f"d{i}", (instruction, tokens(rng, n)), tuple(make_question(f"q{j}", (j + 1, i + 2), 5) for j in range(2)))
        for i, n in enumerate((30, 28, 200))
    ]
    config = replace_config(kv_tokens=208, max_rows=6, step_tokens=300, prefill_chunk=300)
    got = assert_as_alone(ranks, GroupCase("llama-gqa", config, (tuple(documents),), None, RowPolicy("auto", hand_over=True)))
    assert got.metrics.handed_over_documents == 2
    assert got.metrics.sections_local > 0
    assert got.metrics.sections_gather_q + got.metrics.sections_gather_kv > 0


def test_after_the_hand_over_nothing_travels(ranks: GlooRanks) -> None:
    """Bytes of a run whose answers are long and one whose answers are short: only logits differ."""
    rng = random.Random(8)
    prefix = tokens(rng, 40)

    def sent(new: int) -> int:
        one = Document("one", (prefix,), (make_question("q", (3, 4), new),))
        config = replace_config(step_tokens=64, prefill_chunk=64)
        got = assert_as_alone(ranks, GroupCase("qwen3", config, ((one,),), None, RowPolicy("home", hand_over=True)))
        assert got.metrics.handed_over_documents == 1
        assert got.metrics.sections_local == new
        found: int = got.metrics.sent_bytes
        return found

    assert sent(9) == sent(2)  # the leader sends no logits


@pytest.mark.parametrize(
    ("asked", "ranks", "cuda", "chunk", "step"),
    [("auto", 2, False, 2048, 2048), ("auto", 2, True, 16_384, 16_384), ("auto", 8, True, 32_768, 32_768), (700, 8, True, 700, 2048)],
)
def test_a_groups_steps_are_long_on_gpus(asked: Literal["auto"] | int, ranks: int, cuda: bool, chunk: int, step: int) -> None:
    found = with_group_steps(EngineConfig(), asked, ranks, cuda)
    assert (found.prefill_chunk, found.step_tokens) == (chunk, step)
    assert found.limits.prefill_chunk == chunk
