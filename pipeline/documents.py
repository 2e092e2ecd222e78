"""A document as the pipeline knows it: where it stands, what its row says, and the text that comes of it.

`Row` is what a reader yields, `SourceDocument` what the column mapping makes of a row, `DeadLetter` what is kept of a row that is no
document. Only `Locator` travels: a worker reads the text again by it. This module opens no file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from askmany.pipeline.config import InputConfig
from askmany.pipeline.text import clean

Format = Literal["jsonl", "csv", "parquet", "txt", "md", "html"]
WHOLE_FILE: frozenset[str] = frozenset({"txt", "md", "html"})


@dataclass(frozen=True, slots=True)
class Locator:
    """Where one document stands. Line formats: `start` and `length` in bytes of the decompressed file. Parquet: `start` is the row
    group, `length` the row inside it. Whole files: 0 and the size. `line` counts from 1, 0 where unknown, and is for people; Parquet
    counts rows."""

    uri: str
    name: str
    format: Format
    start: int
    length: int
    line: int

    def place(self) -> str:
        """`file:line` for messages."""
        if self.format in WHOLE_FILE:
            return self.uri
        if self.format == "parquet":
            return f"{self.uri} (row group {self.start}, row {self.length})"
        return f"{self.uri}:{self.line}" if self.line else f"{self.uri} (byte {self.start})"


@dataclass(frozen=True, slots=True)
class Row:
    """One input row as its reader found it: column values and the flags of what had to be repaired."""

    locator: Locator
    values: Mapping[str, Any]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row, or the rest of a file, that is no document: kept by place and reason, never lost, never fatal."""

    locator: Locator
    reason: str
    doc_id: str | None = None


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """One document with its text made safe. `questions` is the raw value of the per-document column, `keep` the columns passed through."""

    doc_id: str
    text: str
    questions: Any
    keep: Mapping[str, str | None]
    flags: tuple[str, ...]
    locator: Locator

    @property
    def content_hash(self) -> str:
        """32 hex digits over the text and the document's own questions: what the answers depend on."""
        own = json.dumps(self.questions, sort_keys=True, ensure_ascii=True, default=str)
        return hashlib.blake2b(f"{own}\0{self.text}".encode(), digest_size=16).hexdigest()


def to_document(row: Row, columns: InputConfig) -> SourceDocument | DeadLetter:
    """Apply the column mapping. A whole file is its own document: its id is its name, its text the column `text`."""
    whole = row.locator.format in WHOLE_FILE
    id_column, text_column = ("doc_id", "text") if whole else (columns.id, columns.text)
    for column in (id_column, text_column):
        if column not in row.values:
            return DeadLetter(row.locator, f"no column {column!r}; the row has {', '.join(map(repr, row.values)) or 'none'}")
    doc_id = row.values[id_column]
    name = "" if isinstance(doc_id, bool) or not isinstance(doc_id, (str, int)) else clean(str(doc_id)).text
    if not name:
        return DeadLetter(row.locator, f"column {id_column!r} is {_short(doc_id)}; a document needs a text or a whole number there")
    text = row.values[text_column]
    if text is not None and not isinstance(text, str):
        return DeadLetter(row.locator, f"column {text_column!r} is {_short(text)}; it must be text", name)
    cleaned = clean(text or "")
    questions = row.values.get(columns.questions) if columns.questions else None
    keep = {column: _kept(row.values.get(column)) for column in columns.keep}
    return SourceDocument(name, cleaned.text, questions, keep, (*row.flags, *cleaned.flags), row.locator)


def named_twice(names: Iterable[str]) -> str | None:
    """The first name that has come before; which of the two is meant nobody can tell."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _kept(value: Any) -> str | None:
    """A passed-through value as text: text as it is, anything else as JSON."""
    if value is None:
        return None
    return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).text


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
