"""Draws: greedy and its ties, the distribution after temperature and cuts, and randomness that depends on seed and index alone."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from askmany.engine import sampler
from askmany.engine.request import Sampling
from askmany.engine.sampler import draw, uniform

GREEDY = Sampling(1)


def cut(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution a row is drawn from, by the definitions: temperature, the k largest, the nucleus; equals stay together."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    if sampling.top_k:
        least = sorted(weights, reverse=True)[min(sampling.top_k, len(weights)) - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    total, reached, least = sum(weights), 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        reached, least = reached + weight, weight
        if reached >= sampling.top_p * total * (1 - 1e-12):
            break
    weights = [w if w >= least else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def drawn_ids(logits: Tensor, sampling: Sampling, count: int) -> list[int]:
    rows = logits.expand(count, -1)
    return [d.token_id for d in draw(rows, [sampling] * count, list(range(count)))]


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -3.0, -0.5, -2.0]])
    drawn = draw(logits, [GREEDY] * 3, [0, 0, 0])
    assert [d.token_id for d in drawn] == [1, 0, 2]
    assert [d.margin for d in drawn] == pytest.approx([0.0, 0.0, 0.5])


def test_logprob_and_margin_are_the_models_own_whatever_the_sampling() -> None:
    logits = torch.randn(1, 50)
    for sampling in (GREEDY, Sampling(1, temperature=3.0, top_k=4, top_p=0.7, seed=5)):
        (drawn,) = draw(logits, [sampling], [3])
        assert drawn.logprob == pytest.approx(float(torch.log_softmax(logits[0].double(), 0)[drawn.token_id]), abs=1e-5)
        first, second = torch.topk(logits[0], 2).values.tolist()
        assert drawn.margin == pytest.approx(first - second)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=1.0),
        Sampling(1, temperature=0.5, seed=3),
        Sampling(1, temperature=1.7, top_k=3),
        Sampling(1, temperature=1.0, top_p=0.8),
        Sampling(1, temperature=1.3, top_k=5, top_p=0.6, seed=9),
        Sampling(1, temperature=1.0, top_k=100, top_p=0.01),
    ],
    ids=str,
)
def test_draws_follow_the_cut_distribution(sampling: Sampling) -> None:
    """Chi-square over 20,000 draws; 40 is far out for at most 7 degrees of freedom, and a token that was cut is never drawn."""
    logits = [1.0, -0.5, 2.0, 0.3, 0.31, -3.0, 1.9, 0.0]
    wanted = cut(logits, sampling)
    ids = drawn_ids(torch.tensor([logits]), sampling, 20_000)
    counts = [ids.count(i) for i in range(len(logits))]
    assert all(count == 0 for count, share in zip(counts, wanted, strict=True) if share == 0)
    assert sum((c - 20_000 * p) ** 2 / (20_000 * p) for c, p in zip(counts, wanted, strict=True) if p) < 40


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 17, 700, 1500]))
def test_the_cut_is_the_definition_on_random_rows(seed: int, size: int) -> None:
    """What may be drawn, from 30 numbers of a row's own, is always in the cut; the row beside it has another cut."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits = torch.randn(size) * rng.choice([0.1, 1, 5])
    sampling = Sampling(
        1, temperature=rng.choice([0.3, 1.0, 2.0]), top_k=rng.choice([0, 1, 5]), top_p=rng.choice([1.0, 0.5, 0.9, 0.05]), seed=seed
    )
    allowed = {i for i, share in enumerate(cut(logits.double().tolist(), sampling)) if share}
    assert set(drawn_ids(logits[None], sampling, 30)) <= allowed


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(-(2**63), 2**64), index=st.integers(0, 10_000))
def test_a_draw_depends_on_its_row_seed_and_index_alone(seed: int, index: int) -> None:
    torch.manual_seed(index)
    row = torch.randn(300)
    sampling = Sampling(1, temperature=1.1, top_k=40, top_p=0.95, seed=seed)
    (alone,) = draw(row[None], [sampling], [index])
    others = [GREEDY, Sampling(1, temperature=0.2, seed=seed), Sampling(1, temperature=5.0, top_p=0.3)]
    for place in range(4):
        rows = torch.randn(4, 300)
        rows[place] = row
        samplings = [*others[:place], sampling, *others[place:]]
        assert draw(rows, samplings, [index if i == place else 7 for i in range(4)])[place] == alone


