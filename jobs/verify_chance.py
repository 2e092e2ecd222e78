"""How far two shares of the same prompts may lie apart by chance. Needs scipy.

The prompts on which one pair of engines disagrees are often those on which another pair does, so the two shares are paired. The interval is
Newcombe's (Statistics in Medicine 17:2635, 1998, method 10): Wilson's interval of each share, put together with their correlation. It
holds for few prompts and for shares of 0, where a normal approximation has no width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Chance:
    """Of `prompts`, `ours` and `yardstick` disagree; the two-sided interval of the former share less the latter."""

    prompts: int
    ours: int
    yardstick: int
    low: float
    high: float


def chance(prompts: int, ours: Sequence[int], yardstick: Sequence[int]) -> Chance:
    """From the prompts (numbered from 0, of `prompts`) on which either pair of engines disagrees. ValueError without any prompt."""
    if prompts < 1:
        raise ValueError("no prompt, no share")
    one, other = set(ours), set(yardstick)
    low, high = paired_interval(len(one & other), len(one - other), len(other - one), prompts)
    return Chance(prompts, len(one), len(other), low, high)


def paired_interval(both: int, first: int, second: int, total: int) -> tuple[float, float]:
    """Interval of a first share less a second, when so many of `total` count for both, for the first alone, for the second alone."""
    one, other = (both + first) / total, (both + second) / total
    one_low, one_high = _wilson(both + first, total)
    other_low, other_high = _wilson(both + second, total)
    correlation = _correlation(both, first, second, total - both - first - second)
    below = _joined(one - one_low, other_high - other, correlation)
    above = _joined(one_high - one, other - other_low, correlation)
    return one - other - below, one - other + above


def _wilson(count: int, total: int) -> tuple[float, float]:
    found = binomtest(count, total).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


def _joined(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))


def _correlation(both: int, first: int, second: int, neither: int) -> float:
    """Of the two marks, a positive one with Newcombe's correction for continuity; 0 where a mark never changes."""
    spread = (both + first) * (second + neither) * (both + second) * (first + neither)
    shared = float(both * neither - first * second)
    if shared > 0:
        shared = max(0.0, shared - (both + first + second + neither) / 2)
    return shared / math.sqrt(spread) if spread else 0.0
