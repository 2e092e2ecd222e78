"""Log-probabilities of label tokens, gathered from the rows of one or several steps.

Keyed by stream id: a label tree that a step could not feed whole is completed by the next one. Sums are made elsewhere (`labels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.engine.batch import ScoredRow
from askmany.engine.request import Stream
from askmany.kernels.passes import sent

ROWS = 64  # rows whose distribution is computed at once, in double precision


@dataclass(frozen=True, slots=True)
class AskedLabels:
    """Log-probabilities of label tokens: `values` [A], one for each of `asks` (stream id, (row, token))."""

    asks: list[tuple[int, tuple[int, int]]]
    values: Tensor

    def going_home(self) -> AskedLabels:
        """The same on its way to the host; does not wait, and must not be read before the device has come so far."""
        if self.values.device.type != "cuda":
            return self
        home = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
        home.copy_(self.values, non_blocking=True)
        return AskedLabels(self.asks, home)


class LabelScorer:
    """Holds, for each stream with labels, what its tree's rows have said so far."""

    def __init__(self) -> None:
        self._found: dict[int, dict[tuple[int, int], float]] = {}

    def add(self, scored: Sequence[ScoredRow], logits: Tensor) -> None:
        """Take the logits [M, V] of these rows."""
        self.book(ask_labels(scored, range(len(scored)), logits))

    def book(self, asked: AskedLabels) -> None:
        """Take what was asked."""
        for (stream_id, ask), value in zip(asked.asks, asked.values.tolist(), strict=True):
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


def ask_labels(scored: Sequence[ScoredRow], places: Sequence[int], logits: Tensor) -> AskedLabels:
    """What these rows say, which are the rows `places` of `logits` [at least M, V]. Does not wait for a device."""
    rows: list[int] = []
    tokens: list[int] = []
    asks: list[tuple[int, tuple[int, int]]] = []
    for number, item in enumerate(scored):
        assert item.stream.question.labels is not None
        for token in item.stream.question.labels.asked[item.row]:
            rows.append(number)
            tokens.append(token)
            asks.append((item.stream.stream_id, (item.row, token)))
    at, columns = sent(torch.tensor([rows, tokens]), logits.device)
    own = sent(torch.tensor(places), logits.device)
    parts = [own[start : start + ROWS] for start in range(0, len(scored), ROWS)]
    totals = torch.cat([torch.logsumexp(logits[part].double(), dim=-1) for part in parts])  # [M]
    return AskedLabels(asks, logits[own[at], columns].double() - totals[at])
