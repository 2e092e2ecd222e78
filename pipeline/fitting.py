"""What work really costs: seconds for each kind of worker, fitted to the groups that were measured.

seconds = a * documents + b * tokens + c * tokens**2 (summed over documents) + d * answer tokens, all of them at least 0. Least squares of
the relative error, so that small groups count as much as large ones. Knows numbers alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from askmany.pipeline.balance import CostModel, Floats

ENOUGH = 8  # groups of a kind below which nothing is fitted


@dataclass(frozen=True, slots=True)
class Measured:
    """One committed group: what was in it (sums over its documents) and the seconds its engine was busy with it."""

    kind: str
    documents: int
    tokens: int
    tokens_squared: float
    answer_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Seconds of one kind of worker. `error` is the root mean square of the relative error over its `groups`."""

    kind: str
    document_s: float
    token_s: float
    token_squared_s: float
    answer_token_s: float
    groups: int
    error: float

    def seconds(self, documents: float, tokens: float, tokens_squared: float, answer_tokens: float) -> float:
        parts = (
            self.document_s * documents,
            self.token_s * tokens,
            self.token_squared_s * tokens_squared,
            self.answer_token_s * answer_tokens,
        )
        return sum(parts)

    def model(self) -> CostModel | None:
        """The same in units of one prefilled token; None when a token costs nothing measurable."""
        if self.token_s <= 0:
            return None
        return CostModel(self.document_s / self.token_s, self.token_squared_s / self.token_s, self.answer_token_s / self.token_s)


def fit(measured: Iterable[Measured]) -> dict[str, FittedCost]:
    """A fit for each kind with enough groups."""
    kinds: dict[str, list[Measured]] = {}
    for one in measured:
        if one.seconds > 0:
            kinds.setdefault(one.kind, []).append(one)
    return {kind: _fit_kind(kind, groups) for kind, groups in sorted(kinds.items()) if len(groups) >= ENOUGH}


def speeds(fits: Mapping[str, FittedCost], measured: Sequence[Measured]) -> dict[str, float]:
    """Each kind's speed on the measured work, the fastest being 1.0."""
    work = [sum(getattr(one, name) for one in measured) for name in ("documents", "tokens", "tokens_squared", "answer_tokens")]
    seconds = {kind: one.seconds(*work) for kind, one in fits.items()}
    fastest = min(seconds.values(), default=0.0)
    return {kind: fastest / value if value > 0 else 1.0 for kind, value in seconds.items()}


def _fit_kind(kind: str, groups: Sequence[Measured]) -> FittedCost:
    rows = np.array([[one.documents, one.tokens, one.tokens_squared, one.answer_tokens] for one in groups], dtype=np.float64)
    relative = rows / np.array([[one.seconds] for one in groups])
    weights, error = non_negative_least_squares(relative, np.ones(len(groups)))
    document_s, token_s, token_squared_s, answer_token_s = map(float, weights)
    return FittedCost(kind, document_s, token_s, token_squared_s, answer_token_s, len(groups), error / len(groups) ** 0.5)


def non_negative_least_squares(matrix: Floats, target: Floats) -> tuple[Floats, float]:
    """The x >= 0 with the least |matrix @ x - target|, and that norm. For few columns: every subset of them is tried."""
    columns = matrix.shape[1]
    scale = np.where((norms := np.linalg.norm(matrix, axis=0)) > 0, norms, 1.0)
    scaled = matrix / scale
    best, least = np.zeros(columns), float(np.linalg.norm(target))
    for size in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), size):
            part, *_ = np.linalg.lstsq(scaled[:, subset], target, rcond=None)
            error = float(np.linalg.norm(scaled[:, subset] @ part - target))
            if (part >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(columns), error
                best[list(subset)] = part
    return best / scale, least
