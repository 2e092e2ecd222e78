"""The static device buffers that describe one step of the split layout to the kernels: who reads which pages, and how many of them.

Sizes are fixed at construction, so that a captured graph may hold the addresses; contents change freely, by `load` from the host or by
any kernel that writes them in the graph. Knows nothing of requests or schedulers.

Letters: N prefix nodes, R streams, T rows of the step. A *page* is `page_size` consecutive slots of the KV cache. Every page list is a
range of the one flat buffer `page_ids`. A stream with a row count of 0 is dead: it reads nothing and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.kernels.layout import SplitBatch

LEVELS = 3  # prefix levels above a stream: instruction, document, question group


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most of everything one step may hold."""

    rows: int
    streams: int
    nodes: int
    pages: int  # entries of `page_ids`: the page lists of all nodes and streams together

    def __post_init__(self) -> None:
        for name in ("rows", "streams", "nodes", "pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"StepLimits.{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A prefix node: `length` tokens in `pages`."""

    length: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """Rows `row .. row + row_count - 1` of the step, the last tokens of a private run of `length` tokens in `pages`, below `path`.
    Row `row + i` sees the first `length - row_count + i + 1` of them (none if that is not positive) and all of the nodes of `path`.
    `path` lists the indices of up to three nodes.
    """

    row: int
    row_count: int
    length: int
    pages: Sequence[int]
    path: Sequence[int] = ()


class StepTables:
    """Static int32 device buffers: what the host writes and the plan kernels read."""

    def __init__(self, limits: StepLimits, page_size: int, device: torch.device) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.limits = limits
        self.page_size = page_size
        self.device = device

        def buffer(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.page_ids = buffer(limits.pages)
        self.node_page_start = buffer(limits.nodes)
        self.node_length = buffer(limits.nodes)
        self.stream_page_start = buffer(limits.streams)
        self.stream_length = buffer(limits.streams)
        self.stream_row = buffer(limits.streams)
        self.stream_row_count = buffer(limits.streams)
        self.stream_path = buffer(limits.streams, LEVELS, fill=-1)

    def load(self, nodes: Sequence[NodeEntry], streams: Sequence[StreamEntry]) -> None:
        """Replace the whole description. Raises ValueError, naming the entry, for anything that does not fit; then nothing changes."""
        host = _pack(nodes, streams, self.limits, self.page_size)
        for name, values in host.items():
            target: Tensor = getattr(self, name)
            staged = torch.tensor(values, dtype=torch.int32).reshape(-1, *target.shape[1:])
            target[: staged.shape[0]].copy_(staged, non_blocking=True)
        self.stream_row_count[len(streams) :].zero_()


def _pack(nodes: Sequence[NodeEntry], streams: Sequence[StreamEntry], limits: StepLimits, page_size: int) -> dict[str, list[int]]:
    """The buffers' contents as lists, checked against the limits."""
    _check("nodes", len(nodes), limits.nodes)
    _check("streams", len(streams), limits.streams)
    page_ids: list[int] = []
    starts: list[int] = []
    for kind, index, entry in [("node", i, n) for i, n in enumerate(nodes)] + [("stream", i, s) for i, s in enumerate(streams)]:
        needed = -(-entry.length // page_size)
        if entry.length < 0 or len(entry.pages) < needed:
            raise ValueError(f"{kind} {index} has {entry.length} tokens but {len(entry.pages)} pages of {page_size}")
        starts.append(len(page_ids))
        page_ids.extend(entry.pages)
    _check("page entries", len(page_ids), limits.pages)
    for index, stream in enumerate(streams):
        _check_stream(index, stream, len(nodes), limits)
    return {
        "page_ids": page_ids,
        "node_page_start": starts[: len(nodes)],
        "node_length": [n.length for n in nodes],
        "stream_page_start": starts[len(nodes) :],
        "stream_length": [s.length for s in streams],
        "stream_row": [s.row for s in streams],
        "stream_row_count": [s.row_count for s in streams],
        "stream_path": [n for s in streams for n in (*s.path, *[-1] * (LEVELS - len(s.path)))],
    }


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"{count} {what} exceed the capacity of {limit}")


def _check_stream(index: int, stream: StreamEntry, node_count: int, limits: StepLimits) -> None:
    if stream.row_count < 0 or stream.row < 0 or stream.row + stream.row_count > limits.rows:
        raise ValueError(f"stream {index} covers rows {stream.row} to {stream.row + stream.row_count}, capacity {limits.rows}")
    if len(stream.path) > LEVELS or len(set(stream.path)) != len(stream.path):
        raise ValueError(f"stream {index} has the path {list(stream.path)}: at most {LEVELS} different nodes")
    if any(not 0 <= node < node_count for node in stream.path):
        raise ValueError(f"stream {index} has the path {list(stream.path)} but there are {node_count} nodes")


def entries_of(batch: SplitBatch, page_size: int) -> tuple[list[NodeEntry], list[StreamEntry]]:
    """Nodes and streams of a `SplitBatch`: each shared item is a node, each private item a stream.

    Raises ValueError if slots do not form whole pages or if only some rows of a private item see a shared item.
    """
    nodes = [NodeEntry(item.slots.shape[0], pages_of(item.slots, page_size)) for item in batch.shared]
    seen = [set(item.rows.tolist()) for item in batch.shared]
    streams = []
    for index, item in enumerate(batch.private):
        rows = set(range(item.row_start, item.row_start + item.row_count))
        path = [node for node, members in enumerate(seen) if rows & members]
        if any(not rows <= seen[node] for node in path):
            raise ValueError(f"private item {index}: only some of its rows see one of the shared items {path}")
        streams.append(StreamEntry(item.row_start, item.row_count, item.slots.shape[0], pages_of(item.slots, page_size), path))
    return nodes, streams


def pages_of(slots: Tensor, page_size: int) -> list[int]:
    """The page ids of a list of slots [L], which must fill pages in order from each page's first slot."""
    offsets = torch.arange(slots.shape[0], device=slots.device) % page_size
    pages = (slots - offsets)[::page_size]
    whole = pages.repeat_interleave(page_size)[: slots.shape[0]] + offsets
    if bool((whole != slots).any()) or bool((pages % page_size != 0).any()):
        raise ValueError(f"the slots do not fill pages of {page_size} in order")
    return [int(page) for page in (pages // page_size).tolist()]
