"""The Parquet reader: a document is found again by its row group and its row in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from askmany.pipeline.documents import Locator, Row, named_twice
from askmany.pipeline.storage import open_binary
from askmany.pipeline.text import decode_record

_ROWS_AT_ONCE = 64


def row_groups(uri: str, options: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(rows, uncompressed bytes) of each row group."""
    with open_binary(uri, options) as stream:
        metadata = pq.ParquetFile(stream).metadata
        return [(metadata.row_group(i).num_rows, metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups)]


def column_names(uri: str, options: Mapping[str, Any]) -> list[str]:
    """The top-level columns of the file. ArrowInvalid when one is named twice."""
    with open_binary(uri, options) as stream:
        return _names(pq.ParquetFile(stream))


def scan_parquet(uri: str, name: str, start: int, stop: int, columns: Sequence[str], options: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of row groups [start, stop), `columns` alone (those the file has). `line` counts rows from the first row group read."""
    line = 0
    with open_binary(uri, options) as stream:
        file = pq.ParquetFile(stream)
        wanted = [column for column in _names(file) if column in columns]
        for group in range(start, stop):
            for index, (values, flags) in enumerate(_rows(file, group, wanted)):
                line += 1
                yield Row(Locator(uri, name, "parquet", group, index, line), values, flags)


def fetch_parquet(uri: str, locators: Sequence[Locator], columns: Sequence[str], options: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of these locators of one file, each row group read once; in order of row group and row. OSError when one is gone."""
    wanted: dict[int, dict[int, Locator]] = {}
    for locator in locators:
        wanted.setdefault(locator.start, {})[locator.length] = locator
    with open_binary(uri, options) as stream:
        file = pq.ParquetFile(stream)
        present = [column for column in _names(file) if column in columns]
        for group in sorted(wanted):
            if group >= file.num_row_groups:
                raise OSError(f"{uri}: no row group {group}; the file has changed")
            rows = wanted[group]
            for index, (values, flags) in enumerate(_rows(file, group, present)):
                if index in rows:
                    yield Row(rows[index], values, flags)


def _names(file: pq.ParquetFile) -> list[str]:
    """The top-level columns. ArrowInvalid when one is named twice."""
    names: list[str] = file.schema_arrow.names
    twice = named_twice(names)
    if twice is not None:
        raise pa.ArrowInvalid(f"column {twice!r} is named twice in the schema")
    return names


def _rows(file: pq.ParquetFile, group: int, columns: list[str]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The values of each row, and the flags of what had to be repaired in them."""
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group], columns=columns):
        try:
            yield from ((values, ()) for values in batch.to_pylist())
        except UnicodeDecodeError:
            yield from map(_repaired, _as_bytes(batch).to_pylist(), itertools.repeat(_text_columns(batch)))


def _text_columns(batch: pa.RecordBatch) -> tuple[str, ...]:
    return tuple(field.name for field in batch.schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type))


def _as_bytes(batch: pa.RecordBatch) -> pa.Table:
    """The same rows with texts as the bytes they are stored as; texts inside lists and structs stay what they are."""
    table = pa.Table.from_batches([batch])
    for name in _text_columns(batch):
        column = table.column(name)
        binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        table = table.set_column(table.schema.get_field_index(name), name, column.cast(binary))
    return table


def _repaired(values: dict[str, Any], texts: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    decoded = {name: decode_record(values[name]) for name in texts if values[name] is not None}
    return {**values, **{name: text.text for name, text in decoded.items()}}, tuple(
        flag for text in decoded.values() for flag in text.flags
    )
