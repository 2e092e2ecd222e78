"""Fragments of grammar in EBNF, each with the length of the longest text it admits.

The building blocks of every typed answer: a `Piece` is made of others by putting them in a row, choosing among them and repeating them, so
that the longest legal answer is known when its grammar is. Nothing here knows a tokenizer or a grammar library; the text is the dialect of
EBNF that constrained-decoding libraries share (literals in quotes, classes in brackets, `{m,n}`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[int, int]  # code points, both ends included

ANY_CHARACTER: tuple[Interval, ...] = ((0, 0xD7FF), (0xE000, 0x10FFFF))


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` is an EBNF expression that can stand anywhere; `longest` the bytes of its longest text in UTF-8, None when there is none."""

    text: str
    longest: int | None


def literal(text: str) -> Piece:
    """Exactly this text."""
    return Piece('"' + "".join(_escaped(ord(character)) for character in text) + '"', len(text.encode()))


def characters(intervals: Iterable[Interval]) -> Piece:
    """One character out of these code points. ValueError when there is none."""
    kept = merged(intervals)
    if not kept:
        raise ValueError("a class without characters")
    barred = _gaps(kept) if kept[-1][1] == ANY_CHARACTER[-1][1] else ()
    return Piece(f"[^{_ranges(barred)}]" if barred else f"[{_ranges(kept)}]", len(chr(kept[-1][1]).encode()))


def sequence(*pieces: Piece) -> Piece:
    """One after another."""
    if len(pieces) == 1:
        return pieces[0]
    longest = [piece.longest for piece in pieces]
    total = None if None in longest else sum(length or 0 for length in longest)
    return Piece("(" + " ".join(piece.text for piece in pieces) + ")" if pieces else '""', total)


def either(*pieces: Piece) -> Piece:
    """Any one of them; each is listed once."""
    distinct = list({piece.text: piece for piece in pieces}.values())
    if len(distinct) == 1:
        return distinct[0]
    longest = [piece.longest for piece in distinct]
    most = None if None in longest else max(length or 0 for length in longest)
    return Piece("(" + " | ".join(piece.text for piece in distinct) + ")", most)


def repeated(piece: Piece, least: int, most: int | None) -> Piece:
    """`piece` from `least` to `most` times (None: without end)."""
    if most == 0:
        return literal("")
    if (least, most) == (1, 1):
        return piece
    count = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if count is None:
        count = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
    longest = 0 if piece.longest == 0 else None if most is None or piece.longest is None else most * piece.longest
    return Piece(f"({piece.text}){count}", longest)


def optional(piece: Piece) -> Piece:
    return repeated(piece, 0, 1)


def grammar(root: Piece, rules: Iterable[tuple[str, Piece]] = ()) -> str:
    """The whole grammar: the rule `root` and the named rules its text refers to, a line each."""
    return "".join(f"{name} ::= {piece.text}\n" for name, piece in (("root", root), *rules))


def with_leading_blank(text: str) -> str:
    """A grammar (of `grammar`) that also admits one blank in front."""
    return text.replace("root ::= ", 'root ::= "\\u0020"? unled\nunled ::= ', 1)


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same code points as ordered intervals that do not touch; surrogates, which are no characters, are left out."""
    result: list[Interval] = []
    for low, high in sorted(intervals):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(part for low, high in result for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)) if part[0] <= part[1])


def complement(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Every character that is in none of the intervals."""
    result: list[Interval] = []
    start = 0
    for low, high in merged(intervals):
        result.append((start, low - 1))
        start = high + 1
    return merged(part for part in (*result, (start, 0x10FFFF)) if part[0] <= part[1])


def _gaps(kept: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """What lies between ordered intervals and before them, surrogates included."""
    starts = (0, *(high + 1 for _, high in kept[:-1]))
    return tuple((start, low - 1) for start, (low, _) in zip(starts, kept, strict=True) if start < low)


def _ranges(intervals: Iterable[Interval]) -> str:
    return "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in intervals)


def _escaped(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
