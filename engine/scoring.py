"""Log-probabilities of label tokens, gathered from the rows of one or several steps.

Keyed by stream id: a label tree that a step could not feed whole is completed by the next one. Sums are made elsewhere (`labels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from askmany.engine.batch import ScoredRow
from askmany.engine.request import Stream
from askmany.kernels.passes import sent

ROWS = 64  # rows whose distribution is computed at once, in double precision


class LabelScorer:
    """Holds, for each stream with labels, what its tree's rows have said so far."""

    def __init__(self) -> None:
        self._found: dict[int, dict[tuple[int, int], float]] = {}

    def add(self, scored: Sequence[ScoredRow], logits: Tensor) -> None:
        """Take the logits [M, V] of these rows."""
        places: list[int] = []
        tokens: list[int] = []
        asks: list[tuple[int, tuple[int, int]]] = []
        for place, item in enumerate(scored):
            assert item.stream.question.labels is not None
            for token in item.stream.question.labels.asked[item.row]:
                places.append(place)
                tokens.append(token)
                asks.append((item.stream.stream_id, (item.row, token)))
        rows, columns = sent(torch.tensor([places, tokens]), logits.device)
        starts = range(0, len(scored), ROWS)
        totals = torch.cat([torch.logsumexp(logits[start : start + ROWS].double(), dim=-1) for start in starts])  # [M]
        for (stream_id, ask), value in zip(asks, (logits[rows, columns].double() - totals[rows]).tolist(), strict=True):
            self._found.setdefault(stream_id, {})[ask] = value

    def take(self, stream: Stream) -> tuple[float, ...]:
        """One log-probability for each of the tree's asks; KeyError while a row is missing."""
        assert stream.question.labels is not None
        found = self._found.pop(stream.stream_id)
        return tuple(found[ask] for ask in stream.question.labels.asks)

    def release(self, streams: Iterable[Stream]) -> None:
        """Forget these streams."""
        for stream in streams:
            self._found.pop(stream.stream_id, None)
