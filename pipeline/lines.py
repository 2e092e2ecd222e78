"""Readers of line formats: JSON lines and CSV, plain or compressed. A record is found again by its byte range.

A CSV record may hold line ends inside quotes; the quotes are followed byte by byte, so that its range is exact.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from askmany.pipeline.documents import DeadLetter, Locator, Row, named_twice
from askmany.pipeline.spool import open_decompressed
from askmany.pipeline.text import decode_record

_BOM = b"\xef\xbb\xbf"
_QUOTE, _COMMA = ord('"'), b","


def scan_jsonl(uri: str, name: str, start: int, stop: int, options: Mapping[str, Any]) -> Iterator[Row | DeadLetter]:
    """Rows of the lines that begin in bytes [start, stop) of the decompressed file. The line is 0, unknown, where `start` is not."""
    with open_decompressed(uri, options) as stream:
        first_line = 0 if start else 1
        if start:
            stream.seek(start - 1)
            start += len(stream.readline()) - 1
        for number, (position, data) in enumerate(_lines(stream, start, stop)):
            if data.strip(_BOM + b" \t\r\n"):
                line = first_line and first_line + number
                yield parse_jsonl(Locator(uri, name, "jsonl", position, len(data), line), data)


def _lines(stream: IO[bytes], position: int, stop: int) -> Iterator[tuple[int, bytes]]:
    while position < stop and (data := stream.readline()):
        yield position, data
        position += len(data)


def parse_jsonl(locator: Locator, data: bytes) -> Row | DeadLetter:
    """One line as a row, or a dead letter that says what is wrong with it."""
    decoded = decode_record(data.removeprefix(_BOM))
    try:
        values = json.loads(decoded.text)
    except (ValueError, RecursionError) as error:
        return DeadLetter(locator, f"malformed JSON: {error}")
    if not isinstance(values, dict):
        return DeadLetter(locator, f"a JSON {type(values).__name__} where an object is needed")
    return Row(locator, values, decoded.flags)


def scan_csv(uri: str, name: str, options: Mapping[str, Any]) -> Iterator[Row | DeadLetter]:
    """Rows of a CSV file with a header; line numbers are those at which records begin."""
    with open_decompressed(uri, options) as stream:
        records = csv_records(stream)
        header = next(records, None)
        if header is None:
            return
        columns = parse_header(header[2])
        for position, line, data in records:
            if data.strip():
                yield parse_csv(Locator(uri, name, "csv", position, len(data), line), columns, data)


def csv_records(stream: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """(byte position, line, bytes) of each record, the header first."""
    position, begun, pending, inside = 0, 1, b"", False
    for line, data in enumerate(iter(stream.readline, b""), start=1):
        inside = _ends_inside_quotes(data if pending or position else data.removeprefix(_BOM), inside)
        pending += data
        if not inside:
            yield position, begun, pending
            position, begun, pending = position + len(pending), line + 1, b""
    if pending:
        yield position, begun, pending


def _ends_inside_quotes(data: bytes, inside: bool) -> bool:
    """Whether a quoted field is still open at the end of this line; a quote opens a field only where the field begins."""
    at = 0
    while True:
        if not inside:
            inside = at < len(data) and data[at] == _QUOTE
            if inside:
                at += 1
            else:
                comma = data.find(_COMMA, at)
                if comma < 0:
                    return False
                at = comma + 1
                continue
        closing = data.find(b'"', at)
        if closing < 0:
            return True
        if data[closing + 1 : closing + 2] == b'"':
            at = closing + 2
            continue
        comma = data.find(_COMMA, closing + 1)
        if comma < 0:
            return False
        at, inside = comma + 1, False


def parse_header(data: bytes) -> list[str]:
    """The column names of a CSV header. `csv.Error` when it is malformed or names a column twice; nameless columns may be many."""
    columns = _fields(decode_record(data.removeprefix(_BOM)).text)
    twice = named_twice(name for name in columns if name)
    if twice is not None:
        raise csv.Error(f"column {twice!r} is named twice in the header")
    return columns


def parse_csv(locator: Locator, columns: list[str], data: bytes) -> Row | DeadLetter:
    """One record as a row, or a dead letter when it has not as many fields as the header."""
    decoded = decode_record(data)
    try:
        fields = _fields(decoded.text)
    except csv.Error as error:
        return DeadLetter(locator, f"malformed CSV: {error}")
    if len(fields) != len(columns):
        return DeadLetter(locator, f"malformed CSV: {len(fields)} fields where the header has {len(columns)}")
    return Row(locator, dict(zip(columns, fields, strict=True)), decoded.flags)


def _fields(text: str) -> list[str]:
    csv.field_size_limit(sys.maxsize)  # the default refuses fields over 128 KiB: many documents
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    if len(rows) > 1:
        raise csv.Error("a carriage return outside quotes; lines must end in LF or CR LF")
    return rows[0] if rows else []
