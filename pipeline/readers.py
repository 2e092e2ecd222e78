"""From a file name to its rows: which reader serves a file, how files are cut into spans for CPU tasks, and how documents are read again.

`plan_spans` cuts, `scan` reads a span once, `Fetcher` reads single documents by their locators. Formats themselves live in `lines`,
`tables` and `whole_files`.
"""

from __future__ import annotations

import csv
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import pyarrow as pa
import zstandard

from askmany.engine.errors import ConfigError, DocumentError
from askmany.pipeline import lines, tables, whole_files
from askmany.pipeline.config import InputConfig
from askmany.pipeline.documents import WHOLE_FILE, DeadLetter, Format, Locator, Row, SourceDocument, to_document
from askmany.pipeline.retry import Retrier
from askmany.pipeline.spool import Spool, is_compressed, open_decompressed
from askmany.pipeline.storage import InputFile, read_range

FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: Mapping[str, Format] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "pq": "parquet",
    "csv": "csv",
    "txt": "txt",
    "text": "txt",
    "md": "md",
    "markdown": "md",
    "html": "html",
    "htm": "html",
}
REFUSED = {"pdf": "PDF", "docx": "Word", "doc": "Word", "odt": "OpenDocument", "pptx": "PowerPoint", "xlsx": "Excel", "epub": "EPUB"}
LOOK_AT_ROWS = 20
GAP_BYTES = 64 << 10  # unwanted bytes that are cheaper to read than another request
STRETCH_BYTES = 8 << 20
UNREADABLE = (OSError, EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException, csv.Error, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a file for one CPU task: bytes [start, stop) of a plain jsonl, row groups [start, stop) of a Parquet file, else all."""

    uri: str
    name: str
    format: Format
    start: int
    stop: int
    size: int


def format_of(uri: str, declared: str) -> Format:
    """The format of a file by its ending, or as declared; PDF and office files are refused by name."""
    ending = uri.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
    if ending in REFUSED:
        raise ConfigError(f"{uri}: {REFUSED[ending]} files are not read; convert it to text, Markdown or HTML first")
    if declared != "auto":
        return cast(Format, declared)
    if ending not in ENDINGS:
        raise ConfigError(f"{uri}: format not known by its name; name it with input.format ({', '.join(FORMATS)}) or narrow input.uri")
    return ENDINGS[ending]


def plan_spans(file: InputFile, columns: InputConfig, span_bytes: int) -> list[Span]:
    """Cut one file into spans of about `span_bytes`; only plain jsonl and Parquet can be cut."""
    kind = format_of(file.uri, columns.format)
    if kind == "parquet":
        return _row_group_spans(file, columns, span_bytes)
    if kind == "jsonl" and not is_compressed(file.uri):
        starts = range(0, max(file.size, 1), span_bytes)
        return [Span(file.uri, file.name, kind, s, min(s + span_bytes, file.size), min(span_bytes, file.size - s)) for s in starts]
    return [Span(file.uri, file.name, kind, 0, 1 << 62, file.size)]


def _row_group_spans(file: InputFile, columns: InputConfig, span_bytes: int) -> list[Span]:
    try:
        groups = tables.row_groups(file.uri, columns.storage_options)
    except UNREADABLE as error:
        raise ConfigError(f"{file.uri}: cannot be read as Parquet: {error}") from error
    spans, start, size = [], 0, 0
    for index, (_, group_bytes) in enumerate(groups):
        size += group_bytes
        if size >= span_bytes or index == len(groups) - 1:
            spans.append(Span(file.uri, file.name, "parquet", start, index + 1, size))
            start, size = index + 1, 0
    return spans


def columns_of(file: InputFile, columns: InputConfig) -> list[str] | None:
    """The columns a file offers: Parquet schema, CSV header, keys of the first JSON objects; None where it cannot be told."""
    kind = format_of(file.uri, columns.format)
    options = columns.storage_options
    try:
        if kind == "parquet":
            return tables.column_names(file.uri, options)
        if kind == "csv":
            with open_decompressed(file.uri, options) as stream:
                header = next(lines.csv_records(stream), None)
            return lines.parse_header(header[2]) if header else None
        if kind == "jsonl":
            rows = itertools.islice(lines.scan_jsonl(file.uri, file.name, 0, 1 << 62, options), LOOK_AT_ROWS)
            names = [name for row in rows if isinstance(row, Row) for name in row.values]
            return list(dict.fromkeys(names)) or None
    except UNREADABLE as error:
        raise ConfigError(f"{file.uri}: cannot be read as {kind}: {error}") from error
    return ["doc_id", "text"]


def scan(span: Span, columns: InputConfig) -> Iterator[SourceDocument | DeadLetter]:
    """Every document of a span, and a dead letter for every row that is none. A file that breaks off yields one for the rest."""
    place = Locator(span.uri, span.name, span.format, span.start, 0, 0)
    try:
        for row in _rows(span, columns):
            place = row.locator
            yield to_document(row, columns) if isinstance(row, Row) else row
    except ConfigError:  # of this machine rather than the file, such as a driver that is not installed
        raise
    except Exception as error:  # whatever one file does to the libraries that read it, the others are read
        rest = Locator(span.uri, span.name, span.format, place.start + place.length, 0, place.line + 1)
        what = str(error) if isinstance(error, UNREADABLE) else f"{type(error).__name__}: {error}"
        yield DeadLetter(rest, f"the file cannot be read from here on: {what}")


def _rows(span: Span, columns: InputConfig) -> Iterator[Row | DeadLetter]:
    options = columns.storage_options
    if span.format == "jsonl":
        return lines.scan_jsonl(span.uri, span.name, span.start, span.stop, options)
    if span.format == "csv":
        return lines.scan_csv(span.uri, span.name, options)
    if span.format == "parquet":
        return tables.scan_parquet(span.uri, span.name, span.start, span.stop, columns.wanted, options)
    return iter([whole_files.read_whole(Locator(span.uri, span.name, span.format, 0, span.size, 1), options)])


class Fetcher:
    """Reads documents again by locator. Safe to share between threads; `close` removes its temporary copies."""

    def __init__(self, columns: InputConfig, retrier: Retrier | None = None) -> None:
        self._columns = columns
        self._retrier = retrier or Retrier()
        self._options = columns.storage_options
        self._spool = Spool(self._options)
        self._headers: dict[str, list[str]] = {}

    def fetch(self, locators: Sequence[Locator]) -> Iterator[tuple[Locator, SourceDocument | DocumentError]]:
        """Each locator's document, or the error that says why it cannot be had; file by file, so not in the order asked for."""
        for (uri, kind), group in itertools.groupby(sorted(locators, key=_reading_order), key=lambda loc: (loc.uri, loc.format)):
            if kind == "parquet":
                yield from self._fetch_parquet(uri, list(group))
            elif kind in WHOLE_FILE or is_compressed(uri):
                yield from ((locator, self._attempt(locator)) for locator in group)
            else:
                for near in neighbours(list(group)):
                    yield from self._fetch_near(near)

    def close(self) -> None:
        self._spool.close()

    def _fetch_parquet(self, uri: str, locators: list[Locator]) -> Iterator[tuple[Locator, SourceDocument | DocumentError]]:
        missing = dict.fromkeys(locators)
        reason = "the file has changed"
        try:
            for row in tables.fetch_parquet(uri, locators, self._columns.wanted, self._options):
                del missing[row.locator]
                yield row.locator, self._document(row)
        except UNREADABLE as error:
            reason = str(error)
        for locator in missing:
            yield locator, DocumentError(f"{locator.place()}: cannot be read again: {reason}")

    def _fetch_near(self, near: Sequence[Locator]) -> Iterator[tuple[Locator, SourceDocument | DocumentError]]:
        """Rows of one stretch of a file by one read; each by itself when that one fails, so that only what is unreadable is lost."""
        start, stop = near[0].start, max(locator.start + locator.length for locator in near)
        try:
            data = self._retrier.call("read", lambda: read_range(near[0].uri, start, stop - start, self._options))
        except UNREADABLE:
            yield from ((locator, self._attempt(locator)) for locator in near)
            return
        for locator in near:
            at = locator.start - start
            yield locator, self._attempt(locator, data[at : at + locator.length])

    def _attempt(self, locator: Locator, data: bytes | None = None) -> SourceDocument | DocumentError:
        try:
            row = self._retrier.call("read", lambda: self._row(locator)) if data is None else self._parse(locator, data)
            return self._document(row)
        except UNREADABLE as error:
            return DocumentError(f"{locator.place()}: cannot be read again: {error}")

    def _row(self, locator: Locator) -> Row | DeadLetter:
        if locator.format in WHOLE_FILE:
            return whole_files.read_whole(locator, self._options)
        return self._parse(locator, self._bytes(locator))

    def _parse(self, locator: Locator, data: bytes) -> Row | DeadLetter:
        if locator.format == "jsonl":
            return lines.parse_jsonl(locator, data)
        return lines.parse_csv(locator, self._header(locator.uri), data)

    def _bytes(self, locator: Locator) -> bytes:
        if not is_compressed(locator.uri):
            return read_range(locator.uri, locator.start, locator.length, self._options)
        with self._spool.open(locator.uri) as stream:
            stream.seek(locator.start)
            return stream.read(locator.length)

    def _header(self, uri: str) -> list[str]:
        if uri not in self._headers:
            with open_decompressed(uri, self._options) as stream:
                self._headers[uri] = lines.parse_header(next(lines.csv_records(stream), (0, 1, b""))[2])
        return self._headers[uri]

    def _document(self, row: Row | DeadLetter) -> SourceDocument | DocumentError:
        document = to_document(row, self._columns) if isinstance(row, Row) else row
        return DocumentError(f"{row.locator.place()}: {document.reason}") if isinstance(document, DeadLetter) else document


def neighbours(locators: Sequence[Locator]) -> Iterator[list[Locator]]:
    """Rows of one file in order of place, cut where the next is far away or the stretch is long enough."""
    near: list[Locator] = []
    stop = 0
    for locator in locators:
        end = locator.start + locator.length
        if near and (locator.start > stop + GAP_BYTES or end > near[0].start + STRETCH_BYTES):
            yield near
            near = []
        near.append(locator)
        stop = max(stop, end)
    if near:
        yield near


def _reading_order(locator: Locator) -> tuple[str, str, int, int]:
    return locator.uri, locator.format, locator.start, locator.length
