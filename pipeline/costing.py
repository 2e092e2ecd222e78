"""What the ledger teaches about costs: seconds that groups took on each kind of worker, fed back into the plan of a later launch.

A group's line tells what its worker's engine did since the group before it was committed. The seconds are those in between, or the group's
own where they are fewer, since a worker holds two groups at once. From them come a cost model in units of one prefilled token, and how many
units a second each kind of worker does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from askmany.pipeline.balance import CostModel
from askmany.pipeline.fitting import FittedCost, Measured, fit
from askmany.pipeline.plan import Plan

_USED = ("documents", "prefill_tokens", "tail_tokens", "decode_tokens")


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of costs: a model, and cost units a second of each kind of worker (`rates`, empty where nothing was measured)."""

    model: CostModel = field(default_factory=CostModel)
    rates: Mapping[str, float] = field(default_factory=dict)


def learn(lines: Iterable[Mapping[str, Any]], plan: Plan | None) -> Costs:
    """Costs out of a ledger. The plan tells how unequal the documents of a group are; without it they count as equally long."""
    measured = list(_measured(lines, _square_tokens(plan) if plan is not None else {}))
    fits = fit(measured)
    model = _model(fits) or CostModel()
    kinds = sorted({one.kind for one in measured})
    return Costs(model, {kind: _rate(kind, measured, fits, model) for kind in kinds})


def _model(fits: Mapping[str, FittedCost]) -> CostModel | None:
    """That of the kind with the most groups."""
    models = [(one.groups, one.kind, one.model()) for one in fits.values()]
    known = [(groups, kind, model) for groups, kind, model in models if model is not None]
    return max(known, key=lambda entry: entry[:2])[2] if known else None


def _rate(kind: str, measured: Iterable[Measured], fits: Mapping[str, FittedCost], model: CostModel) -> float:
    """Cost units a second: over all that was measured where the kind was fitted, so that kinds compare on the same work."""
    everything = list(measured)
    work = everything if kind in fits else [one for one in everything if one.kind == kind]
    cost = sum(_cost(one, model) for one in work)
    if kind not in fits:
        return cost / sum(one.seconds for one in work)
    seconds = sum(fits[kind].seconds(one.documents, one.tokens, one.tokens_squared, one.answer_tokens) for one in work)
    return cost / seconds


def _cost(one: Measured, model: CostModel) -> float:
    squares = model.per_token_squared * one.tokens_squared
    return model.per_document * one.documents + one.tokens + squares + model.per_answer_token * one.answer_tokens


def _measured(lines: Iterable[Mapping[str, Any]], squares: Mapping[str, float]) -> Iterable[Measured]:
    """Every line that tells of an engine's work. The ledger tells, it does not decide: a line without the figures is passed over."""
    ended: dict[str, float] = {}
    for line in lines:
        usage = line.get("usage")
        if line.get("kind") != "group" or not isinstance(usage, Mapping):
            continue
        worker, at = str(line.get("worker")), float(line.get("at") or 0)
        seconds = min(float(line.get("seconds") or 0), at - ended.get(worker, 0.0))
        ended[worker] = at
        documents, prefill, tail, decode = (float(usage.get(name) or 0) for name in _USED)
        tokens = prefill + tail
        if seconds > 0 and tokens > 0:
            mean = squares.get(str(line.get("group")), tokens / max(documents, 1.0))
            yield Measured(str(line.get("accelerator")), int(documents), int(tokens), mean * tokens, int(decode), seconds)


def _square_tokens(plan: Plan) -> dict[str, float]:
    """For each group, the sum of squared prompt tokens of its chunks over the sum of their tokens."""
    if not plan.groups:
        return {}
    columns = {name: plan.table.column(name).to_numpy().astype(np.float64) for name in ("document_tokens", "question_tokens", "chunks")}
    tokens = columns["document_tokens"] + columns["question_tokens"]
    starts = np.array([group.start for group in plan.groups])
    sums, squares = np.add.reduceat(tokens, starts), np.add.reduceat(tokens**2 / columns["chunks"], starts)
    return {group.name: float(square / total) for group, square, total in zip(plan.groups, squares, sums, strict=True) if total > 0}
