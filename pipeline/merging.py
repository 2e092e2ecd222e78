"""All answers of a run in order of key. Every shard lies in that order, so they are merged, a few rows of each in memory at a time.

More shards than may be open at once are merged by parts first, into a temporary folder.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.pipeline.schema import KEY
from askmany.pipeline.storage import ObjectStore

Row = dict[str, Any]
Opener = Callable[[], IO[bytes]]
FAN, BATCH_ROWS = 64, 256
_key = itemgetter(*KEY)


def sorted_rows(store: ObjectStore, names: Sequence[str], fan: int = FAN) -> Iterator[Row]:
    """The rows of these shards by document, question and chunk."""
    openers: list[Opener] = [partial(store.open, name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        level = 0
        while len(openers) > fan:
            parts = [openers[start : start + fan] for start in range(0, len(openers), fan)]
            paths = [f"{folder}/{level}-{number}" for number in range(len(parts))]
            for part, path in zip(parts, paths, strict=True):
                _write_merged(part, path)
            openers = [partial(_local, path) for path in paths]
            level += 1
        yield from _merged(openers)


def by_document(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """All rows of one document after another's, from rows in order of key."""
    for _, group in groupby(rows, key=itemgetter("doc_id")):
        yield list(group)


def _merged(openers: Sequence[Opener]) -> Iterator[Row]:
    return heapq.merge(*map(_rows, openers), key=_key)


def _rows(opener: Opener) -> Iterator[Row]:
    with opener() as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS):
            yield from batch.to_pylist()


def _local(path: str) -> IO[bytes]:
    return open(path, "rb")


def _write_merged(openers: Sequence[Opener], path: str) -> None:
    with openers[0]() as stream:
        schema = pq.ParquetFile(stream).schema_arrow.remove_metadata()
    rows = _merged(openers)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, 4 * BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
