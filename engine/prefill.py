"""Which chunks of which prefixes go into a step. Reads nodes, writes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from askmany.engine.config import SchedulerLimits
from askmany.engine.prefix_tree import PrefixNode
from askmany.engine.request import DocumentState
from askmany.engine.step import PrefixChunk

MOST_CHUNKS = 64


def ready(document: DocumentState) -> bool:
    """Whether the document's whole prefix is stored, so that its streams may feed tokens."""
    return all(node.complete for node in document.path)


def plan_chunks(documents: Iterable[DocumentState], budget_tokens: int, limits: SchedulerLimits) -> tuple[PrefixChunk, ...]:
    """The next chunk of each document's first incomplete node, oldest document first, within `budget_tokens` and `MOST_CHUNKS`, for which
    devices make room.

    A node that several documents wait for appears once. In deterministic mode there is one chunk, from a multiple of `prefill_chunk`
    (counted from the node's first token) to the next one or the node's end, and none where it does not fit whole.
    """
    chunks: list[PrefixChunk] = []
    planned: set[PrefixNode] = set()
    for document in documents:
        node = next((node for node in document.path if not node.complete), None)
        if node is None or node in planned:
            continue
        size = min(limits.prefill_chunk, len(node.token_ids) - node.stored)
        if not limits.deterministic:
            size = min(size, budget_tokens)
        if not 0 < size <= budget_tokens:
            break
        planned.add(node)
        chunks.append(PrefixChunk(node, node.stored, node.stored + size))
        budget_tokens -= size
        if limits.deterministic or len(chunks) == MOST_CHUNKS:
            break
    return tuple(chunks)
