"""From seconds to ratios: paired by seed and pass, geometric means, bootstrap intervals. No timing, no engines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


def summary(ratios: Sequence[float]) -> dict[str, Any]:
    """A row's figures from its paired ratios."""
    low, high = interval(ratios)
    return {"ratio": geometric_mean(ratios), "low": low, "high": high, "ratios": list(ratios)}


def grid_interval(rows: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the geometric mean over cells, each with its own paired ratios; seeds are drawn within each cell."""
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for row in rows:
        logs = np.log(np.asarray(row, dtype=np.float64))
        total += logs[rng.integers(0, len(logs), size=(RESAMPLES, len(logs)))].mean(axis=1)
    low, high = np.percentile(total / len(rows), [2.5, 97.5])
    return float(np.exp(low)), float(np.exp(high))


def means(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """For each set of values under `names`: how many rows (`cells`), the geometric mean of their ratios, its interval from their `ratios`
    (those of each seed and pass), and the row with the smallest ratio (`worst`)."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return [dict(zip(names, key, strict=True)) | _mean(own) for key, own in groups.items()]


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    low, high = grid_interval([row["ratios"] for row in rows])
    worst = min(rows, key=lambda row: row["ratio"])
    sizes = {name: worst[name] for name in ("documents", "document_tokens", "questions", "new_tokens")}
    ratio = geometric_mean([row["ratio"] for row in rows])
    return {"cells": len(rows), "ratio": ratio, "low": low, "high": high, "worst": sizes | {"ratio": worst["ratio"]}}
