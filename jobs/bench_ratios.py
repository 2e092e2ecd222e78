"""From seconds to ratios: paired by seed and pass, geometric means, bootstrap intervals. No timing, no engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 4000


def geometric_mean(values: Sequence[float]) -> float:
    """ValueError for none, or for one that is not positive."""
    if not values or min(values) <= 0:
        raise ValueError(f"a geometric mean needs positive values, not {list(values)}")
    return math.exp(sum(map(math.log, values)) / len(values))


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the geometric mean."""
    logs = np.log(np.asarray(values, dtype=np.float64))
    picks = np.random.default_rng(seed).integers(0, len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.percentile(logs[picks].mean(axis=1), [2.5, 97.5])
    return float(np.exp(low)), float(np.exp(high))


def grid_interval(rows: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the geometric mean over cells, each with its own paired ratios; seeds are drawn within each cell."""
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for row in rows:
        logs = np.log(np.asarray(row, dtype=np.float64))
        total += logs[rng.integers(0, len(logs), size=(RESAMPLES, len(logs)))].mean(axis=1)
    low, high = np.percentile(total / len(rows), [2.5, 97.5])
    return float(np.exp(low)), float(np.exp(high))


def fit_throughput(streams: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """The model in which a job of P streams takes `a + b P` seconds, so that its throughput is proportional to `P / (a + b P)`: a, b, and
    R^2 of a fit by least squares. ValueError for fewer than two points."""
    if len(streams) < 2:
        raise ValueError("a line needs two points")
    slope, start = np.polyfit(np.asarray(streams, dtype=float), np.asarray(seconds, dtype=float), 1)
    found = np.asarray(seconds) - (start + slope * np.asarray(streams))
    spread = np.asarray(seconds) - np.mean(seconds)
    return float(start), float(slope), float(1 - (found @ found) / (spread @ spread)) if float(spread @ spread) else 1.0
