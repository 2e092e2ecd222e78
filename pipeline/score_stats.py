"""How sure a mean is: bootstrap intervals that resample documents, not questions.

Answers over one document share its text and often its errors, so questions are no independent sample; whole documents are drawn with
replacement (cluster bootstrap, Field and Welsh 2007). Everything is reproducible: same items, same seed, same interval.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its percentile interval; NaN bounds for fewer than two documents."""

    mean: float
    low: float
    high: float
    items: int
    clusters: int

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high


def bootstrap(
    values: Sequence[float], clusters: Sequence[Hashable], resamples: int = RESAMPLES, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """The mean of `values` with its interval over resampled clusters. ValueError without values."""
    if not len(values):
        raise ValueError("no values to average")
    place: dict[Hashable, int] = {}
    member = np.array([place.setdefault(cluster, len(place)) for cluster in clusters], dtype=np.int64)
    array = np.asarray(values, dtype=np.float64)
    sums, counts = np.bincount(member, weights=array), np.bincount(member).astype(np.float64)
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(place), np.full(len(place), 1 / len(place)), size=resamples)
    means = (drawn @ sums) / (drawn @ counts)
    low, high = _percentiles(means, confidence) if len(place) > 1 else (float("nan"), float("nan"))
    return Interval(float(array.mean()), low, high, len(array), len(place))


def bootstrap_of(
    statistic: Callable[[Floats], Floats],
    clusters: int,
    items: int,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Any statistic of weighted clusters: it maps weights [R, clusters] to [R] values. For what is no mean, such as macro F1."""
    whole = float(statistic(np.ones((1, clusters)))[0])
    if clusters < 2:
        return Interval(whole, float("nan"), float("nan"), items, clusters)
    drawn = np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples).astype(np.float64)
    low, high = _percentiles(statistic(drawn), confidence)
    return Interval(whole, low, high, items, clusters)


def paired(
    ours: Sequence[float], theirs: Sequence[float], clusters: Sequence[Hashable], resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of ours - theirs over the same items."""
    return bootstrap([a - b for a, b in zip(ours, theirs, strict=True)], clusters, resamples, seed)


def _percentiles(values: Floats, confidence: float) -> tuple[float, float]:
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
