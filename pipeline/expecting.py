"""What a plan lets an engine expect: its usual document, and what there is of everything at most. Numbers of plan rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from askmany.engine.choice import Expected
from askmany.pipeline.plan import Group, Plan

_COLUMNS = ("document_tokens", "question_tokens", "answer_tokens", "answerable", "chunks")


def expect(plan: Plan, groups: Sequence[Group], long_above: int | None = None) -> Expected | None:
    """Medians over the documents of `groups` that need an engine, each as one of its chunks; None without any.

    Groups of documents of more than `long_above` tokens, which engines of another kind answer, do not count.
    """
    own = [group for group in groups if long_above is None or group.longest_tokens <= long_above]
    if not own:
        return None
    rows = np.concatenate([np.arange(group.start, group.stop) for group in own])
    found = {name: plan.table.column(name).to_numpy()[rows].astype(np.float64) for name in _COLUMNS}
    asked = found["answerable"] > 0
    if not asked.any():
        return None
    documents, questions, answers, answerable, chunks = (found[name][asked] for name in _COLUMNS)
    counts = np.ceil(answerable / chunks)
    usual = (_median(documents / chunks), _median(counts), _median(questions / answerable), _median(answers / answerable))
    return Expected(*usual, most_questions=int(counts.max()), streams=int(answerable.sum()))


def _median(values: np.ndarray) -> int:
    return max(1, round(float(np.median(values))))
