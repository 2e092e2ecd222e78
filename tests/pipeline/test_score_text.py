"""Text scores against the rules of SQuAD's evaluation, written out case by case."""

from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.pipeline.score_text import as_number, best, exact_match, normalised, number_match, token_f1, token_recall


def official_f1(answer: str, reference: str) -> float:
    """The rules in their order, one statement each: lower, strip punctuation, strip articles, fix white space; then overlap."""

    def tokens(text: str) -> list[str]:
        text = text.lower()
        text = "".join(character for character in text if character not in set(string.punctuation))
        text = re.sub(r"\b(a|an|the)\b", " ", text, flags=re.UNICODE)
        return text.split()

    found, wanted = tokens(answer), tokens(reference)
    common = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat sat.", "cat sat"),
        ("an  apple a day,\tthe end", "apple day end"),
        ("don't", "dont"),
        ("U.S.A.", "usa"),
        ("A", ""),
        ("the-a", "thea"),
        ("theatre anna", "theatre anna"),
        ("$1,234.50", "123450"),
        ("“quoted”", "“quoted”"),
        ("Ünïcode", "ünïcode"),
        ("", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "f1", "recall"),
    [
        ("the Denver Broncos", "Denver Broncos", 1, 1, 1),
        ("Denver", "Denver Broncos", 0, 2 / 3, 1 / 2),
        ("Denver Denver", "Denver Broncos", 0, 1 / 2, 1 / 2),
        ("the team was Denver Broncos", "Denver Broncos", 0, 2 / 3, 1),
        ("Carolina", "Denver", 0, 0, 0),
        ("", "Denver", 0, 0, 0),
        ("the", "a", 1, 1, 1),
    ],
)
def test_scores(answer: str, reference: str, exact: float, f1: float, recall: float) -> None:
    assert exact_match(answer, reference) == exact
    assert token_f1(answer, reference) == pytest.approx(f1)
    assert token_recall(answer, reference) == pytest.approx(recall)


@given(st.text(st.sampled_from("aA the.,'-\n9é"), max_size=20), st.text(st.sampled_from("aA the.,'-\n9é"), max_size=20))
def test_f1_follows_the_official_rules(answer: str, reference: str) -> None:
    assert token_f1(answer, reference) == pytest.approx(official_f1(answer, reference))


def test_the_best_reference_counts() -> None:
    assert best(token_f1, "Denver", ["Carolina", "Denver Broncos", "Denver"]) == 1


@pytest.mark.parametrize(
    ("answer", "reference", "tolerance", "right"),
    [
        ("12", "12.0", 0, True),
        ("1,200", "1200", 0, True),
        ("$5", "5", 0, True),
        ("40%", "40", 0, True),
        ("-3", "3", 0, False),
        ("99", "100", 0.01, True),
        ("98.9", "100", 0.01, False),
        ("0.01", "0", 0.01, True),
        ("twelve", "12", 0.5, False),
        ("", "0", 1, False),
        (".", "0", 1, False),
    ],
)
def test_numbers(answer: str, reference: str, tolerance: float, right: bool) -> None:
    assert number_match(answer, reference, tolerance) == right


def test_what_is_no_number() -> None:
    assert [as_number(text) for text in ("", "-", "1,2,3", "1e", "nan", "inf", "1 2")] == [None] * 7
