"""Odd text made safe without being changed more than needed: every repair is counted and becomes a flag on the record.

Line ends, blanks, NUL, accents and their normal form stay as they are. Two things are repaired: a byte-order mark at the start is taken
off, and code points that UTF-8 cannot carry (lone surrogates) become U+FFFD.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SURROGATE = re.compile("[\ud800-\udfff]")
_NOTHING_TO_READ = re.compile("[\\s\ufeff\u200b-\u200f\u2060]*")
_BOM = "\ufeff"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class CleanText:
    """Text that encodes as UTF-8, and what was done to it: `surrogates_replaced:2`, `bytes_replaced:1`, `encoding:cp1252`."""

    text: str
    flags: tuple[str, ...] = ()


def clean(text: str) -> CleanText:
    """Take off a leading byte-order mark; replace and count lone surrogates."""
    text, surrogates = _SURROGATE.subn("\ufffd", text)
    flags = (f"surrogates_replaced:{surrogates}",) if surrogates else ()
    return CleanText(text.removeprefix(_BOM), flags)


def decode(data: bytes) -> CleanText:
    """The text of a whole text file: UTF-8, UTF-16 by its byte-order mark, else Windows-1252 or Latin-1 with a flag naming it."""
    encodings = ["utf-16"] if data.startswith(_UTF16_MARKS) else []
    for encoding in (*encodings, "utf-8-sig", "cp1252"):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        return CleanText(text, () if encoding == "utf-8-sig" else (f"encoding:{encoding}",))
    return CleanText(data.decode("latin-1"), ("encoding:latin-1",))


def decode_record(data: bytes) -> CleanText:
    """One record of a UTF-8 file; bytes that are not UTF-8 become U+FFFD, one for each such sequence, and are counted."""
    try:
        return CleanText(data.decode("utf-8"))
    except UnicodeDecodeError:
        text = data.decode("utf-8", errors="replace")
        replaced = text.count("\ufffd") - data.count("\ufffd".encode())
        return CleanText(text, (f"bytes_replaced:{replaced}",))


def is_blank(text: str) -> bool:
    """Nothing to read: empty, or white space and invisible marks alone."""
    return _NOTHING_TO_READ.fullmatch(text) is not None
