"""The prefix tree: which prefixes lie in the KV pool, who uses them, which can go.

A node is one segment of tokens below its parent (the instruction, then a document) and owns whole pages of its own. Knows nothing of
streams, steps or devices. Only the scheduler writes here: it acquires a path for a document, moves `stored` as chunks are prefilled, and
releases the path after the document's last stream. Released nodes stay as a cache until their pages are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from askmany.engine.pages import PagePool


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One segment of a prefix, keyed by (parent, token ids).

    Token i of the node stands at position `start + i` and its KV in slot `pages[i // page_size] * page_size + i % page_size`; tokens
    [0, stored) are stored. `refs` counts the documents that hold a path through the node. An evicted node has no pages.
    """

    parent: PrefixNode | None
    token_ids: tuple[int, ...]
    start: int
    pages: list[int] = field(default_factory=list)
    stored: int = 0
    refs: int = 0
    last_used: int = 0
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.stored == len(self.token_ids)

    @property
    def ancestors(self) -> tuple[PrefixNode, ...]:
        """The nodes above this one, topmost first."""
        above: list[PrefixNode] = []
        node = self.parent
        while node is not None:
            above.append(node)
            node = node.parent
        return tuple(reversed(above))


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What the tree saved and cost so far: tokens found in it, tokens that had to be prefilled, tokens evicted."""

    hit_tokens: int = 0
    missed_tokens: int = 0
    evicted_tokens: int = 0


class PrefixTree:
    """Prefix nodes over one page pool, with reference counts and eviction of the least recently used.

    Unreferenced nodes wait in `_idle`, oldest first. A path is released deepest node first and whoever holds a node holds its ancestors,
    so a node always stands behind its descendants there: the oldest idle node is a leaf, and eviction never orphans one.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.stats = PrefixStats()
        self._top: dict[tuple[int, ...], PrefixNode] = {}
        self._idle: dict[PrefixNode, None] = {}
        self._idle_pages = 0
        self._clock = 0

    @property
    def room_pages(self) -> int:
        """Pages that can be had: free ones and those of unreferenced nodes."""
        return self.pool.available + self._idle_pages

    def path_pages(self, segments: tuple[tuple[int, ...], ...]) -> int:
        """Pages that a path takes when none of it is in the tree."""
        return sum(self.pool.pages_for(len(segment)) for segment in segments)

    def acquire(self, segments: tuple[tuple[int, ...], ...], spare_pages: int = 0) -> list[PrefixNode] | None:
        """The path of nodes for `segments`, each held once more; missing nodes are made (with pages, nothing stored).

        Returns None and changes nothing unless the missing pages and `spare_pages` more can be had together; evicts what the path needs.
        Raises ValueError for a path that the pool could never hold.
        """
        if self.path_pages(segments) > self.pool.page_count:
            raise ValueError(f"a path of {self.path_pages(segments)} pages in a pool of {self.pool.page_count}")
        path = self._match(segments)
        missing = segments[len(path) :]
        usable = self.room_pages - sum(len(node.pages) for node in path if not node.refs)
        if self.path_pages(missing) + spare_pages > usable:
            return None
        for node in path:
            self._hold(node)
        found_tokens = sum(len(node.token_ids) for node in path)
        self.make_room(self.path_pages(missing))
        for segment in missing:
            path.append(self._grow(path[-1] if path else None, segment))
        self._count(hit_tokens=found_tokens, missed_tokens=sum(map(len, missing)))
        return path

    def release(self, path: list[PrefixNode]) -> None:
        """Let go of a path that `acquire` returned. Complete nodes stay cached; one left half prefilled by its last user is dropped."""
        self._clock += 1
        for node in reversed(path):
            assert node.refs > 0, "a path was released twice"
            node.refs -= 1
            node.last_used = self._clock
            if node.refs:
                continue
            if node.complete:
                self._idle[node] = None
                self._idle_pages += len(node.pages)
            else:
                self._remove(node)

    def make_room(self, count: int) -> bool:
        """Evict unreferenced leaves, least recently used first, until `count` pages are free; False (nothing evicted) if they cannot be."""
        if count > self.room_pages:
            return False
        while self.pool.available < count:
            self._evict(next(iter(self._idle)))
        return True

    def clear(self) -> None:
        """Evict every unreferenced node."""
        while self._idle:
            self._evict(next(iter(self._idle)))

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node, parents before children."""
        stack = list(self._top.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Fail unless counts, pages, order and links agree with each other."""
        nodes = list(self.nodes())
        pages = [page for node in nodes for page in node.pages]
        assert len(set(pages)) == len(pages), "two nodes share a page"
        assert not set(pages) & self.pool.free_pages(), "a node holds a free page"
        for node in nodes:
            assert len(node.pages) == self.pool.pages_for(len(node.token_ids)), "a node's pages do not match its tokens"
            assert 0 <= node.stored <= len(node.token_ids), f"{node.stored} tokens stored of {len(node.token_ids)}"
            assert node.start == sum(len(above.token_ids) for above in node.ancestors), "a node starts at the wrong position"
            assert node.parent is None or node.refs <= node.parent.refs, "a node is held without its parent"
            assert not node.stored or all(above.complete for above in node.ancestors), "a node was prefilled before its parent"
            assert (node.refs == 0) == (node in self._idle), "the idle list and the reference counts disagree"
        assert all(node.complete for node in self._idle), "an incomplete node is cached"
        assert sum(len(node.pages) for node in self._idle) == self._idle_pages, "idle pages are miscounted"
        order = [node.last_used for node in self._idle]
        assert order == sorted(order), "the idle list is out of order"

    def _match(self, segments: tuple[tuple[int, ...], ...]) -> list[PrefixNode]:
        path: list[PrefixNode] = []
        children = self._top
        for segment in segments:
            node = children.get(segment)
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def _hold(self, node: PrefixNode) -> None:
        if not node.refs:
            del self._idle[node]
            self._idle_pages -= len(node.pages)
        node.refs += 1

    def _grow(self, parent: PrefixNode | None, segment: tuple[int, ...]) -> PrefixNode:
        start = parent.start + len(parent.token_ids) if parent else 0
        node = PrefixNode(parent, segment, start, self.pool.allocate(self.pool.pages_for(len(segment))), refs=1)
        self._siblings(node)[segment] = node
        return node

    def _siblings(self, node: PrefixNode) -> dict[tuple[int, ...], PrefixNode]:
        return node.parent.children if node.parent else self._top

    def _evict(self, node: PrefixNode) -> None:
        del self._idle[node]
        self._idle_pages -= len(node.pages)
        self._count(evicted_tokens=len(node.token_ids))
        self._remove(node)

    def _remove(self, node: PrefixNode) -> None:
        assert not node.children, "a node was removed from above its children"
        del self._siblings(node)[node.token_ids]
        self.pool.free(node.pages)
        node.pages = []

    def _count(self, hit_tokens: int = 0, missed_tokens: int = 0, evicted_tokens: int = 0) -> None:
        old = self.stats
        self.stats = replace(
            old,
            hit_tokens=old.hit_tokens + hit_tokens,
            missed_tokens=old.missed_tokens + missed_tokens,
            evicted_tokens=old.evicted_tokens + evicted_tokens,
        )
