"""Grammars of whole numbers, decimal numbers and calendar dates, exact at their bounds.

Every text of `whole(low, high)` is a number of that range and every such number has its text, so a bound never needs checking afterwards.
Numbers have no leading zeros, no plus sign and no exponent, which makes them JSON numbers too; there is no minus zero.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import date
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from askmany.engine.grammar_pieces import Piece, characters, either, literal, optional, repeated, sequence

LARGEST = 10**15 - 1  # the bound of a number that has none
DECIMALS = 6  # digits behind the point at most

_DIGIT = characters([(ord("0"), ord("9"))])


def whole(low: int, high: int) -> Piece:
    """The integers from `low` to `high`. ValueError when there are none."""
    if low > high:
        raise ValueError(f"no whole number from {low} to {high}")
    parts = []
    if low < 0:
        parts.append(sequence(literal("-"), _natural(max(1, -high), -low)))
    if high >= 0:
        parts.append(_natural(max(0, low), high))
    return either(*parts)


def decimal(low: Decimal, high: Decimal, decimals: int) -> Piece:
    """The numbers from `low` to `high` with at most `decimals` digits behind the point. ValueError when there are none."""
    scale = 10**decimals
    least = int((low * scale).to_integral_value(ROUND_CEILING))
    most = int((high * scale).to_integral_value(ROUND_FLOOR))
    if least > most:
        raise ValueError(f"no number with {decimals} decimals from {low} to {high}")
    parts = []
    if least < 0:
        parts.append(sequence(literal("-"), _scaled(max(1, -most), -least, decimals)))
    if most >= 0:
        parts.append(_scaled(max(0, least), most, decimals))
    return either(*parts)


def iso_date(first: date, last: date) -> Piece:
    """The days from `first` to `last` as YYYY-MM-DD. ValueError when there are none."""
    if first > last:
        raise ValueError(f"no day from {first} to {last}")
    if first.year == last.year:
        return _days_of_year(first, last)
    parts = [_days_of_year(first, date(first.year, 12, 31)), _days_of_year(date(last.year, 1, 1), last)]
    low, high = first.year + 1, last.year - 1
    if low <= high:
        parts.append(sequence(_fixed(low, high, 4), _months(date(2001, 1, 1), date(2001, 12, 31))))
        leap = [literal(f"{year:04d}") for year in range(low, high + 1) if calendar.isleap(year)]
        if leap:
            parts.append(sequence(either(*leap), literal("-02-29")))
    return either(*parts)


def _natural(low: int, high: int) -> Piece:
    """0 <= low <= high, by number of digits."""
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        smallest = 0 if length == 1 else 10 ** (length - 1)
        parts.append(_fixed(max(low, smallest), min(high, 10**length - 1), length))
    return either(*parts)


def _fixed(low: int, high: int, length: int) -> Piece:
    """The numbers from `low` to `high`, written with `length` digits."""
    return either(*_fixed_parts(f"{low:0{length}d}", f"{high:0{length}d}"))


def _fixed_parts(low: str, high: str) -> Iterator[Piece]:
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        yield repeated(_DIGIT, len(low), len(low))
    elif not rest:
        yield _digits(int(low), int(high))
    elif low[0] == high[0]:
        yield sequence(literal(low[0]), either(*_fixed_parts(low[1:], high[1:])))
    else:
        first, last = int(low[0]), int(high[0])
        if low[1:] != "0" * rest:
            yield sequence(literal(low[0]), either(*_fixed_parts(low[1:], "9" * rest)))
            first += 1
        if high[1:] != "9" * rest:
            yield sequence(literal(high[0]), either(*_fixed_parts("0" * rest, high[1:])))
            last -= 1
        if first <= last:
            yield sequence(_digits(first, last), repeated(_DIGIT, rest, rest))


def _digits(low: int, high: int) -> Piece:
    return characters([(ord("0") + low, ord("0") + high)])


def _scaled(low: int, high: int, decimals: int) -> Piece:
    """Numbers n / 10**decimals for 0 <= low <= n <= high."""
    scale = 10**decimals
    first, last = low // scale, high // scale
    if first == last:
        return sequence(literal(str(first)), _fraction(low % scale, high % scale, decimals))
    parts = [
        sequence(literal(str(first)), _fraction(low % scale, scale - 1, decimals)),
        sequence(literal(str(last)), _fraction(0, high % scale, decimals)),
    ]
    if first + 1 < last:
        parts.append(sequence(_natural(first + 1, last - 1), _fraction(0, scale - 1, decimals)))
    return either(*parts)


def _fraction(low: int, high: int, decimals: int) -> Piece:
    """A point and 1 to `decimals` digits that mean low to high / 10**decimals; nothing at all where that is 0."""
    if not decimals:
        return literal("")
    if (low, high) == (0, 10**decimals - 1):
        return optional(sequence(literal("."), repeated(_DIGIT, 1, decimals)))
    parts = []
    for length in range(1, decimals + 1):
        unit = 10 ** (decimals - length)
        least, most = -(-low // unit), high // unit
        if least <= most:
            parts.append(sequence(literal("."), _fixed(least, most, length)))
    return optional(either(*parts)) if low == 0 else either(*parts)


def _days_of_year(first: date, last: date) -> Piece:
    return sequence(literal(f"{first.year:04d}"), _months(first, last))


def _months(first: date, last: date) -> Piece:
    """-MM-DD for the days from `first` to `last` of one year."""
    parts = []
    for month in range(first.month, last.month + 1):
        low = first.day if month == first.month else 1
        high = last.day if month == last.month else calendar.monthrange(first.year, month)[1]
        parts.append(sequence(literal(f"-{month:02d}-"), _fixed(low, high, 2)))
    return either(*parts)
