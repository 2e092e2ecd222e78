"""Admission: which documents and streams may hold pages, in which order they start, when they let go.

Knows prefix paths, page budgets and order, but neither tokens of a step nor layouts: a *claim* is the streams that start together with
the pages they reserve together (split layout: one stream; interleaved: one request of P). Part of the scheduler, and one of its writers.

Why it cannot deadlock. A claim starts only when it gets its whole page budget at once, and a document's first claim only when the pages
of the whole path come with it; so whatever is live holds every page it will ever need and runs to its end. A document keeps its path
until its last claim has ended, so paths can lie in the pool while none of their claims is live; therefore a path is admitted only if

    pages of all held paths + the largest claim of any document that holds one <= pages of the pool            (*)

still holds afterwards. Starting and ending claims does not change the left side, and a path that goes only lowers it, so (*) stays true.
Now let nothing be live. Claims start in order of submission, and only a document with `max_per_document` live claims is passed over, of
which there is none now: so documents that hold their path come before all others. Pages are free, of unreferenced nodes (evictable), or
of held paths. If any document holds its path, the first claim in order is one of its claims and fits by (*); if none does, path and
claim fit the empty pool, or they had been refused before `submit`. Either way it starts.

Why nobody starves. Nothing that comes later starts while an earlier claim waits for pages or for a place, so freed pages gather for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from askmany.engine.pages import PagePool
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.request import DocumentState, Stream


@dataclass(slots=True, eq=False)
class Claim:
    """Streams of one document that start together, and what they reserve together: `tokens` slots, in `pages` from start to end."""

    document: DocumentState
    streams: tuple[Stream, ...]
    tokens: int
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Entry:
    """A document that is not finished: claims still to start, claims live."""

    state: DocumentState
    waiting: deque[Claim]
    largest_pages: int
    live: int = 0


class Admission:
    """Starts claims in order of submission, `max_claims` at once and `max_per_document` of one document."""

    def __init__(self, pool: PagePool, tree: PrefixTree, max_claims: int, max_per_document: int) -> None:
        self.pool = pool
        self.tree = tree
        self.max_claims = max_claims
        self.max_per_document = max_per_document
        self.live = 0
        self._live_pages = 0
        self._blocked = False  # the first claim in order cannot start before one ends
        self._entries: dict[str, _Entry] = {}  # every unfinished document, in order of submission
        self._queue: dict[str, _Entry] = {}  # those with claims still to start, in order of submission
        self._resident: dict[str, _Entry] = {}  # those that hold their path, in order of admission

    @property
    def has_work(self) -> bool:
        return bool(self._entries)

    @property
    def resident(self) -> list[DocumentState]:
        """Documents that hold their path, oldest first."""
        return [entry.state for entry in self._resident.values()]

    def holds(self, key: str) -> bool:
        return key in self._entries

    def submit(self, state: DocumentState, claims: list[Claim]) -> None:
        """Queue a document. Path and any one claim must fit an empty pool; keys are unique among unfinished documents."""
        path_pages = self.tree.path_pages(state.document.segments)
        assert claims
        assert state.document.key not in self._entries
        largest_pages = max(self.pool.pages_for(claim.tokens) for claim in claims)
        assert path_pages + largest_pages <= self.pool.page_count
        self._entries[state.document.key] = self._queue[state.document.key] = _Entry(state, deque(claims), largest_pages)

    def start(self) -> list[Claim]:
        """Start every claim whose turn has come and whose pages can be had; their `pages` are theirs now."""
        if self._blocked:
            return []
        started: list[Claim] = []
        emptied: list[str] = []
        for key, entry in self._queue.items():
            while entry.waiting and entry.live < self.max_per_document and self._start_one(entry):
                started.append(entry.waiting.popleft())
            if not entry.waiting:
                emptied.append(key)
            elif entry.live < self.max_per_document:
                self._blocked = True
                break
        for key in emptied:
            del self._queue[key]
        return started

    def end(self, claim: Claim) -> None:
        """Take back a claim's pages, and its document's path when it was the last one."""
        entry = self._entries[claim.document.document.key]
        self.pool.free(claim.pages)
        self._live_pages -= len(claim.pages)
        self._blocked = False
        claim.pages = []
        self.live -= 1
        entry.live -= 1
        if not entry.live and not entry.waiting:
            self.tree.release(claim.document.path)
            claim.document.path = []
            del self._entries[claim.document.document.key], self._resident[claim.document.document.key]

    def check_integrity(self, live: list[Claim]) -> None:
        """Fail unless every page is free, a node's or a live claim's, exactly one of them, and all counts agree."""
        self.pool.check()
        self.tree.check_integrity()
        claimed = [page for claim in live for page in claim.pages]
        cached = [page for node in self.tree.nodes() for page in node.pages]
        free = self.pool.free_pages()
        assert len(claimed) + len(cached) + len(free) == self.pool.page_count, "pages were lost or counted twice"
        assert {*claimed, *cached, *free} == set(range(self.pool.page_count)), "a page has two owners"
        assert all(len(claim.pages) == self.pool.pages_for(claim.tokens) for claim in live), "a live claim lacks pages"
        assert len(live) == self.live == sum(entry.live for entry in self._entries.values()), "live claims are miscounted"
        assert all(entry.live or entry.waiting for entry in self._entries.values()), "a finished document was kept"
        assert self._live_pages == len(claimed), "the pages of live claims are miscounted"
        held = sum(len(entry.state.path) for entry in self._resident.values())
        assert held == sum(node.refs for node in self.tree.nodes()), "reference counts do not match the resident documents"

    def _start_one(self, entry: _Entry) -> bool:
        claim = entry.waiting[0]
        pages = self.pool.pages_for(claim.tokens)
        if self.live == self.max_claims or not self._make_room(entry, pages):
            return False
        claim.pages = self.pool.allocate(pages)
        self.live += 1
        self._live_pages += pages
        entry.live += 1
        return True

    def _make_room(self, entry: _Entry, pages: int) -> bool:
        """Have `pages` free, and the document's path held."""
        document = entry.state.document
        if document.key in self._resident:
            return self.tree.make_room(pages)
        largest = max([entry.largest_pages, *(other.largest_pages for other in self._resident.values())])
        path = self.tree.acquire(document.segments, spare_pages=max(pages, largest - self._live_pages))
        if path is None:
            return False
        entry.state.path = path
        self._resident[document.key] = entry
        return self.tree.make_room(pages)
