"""The oracle itself, against answers worked out by hand, and the sample of cases it judges."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from askmany.kernels import reference
from askmany.kernels.oracle import EVERYONE, Tokens, dense_attention, lse_error, relative_error, visible_by_rule
from tests.helpers.attention_cases import FACTORS, SMALL_FACTORS, Case, cases, id_of, split_world
from tests.helpers.covering import pairs_in, pairwise


def _tokens(*entries: tuple[int, int, int, int]) -> Tokens:
    return Tokens(*torch.tensor(entries).T)


def test_the_rule_by_hand() -> None:
    """An instruction, a document with a group, two streams, and another document's stream."""
    keys = _tokens((-1, -1, -1, 0), (0, -1, -1, 1), (0, 5, -1, 2), (0, 5, 7, 3), (0, 5, 8, 3), (1, -1, -1, 1), (1, -1, 9, 2))
    queries = _tokens((0, 5, 7, 3), (0, 5, 8, 2), (1, -1, 9, 2), (0, 6, 4, 9), (0, -1, -1, 1))
    assert visible_by_rule(queries, keys).int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],  # causal: its own token at position 3 lies ahead
        [1, 0, 0, 0, 0, 1, 1],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],  # a row of the document itself
    ]
    assert EVERYONE == -1


def test_dense_attention_by_hand() -> None:
    q = torch.tensor([[[1.0], [2.0]], [[1.0], [1.0]]])  # 2 rows, 2 heads, D = 1
    k, v = torch.tensor([[[0.0]], [[math.log(3.0)]]]), torch.tensor([[[10.0]], [[20.0]]])
    out, lse = dense_attention(q, k, v, torch.tensor([[True, True], [False, False]]), 1.0)
    assert out[0, :, 0].tolist() == pytest.approx([(10 + 3 * 20) / 4, (10 + 9 * 20) / 10])
    assert lse[0].tolist() == pytest.approx([math.log(4.0), math.log(10.0)])
    assert out[1].tolist() == [[0.0], [0.0]]
    assert bool(torch.isneginf(lse[1]).all())


def test_errors_see_what_they_must() -> None:
    one = torch.ones(4)
    assert relative_error(one, one) == 0.0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(one * 1.01, one) == pytest.approx(0.01)
    assert not relative_error(torch.tensor([float("nan"), 1.0]), torch.ones(2)) < 1e9
    assert lse_error(torch.tensor([float("-inf")]), torch.tensor([1.0])) == math.inf
    assert lse_error(torch.tensor([0.0]), torch.tensor([float("-inf")])) == math.inf
    assert lse_error(torch.tensor([float("-inf"), 100.1]), torch.tensor([float("-inf"), 100.0])) == pytest.approx(1e-3, rel=1e-3)
    assert not lse_error(torch.tensor([float("nan")]), torch.tensor([1.0])) < 1e9


@pytest.mark.parametrize("case", cases(SMALL_FACTORS, seed=5, at_least=0, limit_values=2**22), ids=id_of)
def test_reference_agrees_with_the_oracle_on_the_split_layout(case: Case) -> None:
    world, batch = split_world(case, seed=len(str(case)), device="cpu")
    out, lse = reference.split_attention(world.q.double(), world.k_cache.double(), world.v_cache.double(), batch, case.scale)
    want, want_lse = world.truth()
    assert relative_error(out, want) < 1e-12
    assert lse_error(lse, want_lse) < 1e-12
    assert not bool(out[~world.live].any())


def test_the_sample_covers_every_pair() -> None:
    """At least 400 cases, each different, in which every pair of values of every two factors meets."""
    sample = cases(FACTORS, seed=2025, at_least=400, limit_values=2**28)
    assert len({str(case) for case in sample}) == len(sample) >= 400
    met = set().union(*(pairs_in({name: getattr(case, name) for name in FACTORS}) for case in sample))
    names = sorted(FACTORS)
    wanted = {(a, x, b, y) for a, b in product(names, names) if a < b for x, y in product(FACTORS[a], FACTORS[b])}
    assert wanted - met == set()


def test_impossible_pairs_are_left_out() -> None:
    chosen = pairwise({"a": (1, 2), "b": (1, 2), "c": (0,)}, lambda c: c["a"] != c["b"], seed=0)
    assert sorted((c["a"], c["b"]) for c in chosen) == [(1, 2), (2, 1)]
