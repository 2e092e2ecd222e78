"""Pairwise covering samples: few cases in which every pair of values of every two factors still meets at least once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Choice = dict[str, object]
Pair = tuple[str, object, str, object]


def pairwise(
    factors: Mapping[str, Sequence[object]], feasible: Callable[[Choice], bool], *, seed: int, at_least: int = 0, candidates: int = 40
) -> list[Choice]:
    """A sample that covers every pair of values which some feasible choice holds, filled up with random choices to `at_least` cases.

    Greedy: each round completes one uncovered pair in `candidates` random ways and keeps the way that covers most. The same seed gives
    the same sample. A pair that 400 draws could not complete feasibly counts as infeasible.
    """
    draw = random.Random(seed)
    missing = {pair for a, b in combinations(sorted(factors), 2) for pair in _pairs_of(factors, a, b)}
    chosen: list[Choice] = []
    while missing:
        pair = min(missing, key=repr)
        offers = _complete(factors, pair, feasible, draw, candidates)
        if not offers:
            missing.discard(pair)
            continue
        best = max(offers, key=lambda offer: len(pairs_in(offer) & missing))
        chosen.append(best)
        missing -= pairs_in(best)
    while len(chosen) < at_least:
        offer = {name: draw.choice(values) for name, values in factors.items()}
        if feasible(offer) and offer not in chosen:
            chosen.append(offer)
    return chosen


def pairs_in(choice: Choice) -> set[Pair]:
    """The pairs of values that `choice` holds."""
    return {(a, choice[a], b, choice[b]) for a, b in combinations(sorted(choice), 2)}


def _pairs_of(factors: Mapping[str, Sequence[object]], a: str, b: str) -> list[Pair]:
    return [(a, x, b, y) for x, y in product(factors[a], factors[b])]


def _complete(
    factors: Mapping[str, Sequence[object]], pair: Pair, feasible: Callable[[Choice], bool], draw: random.Random, wanted: int
) -> list[Choice]:
    offers = []
    for _ in range(400):
        offer = {name: draw.choice(values) for name, values in factors.items()} | {pair[0]: pair[1], pair[2]: pair[3]}
        if feasible(offer):
            offers.append(offer)
            if len(offers) == wanted:
                break
    return offers
