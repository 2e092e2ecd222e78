"""Grammars of regular expressions, with Python's own reading of the pattern.

The whole answer must match. What a context-free grammar cannot say (look-around, back references, word borders) is refused by name.
Character classes are ASCII's: `\\d` is 0 to 9, `\\w` letters, digits and underscore. `.` is any character but a line break.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from askmany.engine.grammar_pieces import Interval, Piece, characters, complement, either, literal, merged, repeated, sequence

Alphabet = Callable[[tuple[Interval, ...]], Piece]

_DIGITS: tuple[Interval, ...] = ((48, 57),)
_WORD: tuple[Interval, ...] = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: tuple[Interval, ...] = ((9, 13), (32, 32))
_CATEGORIES: dict[Any, tuple[Interval, ...]] = {
    sre.CATEGORY_DIGIT: _DIGITS,
    sre.CATEGORY_NOT_DIGIT: complement(_DIGITS),
    sre.CATEGORY_WORD: _WORD,
    sre.CATEGORY_NOT_WORD: complement(_WORD),
    sre.CATEGORY_SPACE: _SPACE,
    sre.CATEGORY_NOT_SPACE: complement(_SPACE),
}
_REFUSED = {
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.GROUPREF: "a back reference",
    sre.GROUPREF_EXISTS: "a conditional group",
    sre.AT: "^, $ or \\b inside the pattern",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive repeat",
}


def regex(pattern: str, alphabet: Alphabet = characters) -> Piece:
    """The texts that match `pattern` from end to end. `alphabet` writes one character of a class (how a JSON string escapes it, say).

    ValueError says what is wrong with the pattern, or what of it no grammar can express.
    """
    try:
        parsed = sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    if parsed.state.flags & ~re.UNICODE:
        raise ValueError(f"{pattern!r} sets flags, which a grammar does not know")
    nodes = list(parsed)
    if nodes and nodes[0] in ((sre.AT, sre.AT_BEGINNING), (sre.AT, sre.AT_BEGINNING_STRING)):
        nodes = nodes[1:]
    if nodes and nodes[-1] in ((sre.AT, sre.AT_END), (sre.AT, sre.AT_END_STRING)):
        nodes = nodes[:-1]
    return _Translator(pattern, alphabet).row(nodes)


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as the answers' check uses it: ASCII classes."""
    return re.compile(pattern, re.ASCII)


class _Translator:
    def __init__(self, pattern: str, alphabet: Alphabet) -> None:
        self.pattern = pattern
        self.alphabet = alphabet

    def row(self, nodes: Any) -> Piece:
        pieces = [self._one(operation, argument) for operation, argument in nodes]
        return sequence(*pieces) if pieces else literal("")

    def _one(self, operation: Any, argument: Any) -> Piece:
        if operation in _REFUSED:
            raise ValueError(f"{self.pattern!r} uses {_REFUSED[operation]}, which a grammar cannot express")
        if operation is sre.LITERAL:
            return self.alphabet(((argument, argument),))
        if operation is sre.NOT_LITERAL:
            return self.alphabet(complement([(argument, argument)]))
        if operation is sre.ANY:
            return self.alphabet(complement([(10, 10)]))
        if operation is sre.IN:
            return self.alphabet(_class(argument))
        if operation is sre.BRANCH:
            return either(*(self.row(branch) for branch in argument[1]))
        if operation is sre.SUBPATTERN:
            _, added, removed, nodes = argument
            if added or removed:
                raise ValueError(f"{self.pattern!r} sets flags, which a grammar does not know")
            return self.row(nodes)
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, nodes = argument
            return repeated(self.row(nodes), int(least), None if most is sre.MAXREPEAT else int(most))
        raise ValueError(f"{self.pattern!r} uses {str(operation).lower()}, which a grammar cannot express")


def _class(items: Any) -> tuple[Interval, ...]:
    intervals: list[Interval] = []
    negated = False
    for operation, argument in items:
        if operation is sre.NEGATE:
            negated = True
        elif operation is sre.LITERAL:
            intervals.append((argument, argument))
        elif operation is sre.RANGE:
            intervals.append(tuple(argument))
        else:
            intervals.extend(_CATEGORIES[argument])
    return complement(intervals) if negated else merged(intervals)
