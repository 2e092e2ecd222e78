"""A throughput model of B requests of P streams that share steps, fitted to what was measured. Needs scipy.

A step takes `start + B document + B P each + B P^2 pairs` seconds: what it costs whatever rides along (weights, launches), what each
request adds (one reading of its document), each stream (its row and its own keys), and, in the interleaved layout alone, each pair of a
request's streams, which scan each other's slots. Throughput is `B P` over that. With pairs it has a peak: streams beyond
`P = sqrt(document / pairs)` cost more than they bring. The published method chooses P by such a model (arXiv 2611.15130, equation 3); this
one is derived from what a step of this engine does, it is not that equation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from askmany.engine.config import DEFAULT_INTERLEAVED_STREAMS
from askmany.jobs.bench_variants import label, values_of

LEAST_POINTS = 3  # different (B, P) in one curve
CURVE = ("work", "model", "layout", "document_tokens", "new_tokens")  # what a curve shares, beside its setup
MAX_ROWS = 256

Curve = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step: `requests` B of `streams` P each, its seconds."""

    requests: int
    streams: int
    step_s: float

    @property
    def rows(self) -> int:
        return self.requests * self.streams


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of a step's parts, none negative; `r2` of relative errors. Where B never varies, `document_s` is 0, part of `start_s`."""

    start_s: float
    document_s: float
    each_s: float
    pairs_s: float
    r2: float

    def step_s(self, requests: int, streams: int) -> float:
        return self.start_s + requests * (self.document_s + streams * (self.each_s + streams * self.pairs_s))

    def tokens_per_s(self, requests: int, streams: int) -> float:
        return requests * streams / self.step_s(requests, streams)

    @property
    def best_streams(self) -> float | None:
        """The P of most throughput, at a given number of rows where B varies, else for one request; None where more is always better."""
        return math.sqrt((self.document_s or self.start_s) / self.pairs_s) if self.pairs_s > 0 else None


def fit(points: Sequence[Point], pairs: bool) -> Fit:
    """Least squares of relative errors with no part below zero; `pairs` False leaves that part out.

    ValueError for fewer different (B, P) than LEAST_POINTS, or for seconds that are not positive.
    """
    sizes = {(point.requests, point.streams) for point in points}
    if len(sizes) < LEAST_POINTS:
        raise ValueError(f"a curve needs {LEAST_POINTS} different numbers of requests and streams, not {len(sizes)}")
    seconds = np.array([point.step_s for point in points])
    if seconds.min() <= 0:
        raise ValueError(f"seconds must be positive, not {seconds.min()}")
    requests = np.array([point.requests for point in points], dtype=np.float64)
    streams = np.array([point.streams for point in points], dtype=np.float64)
    parts = np.stack([np.ones_like(seconds), requests, requests * streams, requests * streams**2], axis=1)
    parts[:, 1] *= len(set(requests)) > 1  # else the same as the first
    parts[:, 3] *= pairs
    scale = np.where(parts.any(axis=0), parts.max(axis=0), 1.0)
    found, _ = nnls(parts / scale / seconds[:, None], np.ones(len(seconds)))
    left = 1 - parts / scale @ found / seconds
    spread = 1 - float(np.sum(1 / seconds) / np.sum(1 / seconds**2)) / seconds  # by the best constant
    r2 = 1 - float(left @ left) / float(spread @ spread) if float(spread @ spread) > 0 else 1.0
    start, document, each, pair = (float(value) for value in found / scale)
    return Fit(start, document, each, pair, r2)


def point_of(row: Mapping[str, Any]) -> Point | None:
    """What a benchmark row says of one step; None where it cannot: answers of different lengths, a document's prefill inside, or a P that
    was calibrated. Questions' own prefill counts with the steps."""
    setup = values_of(row)
    streams = setup.get("streams")
    if row["spread"] or not row["cached"] or streams == "calibrate":
        return None
    asked, most = row["documents"] * row["questions"], setup.get("max_rows", MAX_ROWS)
    default = row["questions"] if row["layout"] == "split" else DEFAULT_INTERLEAVED_STREAMS
    streams = min(row["questions"], streams or default, most)
    of_document = 1 if row["layout"] == "split" else -(-row["questions"] // streams)
    requests = max(1, min(most // streams, row["documents"] * of_document))
    return Point(requests, streams, row["ours_s"] * requests * streams / (asked * row["new_tokens"]))


def curves(rows: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """Rows that differ in B and P alone: their values under CURVE, `setup_label`, and their `points`."""
    found: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    for row in rows:
        if point := point_of(row):
            found[*(row[name] for name in CURVE), label(row, without=("streams", "max_rows"))].append(point)
    names = (*CURVE, "setup_label")
    return [dict(zip(names, key, strict=True)) | {"points": points} for key, points in found.items()]


def fits(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The model fitted to every curve with enough points. `points`: B, P, seconds of a step, tokens/s measured and as the model has it."""
    made = []
    for curve in curves(rows):
        points = sorted(curve.pop("points"), key=lambda point: (point.requests, point.streams))
        different = len({(point.requests, point.streams) for point in points})
        if different >= LEAST_POINTS:
            model = fit(points, pairs=curve["layout"] != "split" and different > LEAST_POINTS)
            shown = [[p.requests, p.streams, p.step_s, p.rows / p.step_s, model.tokens_per_s(p.requests, p.streams)] for p in points]
            made.append(curve | asdict(model) | {"best_streams": model.best_streams, "points": shown})
    return made
