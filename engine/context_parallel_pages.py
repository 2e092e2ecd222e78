"""A page pool that remembers what was freed, so that others learn which slots hold nothing any more. No torch here."""

from __future__ import annotations

from askmany.engine.pages import PagePool


class NotedPagePool(PagePool):
    """A `PagePool` whose freed pages can be asked for."""

    def __init__(self, page_count: int, page_size: int) -> None:
        super().__init__(page_count, page_size)
        self._freed: list[int] = []

    def free(self, pages: list[int]) -> None:
        """See `PagePool.free`."""
        super().free(pages)
        self._freed += pages

    def take_freed(self) -> list[int]:
        """Pages freed since the last call; each was free at some moment since, and may be taken again."""
        freed, self._freed = self._freed, []
        return freed
