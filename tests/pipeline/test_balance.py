"""Guided groups: every document once, in order, within bounds, and shrinking."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.pipeline.balance import CostModel, GroupLimits, guided_groups

COSTS = st.lists(st.floats(0, 1e6, allow_nan=False), max_size=200).map(lambda costs: sorted(costs, reverse=True))


@given(COSTS, st.floats(0.1, 500), st.data())
def test_every_document_is_in_exactly_one_group_in_order(costs: list[float], speed: float, data: st.DataObject) -> None:
    records = data.draw(st.lists(st.integers(1, 50), min_size=len(costs), max_size=len(costs)))
    limits = GroupLimits(max_documents=data.draw(st.integers(1, 20)), max_records=data.draw(st.integers(1, 100)))
    runs = guided_groups(costs, records, speed, limits)
    covered = sorted(runs)
    assert [i for start, stop in covered for i in range(start, stop)] == list(range(len(costs)))
    weights = [sum(costs[start:stop]) for start, stop in runs]
    assert weights == sorted(weights, reverse=True) or np.allclose(weights, sorted(weights, reverse=True))
    for start, stop in runs:
        assert 0 < stop - start <= limits.max_documents
        assert sum(records[start:stop]) <= limits.max_records or stop - start == 1


@given(COSTS, st.floats(0.5, 64))
def test_no_group_passes_its_share_by_more_than_its_last_document(costs: list[float], speed: float) -> None:
    limits = GroupLimits()
    total = sum(costs)
    for start, stop in guided_groups(costs, [1] * len(costs), speed, limits):
        before_last = sum(costs[start : stop - 1])
        floor = max(total * limits.smallest_share / speed, limits.smallest_cost)
        assert before_last < max(total * limits.largest_share, floor) or stop - start == 1
        assert before_last < limits.largest_cost or stop - start == 1


def test_few_documents_are_a_group_each() -> None:
    assert guided_groups([5e3, 4e3, 3e3], [1, 1, 1], 1.0, GroupLimits()) == [(0, 1), (1, 2), (2, 3)]
    assert guided_groups([5.0, 4.0, 3.0], [1, 1, 1], 1.0, GroupLimits()) == [(0, 3)]
    assert guided_groups([], [], 1.0, GroupLimits()) == []


@pytest.mark.parametrize("workers", [1, 4, 64])
def test_groups_shrink_towards_the_end(workers: int) -> None:
    costs = sorted(np.random.default_rng(0).lognormal(9, 1.1, 20_000), reverse=True)
    runs = guided_groups(costs, [1] * len(costs), float(workers), GroupLimits(largest_cost=1e18, max_documents=10**9))
    weights = [sum(costs[start:stop]) for start, stop in runs]
    assert weights[-1] < weights[0] / 5
    assert weights[0] <= sum(costs) / 60 * 1.2 + costs[0]
    assert len(runs) < 2_000


def test_costs_grow_with_each_part() -> None:
    model = CostModel()
    base = model.estimate(np.array([1000.0]), np.array([100.0]))[0]
    assert model.estimate(np.array([1001.0]), np.array([100.0]))[0] > base
    assert model.estimate(np.array([1000.0]), np.array([101.0]))[0] > base
    long, short = (model.estimate(np.array([n]), np.array([0.0]))[0] for n in (64_000.0, 32_000.0))
    assert long > 2 * short