def test_numbers_are_even_and_differ_by_seed_and_by_index() -> None:
    numbers = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert len(set(numbers)) == 10_000
    assert all(0 <= x < 1 for x in numbers)
    bins = [sum(int(x * 20) == i for x in numbers) for i in range(20)]
    assert sum((b - 500) ** 2 / 500 for b in bins) < 50
    assert uniform(0, 1) != uniform(1, 0)


def test_a_flat_row_whose_nucleus_is_most_of_a_large_vocabulary() -> None:
    size = 4 * sampler.NUCLEUS_FIRST
    logits = torch.linspace(0, 0.5, size)
    ids = drawn_ids(logits[None], Sampling(1, temperature=1.0, top_p=0.75), 4000)
    shares = cut(logits.double().tolist(), Sampling(1, temperature=1.0, top_p=0.75))
    first = next(i for i, share in enumerate(shares) if share)
    assert first > sampler.NUCLEUS_FIRST // 2
    assert min(ids) >= first
    assert min(ids) < first + 20


def test_a_tiny_temperature_is_greedy_and_a_large_one_is_nearly_flat() -> None:
    logits = torch.tensor([[1.0, 1.01, 0.0]])
    assert set(drawn_ids(logits, Sampling(1, temperature=1e-6), 200)) == {1}
    assert set(drawn_ids(logits, Sampling(1, temperature=1e6), 200)) == {0, 1, 2}


def test_sixteen_bit_logits_are_judged_in_fp32() -> None:
    logits = torch.randn(1, 40).bfloat16()
    (drawn,) = draw(logits, [replace(GREEDY, temperature=0.0)], [0])
    assert drawn.logprob == pytest.approx(float(torch.log_softmax(logits[0].double(), 0)[drawn.token_id]), abs=1e-5)


def test_a_flat_row_beside_a_steep_one_leaves_it_as_it_was() -> None:
    """Rows whose nuclei lie in few tokens and in most of the vocabulary, with and without cuts, in one draw: each as alone."""
    torch.manual_seed(0)
    size = 4 * sampler.NUCLEUS_FIRST
    rows = torch.stack(
        [torch.linspace(0, 0.5, size), torch.randn(size) * 9, torch.randn(size) * 0.01, torch.randn(size) * 9, torch.randn(size)]
    )
    samplings = [
        Sampling(1, temperature=1.0, top_p=0.75, seed=1),
        Sampling(1, temperature=0.7, top_p=0.9, top_k=40, seed=2),
        Sampling(1, temperature=1.0, top_p=0.99, top_k=1000, seed=3),
        Sampling(1, temperature=1.3, seed=4),
        GREEDY,
    ]
    for index in range(20):
        together = draw(rows, samplings, [index] * 5)
        assert together == [draw(row[None], [sampling], [index])[0] for row, sampling in zip(rows, samplings, strict=True)]


def test_a_batch_is_drawn_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of operations does not grow with the rows."""
    counts = []
    for rows in (2, 40):
        calls: list[int] = []
        topk = torch.topk
        monkeypatch.setattr(torch, "topk", lambda *args, calls=calls, topk=topk, **named: calls.append(1) or topk(*args, **named))
        draw(torch.randn(rows, 900), [Sampling(1, temperature=1.0, top_k=5 + row, top_p=0.9, seed=row) for row in range(rows)], [0] * rows)
        counts.append(len(calls))
        monkeypatch.setattr(torch, "topk", topk)
    assert counts[0] == counts[1]
