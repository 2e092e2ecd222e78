"""What a plan lets an engine expect: its usual document, and what there is of everything at most. Numbers of plan rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from askmany.engine.choice import Expected
from askmany.pipeline.plan import Group, Plan

SAMPLED = 100_000  # documents that medians are taken over, at least where there are so many: a driver may have millions
_COLUMNS = ("document_tokens", "question_tokens", "answer_tokens", "answerable", "chunks")
_ANSWERABLE, _CHUNKS = _COLUMNS.index("answerable"), _COLUMNS.index("chunks")


def expect(plan: Plan, groups: Sequence[Group], long_above: int | None = None) -> Expected | None:
    """Medians over the documents of `groups` that need an engine, each as one of its chunks; None without any.

    Groups of documents of more than `long_above` tokens, which engines of another kind answer, do not count.
    """
    own = [group for group in groups if long_above is None or group.longest_tokens <= long_above]
    stride = max(1, sum(group.stop - group.start for group in own) // SAMPLED)
    most, streams, samples = 0, 0, []
    for group in own:
        rows = plan.rows(group)
        found = np.stack([rows.column(name).to_numpy().astype(np.float64) for name in _COLUMNS])
        found = found[:, found[_ANSWERABLE] > 0]
        if found.shape[1]:
            most = max(most, int(np.ceil(found[_ANSWERABLE] / found[_CHUNKS]).max()))
            streams += int(found[_ANSWERABLE].sum())
            samples.append(found[:, ::stride])
    if not samples:
        return None
    documents, questions, answers, answerable, chunks = np.concatenate(samples, axis=1)
    counts = np.ceil(answerable / chunks)
    usual = (_median(documents / chunks), _median(counts), _median(questions / answerable), _median(answers / answerable))
    return Expected(*usual, most_questions=most, streams=streams)


def _median(values: np.ndarray) -> int:
    return max(1, round(float(np.median(values))))
