"""Cost and grouping: which documents go to a worker together, so that workers of unequal speed finish at about the same time.

Costs are estimates in units of one prefilled token; only their order and rough ratio matter. Groups are *guided*: large ones first,
shrinking as the remaining work does, so that what is left at the end is small. Knows numbers alone, no documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostModel:
    """cost = per_document + tokens + per_token_squared * tokens**2 + per_answer_token * answer tokens."""

    per_document: float = 50.0
    per_token_squared: float = 5e-5
    per_answer_token: float = 4.0

    def estimate(self, prompt_tokens: Floats, answer_tokens: Floats) -> Floats:
        """Costs of documents, each with its question tokens, [N] float64."""
        return self.per_document + prompt_tokens + self.per_token_squared * prompt_tokens**2 + self.per_answer_token * answer_tokens


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """How large a group may be: between `smallest_share` of the whole run's time and `largest_share` of its cost, about the remaining
    cost over `remaining_division` times the workers; bounded in cost, documents and records."""

    largest_share: float = 1 / 60
    remaining_division: float = 3.0
    smallest_share: float = 1 / 300
    smallest_cost: float = 1_000.0
    largest_cost: float = 500_000.0
    apart_tokens: int | None = None  # documents of more tokens stand in groups of their own
    max_documents: int = 1024
    max_records: int = 50_000


def guided_groups(costs: Sequence[float], records: Sequence[int], speed: float, limits: GroupLimits) -> list[tuple[int, int]]:
    """Cut documents in falling order of cost into runs [start, stop), the costliest run first.

    `speed` is the sum of the workers' speeds, in workers. Every document is in exactly one run; a run closes when it has reached its
    share or a bound, so only a run's last document can carry it past them.
    """
    total = remaining = float(sum(costs))
    floor = max(total * limits.smallest_share / speed, limits.smallest_cost)
    runs: list[tuple[float, int, int]] = []
    start, weight, held = 0, 0.0, 0
    for index, cost in enumerate(costs):
        if index > start and held + records[index] > limits.max_records:
            runs.append((weight, start, index))
            start, remaining, weight, held = index, remaining - weight, 0.0, 0
        weight += cost
        held += records[index]
        share = max(min(total * limits.largest_share, remaining / (limits.remaining_division * speed)), floor)
        if weight >= min(share, limits.largest_cost) or index + 1 - start >= limits.max_documents:
            runs.append((weight, start, index + 1))
            start, remaining, weight, held = index + 1, remaining - weight, 0.0, 0
    if start < len(costs):
        runs.append((weight, start, len(costs)))
    return [(begin, stop) for _, begin, stop in sorted(runs, key=lambda run: (-run[0], run[1]))]
