"""The Parquet reader: a document is found again by its row group and its row in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.pipeline.documents import Locator, Row
from askmany.pipeline.storage import open_binary

_ROWS_AT_ONCE = 64


def row_groups(uri: str, options: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(rows, uncompressed bytes) of each row group."""
    with open_binary(uri, options) as stream:
        metadata = pq.ParquetFile(stream).metadata
        return [(metadata.row_group(i).num_rows, metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups)]


def column_names(uri: str, options: Mapping[str, Any]) -> list[str]:
    """The top-level columns of the file."""
    with open_binary(uri, options) as stream:
        return list(pq.ParquetFile(stream).schema_arrow.names)


def scan_parquet(uri: str, name: str, start: int, stop: int, columns: Sequence[str], options: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of row groups [start, stop), `columns` alone (those the file has). `line` counts rows from the first row group read."""
    line = 0
    with open_binary(uri, options) as stream:
        file = pq.ParquetFile(stream)
        wanted = [column for column in file.schema_arrow.names if column in columns]
        for group in range(start, stop):
            for index, values in enumerate(_rows(file, group, wanted)):
                line += 1
                yield Row(Locator(uri, name, "parquet", group, index, line), values)


def fetch_parquet(uri: str, locators: Sequence[Locator], columns: Sequence[str], options: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of these locators of one file, each row group read once; in order of row group and row. OSError when one is gone."""
    wanted: dict[int, dict[int, Locator]] = {}
    for locator in locators:
        wanted.setdefault(locator.start, {})[locator.length] = locator
    with open_binary(uri, options) as stream:
        file = pq.ParquetFile(stream)
        present = [column for column in file.schema_arrow.names if column in columns]
        for group in sorted(wanted):
            if group >= file.num_row_groups:
                raise OSError(f"{uri}: no row group {group}; the file has changed")
            rows = wanted[group]
            for index, values in enumerate(_rows(file, group, present)):
                if index in rows:
                    yield Row(rows[index], values)


def _rows(file: pq.ParquetFile, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group], columns=columns):
        yield from pa.Table.from_batches([batch]).to_pylist()
