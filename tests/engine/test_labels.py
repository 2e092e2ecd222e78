"""Label tries and the arithmetic of label distributions, against sums over the labels one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.labels import LabelTrie, label_scores, label_trie

LABELS = ("yes", "no", "not stated", "not sure")
IDS = ((5,), (6,), (7, 8), (7, 9))


def scores_of(trie: LabelTrie, probability: dict[tuple[int, ...], float]) -> list[float]:
    """The log-probabilities a trie asks for, from each token's probability given the label tokens before it."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(len(trie.feed)):
        paths[node + 1] = tuple(trie.feed[i] for i in trie.path(node))
    return [math.log(probability[(*paths[row], token)]) for row, token in trie.asks]


def test_a_shared_beginning_is_fed_once_and_asked_once() -> None:
    trie = label_trie(LABELS, IDS, end_token_id=1)
    assert trie.feed == (7,)
    assert trie.asks == ((0, 5), (0, 6), (0, 7), (1, 8), (1, 9))
    assert trie.label_asks == ((0,), (1,), (2, 3), (2, 4))
    assert not trie.end_scored


def test_probabilities_are_exact_sequence_products_renormalised() -> None:
    known = {(5,): 0.3, (6,): 0.2, (7,): 0.25, (7, 8): 0.5, (7, 9): 0.1}
    trie = label_trie(LABELS, IDS, end_token_id=1)
    scores = label_scores(trie, scores_of(trie, known))
    products = [0.3, 0.2, 0.25 * 0.5, 0.25 * 0.1]
    assert scores.legal_mass == pytest.approx(sum(products), abs=1e-12)
    assert scores.probabilities == pytest.approx([p / sum(products) for p in products], abs=1e-12)
    assert sum(scores.probabilities) == pytest.approx(1, abs=1e-12)
    assert (scores.label, scores.tie) == ("yes", False)
    assert scores.margin == pytest.approx(math.log(0.3 / 0.2), abs=1e-12)


def test_ties_go_to_the_first_label_and_are_flagged() -> None:
    trie = label_trie(("b", "a", "c"), ((2,), (1,), (3,)), None)
    scores = label_scores(trie, [math.log(p) for p in (0.2, 0.4, 0.4)])
    assert (scores.label, scores.tie, scores.margin) == ("a", True, 0.0)
    assert scores.flags == ("label_tie",)


def test_a_label_that_begins_another_makes_the_end_count() -> None:
    trie = label_trie(("yes", "yes, in part"), ((5,), (5, 8, 9)), end_token_id=1)
    assert trie.end_scored
    known = {(5,): 0.8, (5, 1): 0.25, (5, 8): 0.5, (5, 8, 9): 0.9, (5, 8, 9, 1): 1.0}
    scores = label_scores(trie, scores_of(trie, known))
    assert scores.probabilities == pytest.approx([0.2 / 0.56, 0.36 / 0.56])
    assert scores.legal_mass == pytest.approx(0.56)
    assert scores.flags == ("label_end_scored",)
    assert trie.token_ids == ((5,), (5, 8, 9))


def test_length_normalisation_compares_labels_by_token() -> None:
    trie = label_trie(LABELS, IDS, None, normalise="length")
    known = {(5,): 0.3, (6,): 0.2, (7,): 0.25, (7, 8): 0.9, (7, 9): 0.1}
    scores = label_scores(trie, scores_of(trie, known))
    per_token = [0.3, 0.2, math.sqrt(0.25 * 0.9), math.sqrt(0.25 * 0.1)]
    assert scores.label == "not stated"
    assert scores.probabilities == pytest.approx([p / sum(per_token) for p in per_token])
    assert scores.legal_mass == pytest.approx(0.3 + 0.2 + 0.25)
    assert "label_length_normalised" in scores.flags


def test_impossible_labels_have_probability_zero_and_all_impossible_ones_tie() -> None:
    trie = label_trie(("a", "b"), ((1,), (2,)), None)
    assert label_scores(trie, [-math.inf, -1.0]).probabilities == (0.0, 1.0)
    nothing = label_scores(trie, [-math.inf, -math.inf])
    assert (nothing.label, nothing.tie, nothing.legal_mass, nothing.probabilities) == ("a", True, 0.0, (0.5, 0.5))


@pytest.mark.parametrize(
    ("ids", "end", "message"),
    [(((1,), (1,)), 0, "same tokens"), (((1,), ()), 0, "no tokens"), (((1,), (1, 2)), None, "no end token")],
)
def test_labels_that_cannot_be_told_apart_are_refused(ids: tuple[tuple[int, ...], ...], end: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        label_trie(("a", "b"), ids, end)


def test_a_missing_log_probability_is_a_bug_that_shows() -> None:
    with pytest.raises(ValueError, match="1 log-probabilities for 2 asked"):
        label_scores(label_trie(("a", "b"), ((1,), (2,)), None), [-1.0])


@given(st.data())
def test_any_trie_gives_the_sums_over_its_labels(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple), min_size=2, max_size=12, unique=True))
    values = data.draw(st.randoms(use_true_random=False))
    labels = [f"label {i}" for i in range(len(ids))]
    trie = label_trie(labels, ids, end_token_id=0)
    paths = [(*path, 0) for path in ids] if trie.end_scored else list(ids)
    known = {path[: i + 1]: values.uniform(0.01, 1) for path in paths for i in range(len(path))}
    scores = label_scores(trie, scores_of(trie, known))
    expected = [math.prod(known[path[: i + 1]] for i in range(len(path))) for path in paths]
    assert scores.logprobs == pytest.approx([math.log(p) for p in expected])
    assert sum(scores.probabilities) == pytest.approx(1, abs=1e-9)
    inner = {path[: i + 1] for path in paths for i in range(len(path) - 1)}
    fed = [tuple(trie.feed[i] for i in trie.path(node)) for node in range(len(trie.feed))]
    assert set(fed) == inner, "no label's last token is fed, and all before are"
    chains = [path for path in inner if not any(path == other[: len(path)] for other in inner - {path})]
    assert len(trie.starts) - 1 == max(1, len(chains))
    assert len(fed) == trie.trunk + sum(len(chain) - trie.trunk for chain in chains), "what chains share from the start is fed once"
    assert len(set(trie.asks)) == len(trie.asks) == len({(fed[row - 1] if row else (), token) for row, token in trie.asks})
    assert sorted((row, token) for row, tokens in enumerate(trie.asked) for token in tokens) == sorted(trie.asks)
    for node, path in enumerate(fed):
        assert trie.depths[node] == len(path) - 1
