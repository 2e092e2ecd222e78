"""Large tables in little memory: columns are copied one at a time, and what is freed goes back to the system at once.

A driver plans millions of documents; a second copy of them all, or the holes that the first one leaves in the heap, would be most of what
it needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa


def reordered(columns: dict[str, pa.ChunkedArray], order: pa.Array, names: Iterable[str]) -> pa.Table:
    """The rows `order` of the columns `names`. The mapping is emptied: each column goes when its copy is there."""
    done = {}
    for name in names:
        done[name] = columns.pop(name).take(order).combine_chunks()
        release()
    columns.clear()
    return pa.table(done)


def release() -> None:
    """Give freed memory back to the system."""
    pa.default_memory_pool().release_unused()
