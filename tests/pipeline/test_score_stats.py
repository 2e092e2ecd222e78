"""Intervals, class scores and calibration against sums done another way."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.pipeline.score_labels import calibration, class_counts, summed
from askmany.pipeline.score_stats import bootstrap, bootstrap_of, paired


def test_a_mean_and_its_interval() -> None:
    generator = random.Random(1)
    values = [float(generator.random() < 0.7) for _ in range(2000)]
    found = bootstrap(values, range(2000))
    error = math.sqrt(0.7 * 0.3 / 2000)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.2 * error)
    assert (found.items, found.clusters) == (2000, 2000)


def test_answers_that_agree_within_a_document_make_the_interval_wide() -> None:
    """50 documents of 40 equal answers are 50 observations, not 2,000."""
    generator = random.Random(2)
    truth = [float(generator.random() < 0.5) for _ in range(50)]
    values = [value for value in truth for _ in range(40)]
    documents = [document for document in range(50) for _ in range(40)]
    clustered, naive = bootstrap(values, documents), bootstrap(values, range(2000))
    assert (clustered.high - clustered.low) / (naive.high - naive.low) == pytest.approx(math.sqrt(40), rel=0.15)
    assert clustered.clusters == 50


def test_the_same_seed_gives_the_same_interval_and_one_document_none() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert bootstrap(values, "aabbc", seed=4) == bootstrap(values, "aabbc", seed=4)
    alone = bootstrap(values, "aaaaa")
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)
    with pytest.raises(ValueError, match="no values"):
        bootstrap([], [])


def test_a_paired_difference_is_far_surer_than_two_means() -> None:
    generator = random.Random(3)
    ours = [generator.random() for _ in range(400)]
    theirs = [value - 0.01 for value in ours]
    found = paired(ours, theirs, [i // 8 for i in range(400)])
    assert found.mean == pytest.approx(0.01)
    assert found.high - found.low < 1e-9
    assert not found.holds_zero
    assert paired(ours, ours, range(400)).holds_zero


def test_a_statistic_of_weights_is_resampled_over_clusters() -> None:
    values = np.arange(30.0)
    found = bootstrap_of(lambda weights: weights @ values / weights.sum(axis=1), 30, 30, resamples=4000)
    plain = bootstrap(values.tolist(), range(30), resamples=4000)
    assert (found.mean, found.low, found.high) == pytest.approx((plain.mean, plain.low, plain.high))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=40))
def test_class_scores_are_those_of_the_confusion_matrix(pairs: list[tuple[str, str]]) -> None:
    truths, answers = zip(*pairs, strict=True)
    whole = summed(class_counts([frozenset(t) for t in truths], [frozenset(a) for a in answers], "abc"), np.ones(len(pairs)))
    for i, label in enumerate("abc"):
        hits = sum(t == a == label for t, a in pairs)
        precision = hits / max(1, sum(a == label for _, a in pairs))
        recall = hits / max(1, sum(t == label for t, _ in pairs))
        assert whole.precision[i] == pytest.approx(precision)
        assert whole.recall[i] == pytest.approx(recall)
        assert whole.f1[i] == pytest.approx(2 * precision * recall / (precision + recall) if hits else 0)
    assert whole.micro_f1 == pytest.approx(np.mean([t == a for t, a in pairs]))
    assert whole.macro_f1 == pytest.approx(whole.f1.mean())


def test_an_answer_that_is_no_label_misses_its_class() -> None:
    whole = summed(class_counts([frozenset("a"), frozenset("a")], [frozenset("a"), frozenset()], "a"), np.ones(2))
    assert (whole.precision[0], whole.recall[0]) == (1.0, 0.5)


def test_calibration_by_hand() -> None:
    found = calibration([0.95, 0.95, 0.65, 0.05], [True, False, True, False])
    assert found.counts.tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 2]
    assert found.ece == pytest.approx((1 * 0.05 + 1 * 0.35 + 2 * 0.45) / 4)
    assert found.brier == pytest.approx((0.05**2 + 0.95**2 + 0.35**2 + 0.05**2) / 4)
    assert math.isnan(found.accuracy[3])


def test_perfect_confidence_is_perfectly_calibrated_and_borders_belong_below() -> None:
    assert calibration([1.0, 1.0], [True, True]).ece == 0
    assert calibration([0.1, 0.0, 1.0], [False, False, True]).counts.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    with pytest.raises(ValueError, match="no probability"):
        calibration([1.2], [True])
