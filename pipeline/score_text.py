"""How close a text is to its references: exact match, token F1, token recall, and numbers within a tolerance.

The normalisation and the two scores are those of SQuAD's evaluation (Rajpurkar et al. 2016): lower case, no punctuation, no articles,
single spaces; F1 over the bags of tokens; the best reference counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")


def normalised(text: str) -> str:
    """Lower case, punctuation (ASCII) removed, articles replaced by blanks, white space made single blanks; in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """1 when both are the same after normalisation."""
    return float(normalised(answer) == normalised(reference))


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over normalised tokens, each counted as often as it occurs; two empty texts score 1."""
    found, wanted = normalised(answer).split(), normalised(reference).split()
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


def token_recall(answer: str, reference: str) -> float:
    """Share of the reference's normalised tokens that the answer holds."""
    wanted = Counter(normalised(reference).split())
    if not wanted:
        return float(not normalised(answer))
    return sum((Counter(normalised(answer).split()) & wanted).values()) / wanted.total()


def number_match(answer: str, reference: str, tolerance: float = 0.0) -> float:
    """1 when both are numbers at most `tolerance` apart, as a share of the reference's size (an absolute distance where that is 0)."""
    found, wanted = as_number(answer), as_number(reference)
    if found is None or wanted is None:
        return 0.0
    return float(abs(found - wanted) <= Decimal(str(tolerance)) * (abs(wanted) or 1))


def as_number(text: str) -> Decimal | None:
    """The number that a text is, thousands separators and a currency or percent sign aside; None when it is none."""
    stripped = text.strip().strip("$€£%").strip()
    if not stripped or not _NUMBER.fullmatch(stripped):
        return None
    try:
        return Decimal(stripped.replace(",", ""))
    except InvalidOperation:
        return None


def best(score: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """The highest score over the references."""
    return max(score(answer, reference) for reference in references)
