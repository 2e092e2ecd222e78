"""The page pool: which pages of the KV pool are free.

Knows page numbers only, neither who holds a page nor what lies in it. Free pages are kept as maximal runs in ascending order, so that
an allocation can be one contiguous run whenever one is long enough (a contiguous run is a slice of the KV pool, no gather).
"""

from __future__ import annotations

from bisect import bisect_left


class PagePool:
    """`page_count` pages of `page_size` slots each, all free at first."""

    def __init__(self, page_count: int, page_size: int) -> None:
        if page_count < 1 or page_size < 1:
            raise ValueError(f"a page pool needs at least one page of one slot, got {page_count} pages of {page_size} slots")
        self.page_count = page_count
        self.page_size = page_size
        self._starts = [0]  # ascending; run i is pages [_starts[i], _starts[i] + _lengths[i])
        self._lengths = [page_count]
        self._available = page_count

    @property
    def available(self) -> int:
        """Free pages."""
        return self._available

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` slots."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages: the shortest free run that holds them all, else the lowest runs in ascending order.

        The caller makes sure that `count <= available`.
        """
        assert 0 <= count <= self._available, f"{count} pages wanted, {self._available} free"
        if count == 0:
            return []
        fitting = [i for i, length in enumerate(self._lengths) if length >= count]
        if fitting:
            return self._take(min(fitting, key=self._lengths.__getitem__), count)
        pages: list[int] = []
        while len(pages) < count:
            pages += self._take(0, min(count - len(pages), self._lengths[0]))
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back; a page that is free already is a bug and fails."""
        ordered = sorted(pages)
        start = 0
        for end in range(1, len(ordered) + 1):
            if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
                self._put(ordered[start], end - start)
                start = end

    def check(self) -> None:
        """Fail unless the free runs are in range, ascending, apart and sum to `available`."""
        end = -1
        for start, length in zip(self._starts, self._lengths, strict=True):
            assert length > 0, f"free run at {start} is empty"
            assert start > end, f"free run at {start} touches the run that ends at {end}"
            end = start + length
        assert end <= self.page_count, f"free run ends at {end} of {self.page_count} pages"
        assert sum(self._lengths) == self._available, f"{sum(self._lengths)} pages in runs, {self._available} counted"

    def free_pages(self) -> set[int]:
        """The free pages as a set, for integrity checks."""
        return {page for start, length in zip(self._starts, self._lengths, strict=True) for page in range(start, start + length)}

    def _take(self, run: int, count: int) -> list[int]:
        start = self._starts[run]
        if count == self._lengths[run]:
            del self._starts[run], self._lengths[run]
        else:
            self._starts[run] += count
            self._lengths[run] -= count
        self._available -= count
        return list(range(start, start + count))

    def _put(self, start: int, length: int) -> None:
        end = start + length
        at = bisect_left(self._starts, start)
        before_end = self._starts[at - 1] + self._lengths[at - 1] if at else -1
        after_start = self._starts[at] if at < len(self._starts) else self.page_count + 1
        assert start >= 0, f"page {start} of a pool of {self.page_count}"
        assert end <= self.page_count, f"page {end - 1} of a pool of {self.page_count}"
        assert before_end <= start, f"page {start} is free already"
        assert end <= after_start, f"page {after_start} is free already"
        if after_start == end:
            length += self._lengths[at]
            del self._starts[at], self._lengths[at]
        if before_end == start:
            self._lengths[at - 1] += length
        else:
            self._starts.insert(at, start)
            self._lengths.insert(at, length)
        self._available += end - start
