"""Where the tokens of a question with labels lie in its stream's pages, and which of them one causal run of keys holds.

The tail and the first chain of the label tree lie one after the other. Every further chain begins a page of its own, so that a kernel,
which follows lists of pages, can read it as a run below a prefix that is the tail and the tree's trunk. Numbers alone: knows no tensors,
kernels or schedules. Private tokens are numbered as in `request.Stream`: the tail, then `labels.feed`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from askmany.engine.labels import LabelTrie


@dataclass(frozen=True, slots=True)
class Piece:
    """Private tokens [start, stop), the last of a run that is `first` in the pages [page, last_page) of the stream; they follow the first
    `above` private tokens, which do not belong to the run."""

    start: int
    stop: int
    first: int
    page: int
    last_page: int
    above: int

    @property
    def length(self) -> int:
        """Tokens of the run, up to the piece's end."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class LabelPages:
    """A tail of `tail` tokens with labels, in pages of `page_size` slots."""

    tail: int
    labels: LabelTrie
    page_size: int

    @property
    def straight(self) -> int:
        """Private tokens that lie one after the other: the tail and the first chain."""
        return self.tail + self.labels.starts[1]

    @property
    def pages(self) -> int:
        """Pages that hold everything."""
        return self._page(len(self.labels.starts) - 1)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Private tokens [start, stop) as the ends of causal runs, in order."""
        straight, starts = self.straight, self.labels.starts  # of the chains, and their end
        if start < min(straight, stop):
            yield Piece(start, min(stop, straight), 0, 0, self._page(1), 0)
            start = straight
        chain = bisect_right(starts, start - self.tail) - 1
        while start < stop:
            end, pages = self.tail + starts[chain + 1], (self._page(chain), self._page(chain + 1))
            yield Piece(start, min(stop, end), self.tail + starts[chain], *pages, self.tail + self.labels.trunk)
            start, chain = end, chain + 1

    def slots(self, pages: list[int], start: int, stop: int) -> list[int]:
        """The slots of private tokens [start, stop) of a stream that holds `pages`."""
        size, found = self.page_size, []
        for piece in self.pieces(start, stop):
            for place in range(piece.start - piece.first, piece.length):
                found.append(pages[piece.page + place // size] * size + place % size)
        return found

    def places(self, start: int, stop: int) -> int:
        """What feeding [start, stop) takes of a step's rows that may ask, and of what else is counted by them: each token of the tree one,
        the tail one, and one where chains read the tail as a prefix."""
        return max(0, stop - max(start, self.tail)) + (start < self.tail) + (stop > self.straight)

    def fitting(self, start: int, stop: int, places: int) -> int:
        """The furthest end up to `stop` of tokens from `start` on that take no more than `places`; `start` where there is none."""
        if places < 1:
            return start
        furthest = max(start, self.tail) + places - (start < self.tail)
        return min(stop, furthest if furthest <= self.straight else max(self.straight, furthest - 1))

    def _page(self, chain: int) -> int:
        """The first page of a chain; of one past the last, the number of pages. Chains beyond the first take equally many."""
        return -(-self.straight // self.page_size) + (chain - 1) * -(-self.labels.longest // self.page_size) if chain else 0
