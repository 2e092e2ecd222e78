"""Fit: one token too many is seen, a question is never cut, and what is kept is what the policy says. Text is cut to what was decided."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.engine.errors import ConfigError, DocumentError
from askmany.engine.fit import Ask, fit, kept_ranges, require_room
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.engine.truncate import cut_document, document_tokens
from tests.helpers import hand_models as hand

TRUNCATING = ("truncate_head", "truncate_tail", "truncate_middle")


@pytest.mark.parametrize("policy", ["error", *TRUNCATING])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_off_by_one(policy: str, off: int) -> None:
    """Overhead 7 + document 60 + off + question 5 + answer 8 against a context of 80."""
    found = fit(60 + off, 7, [Ask(5, 8)], 80, policy)  # type: ignore[arg-type]
    assert found.total_tokens == (80 + off,)
    assert found.too_long == ((0,) if policy == "error" and off == 1 else ())
    assert found.truncated == (policy != "error" and off == 1)
    assert found.kept_tokens == (60 if found.truncated else 60 + off)


def test_each_question_is_judged_alone_under_error() -> None:
    found = fit(50, 10, [Ask(10, 30), Ask(10, 31), Ask(40, 1), Ask(1, 1)], 100)
    assert found.too_long == (1, 2)
    assert found.total_tokens == (100, 101, 101, 62)
    assert found.kept == ((0, 50),)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("truncate_head", ((45, 50),)), ("truncate_tail", ((0, 5),)), ("truncate_middle", ((0, 3), (48, 50)))],
)
def test_a_document_is_cut_once_for_its_most_demanding_question(policy: str, kept: tuple[tuple[int, int], ...]) -> None:
    found = fit(50, 10, [Ask(5, 20), Ask(5, 80), Ask(5, 85), Ask(90, 0)], 100, policy)  # type: ignore[arg-type]
    assert found.kept == kept
    assert found.truncated
    assert found.too_long == (2, 3)  # 10 + 1 + 90 > 100: no room for one document token


def test_a_question_that_never_fits_cuts_nothing() -> None:
    found = fit(50, 10, [Ask(5, 200)], 100, "truncate_tail")
    assert (found.kept, found.truncated, found.too_long) == (((0, 50),), False, (0,))


@given(
    document=st.integers(0, 200),
    overhead=st.integers(0, 40),
    asks=st.lists(st.builds(Ask, st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=6),
    context=st.integers(1, 200),
    policy=st.sampled_from(("error", *TRUNCATING)),
)
def test_whatever_is_answered_fits_and_nothing_is_cut_in_vain(
    document: int, overhead: int, asks: list[Ask], context: int, policy: str
) -> None:
    found = fit(document, overhead, asks, context, policy)  # type: ignore[arg-type]
    answered = [ask for i, ask in enumerate(asks) if i not in found.too_long]
    assert all(overhead + found.kept_tokens + ask.tokens <= context for ask in answered)
    assert all(0 <= start <= stop <= document for start, stop in found.kept)
    assert all(a[1] <= b[0] for a, b in zip(found.kept, found.kept[1:], strict=False))
    assert found.truncated == (found.kept_tokens < document)
    for i in found.too_long:
        least = document if policy == "error" else min(document, 1)
        assert overhead + least + asks[i].tokens > context
    if found.truncated:
        assert policy != "error"
        assert max(overhead + found.kept_tokens + ask.tokens for ask in answered) == context


@pytest.mark.parametrize("room", range(1, 12))
def test_kept_ranges_keep_exactly_the_room(room: int) -> None:
    for policy in TRUNCATING:
        ranges = kept_ranges(12, room, policy)  # type: ignore[arg-type]
        assert sum(stop - start for start, stop in ranges) == room
        assert all(stop > start for start, stop in ranges)
    assert kept_ranges(12, room, "truncate_head")[-1][1] == 12
    assert kept_ranges(12, room, "truncate_tail")[0][0] == 0


@pytest.mark.parametrize(("answer", "refused"), [(59, False), (60, False), (61, True), (64, True)])
def test_a_context_too_small_for_any_question_is_refused(answer: int, refused: bool) -> None:
    """Context 64: prompt 1, document at least 1, question 2; the shortest question counts."""
    asks = [Ask(9, answer), Ask(2, answer)]
    if not refused:
        require_room(1, asks, 64)
        return
    with pytest.raises(ConfigError, match=f"context of 64 tokens is too small for any question.*answer {answer} .* = {4 + answer}"):
        require_room(1, asks, 64)
    require_room(1, [], 64)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    """One token a word, no template: what is counted is what is seen."""
    vocabulary = [f"w{i}" for i in range(5000)]
    folder = hand.write_folder(tmp_path_factory.mktemp("words"), hand.word_level(vocabulary))
    return PromptBuilder(folder, PromptConfig())


@pytest.mark.parametrize(("count", "fits"), [(10, True), (59, True), (60, True), (61, False), (5000, False)])
def test_an_over_long_row(words: PromptBuilder, count: int, fits: bool) -> None:
    """Context 64, one token a word, a question of two words, two answer tokens: room for 60."""
    text = " ".join(f"w{i}" for i in range(count))
    prefix = words.segments(text)
    tail = words.tail("w1 w2")
    assert (len(words.instruction_ids), document_tokens(words, text), len(tail)) == (0, count, 2)
    found = fit(document_tokens(words, text), len(words.instruction_ids), [Ask(len(tail), 2)], 64)
    assert found.too_long == (() if fits else (0,))
    assert found.total_tokens == (count + 4,)
    if fits:
        assert 0 < sum(map(len, prefix)) + len(tail) <= 62
    with pytest.raises(ConfigError, match="too small for any question"):
        require_room(0, [Ask(len(tail), 64)], 64)


@pytest.mark.parametrize("policy", TRUNCATING)
def test_words_are_cut_where_the_policy_says(words: PromptBuilder, policy: str) -> None:
    text = " ".join(f"w{i}" for i in range(100))
    cut = cut_document(words, text, 10, policy)  # type: ignore[arg-type]
    expected = {
        "truncate_head": [*range(90, 100)],
        "truncate_tail": [*range(10)],
        "truncate_middle": [*range(5), *range(95, 100)],
    }[policy]
    assert [word.id for word in _words(cut.text, cut.kept_chars, text)] == expected
    assert "".join(text[start:stop] for start, stop in cut.kept_chars) == cut.text


class _Word:
    def __init__(self, word: str) -> None:
        self.id = int(word[1:])


def _words(cut: str, kept: tuple[tuple[int, int], ...], text: str) -> list[_Word]:
    """Words of every kept range by itself: the two halves of a middle cut stand side by side in `cut`."""
    return [_Word(word) for start, stop in kept for word in text[start:stop].split()]


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    folder = hand.write_folder(tmp_path_factory.mktemp("bytes"), hand.byte_level(), hand.CHATML)
    return PromptBuilder(folder, PromptConfig(instruction="Read."))


@settings(max_examples=200, deadline=None)
@given(text=st.text(min_size=1, max_size=60), room=st.integers(1, 60), policy=st.sampled_from(TRUNCATING))
def test_a_cut_text_fits_and_is_made_of_the_original(bytes_: PromptBuilder, text: str, room: int, policy: str) -> None:
    if room < 10:  # the blanks around a document and one character of four tokens
        with suppress(DocumentError):
            cut_document(bytes_, text, room, policy)  # type: ignore[arg-type]
        return
    cut = cut_document(bytes_, text, room, policy)  # type: ignore[arg-type]
    assert document_tokens(bytes_, cut.text) <= room
    assert "".join(text[start:stop] for start, stop in cut.kept_chars) == cut.text
    assert cut.text
    if document_tokens(bytes_, text) <= room:
        assert cut.text == text


def test_nothing_fits(bytes_: PromptBuilder) -> None:
    with pytest.raises(DocumentError, match="no part of the document fits the 1 tokens") as caught:
        cut_document(bytes_, "The quick brown fox", 1, "truncate_tail")
    assert caught.value.status == "too_long"


def test_a_long_character_is_kept_whole(bytes_: PromptBuilder) -> None:
    for room in range(8, 21):
        for policy in TRUNCATING:
            cut = cut_document(bytes_, "🙂🙃🙂🙃", room, policy)  # type: ignore[arg-type]
            assert set(cut.text) <= {"🙂", "🙃"}
            assert len(cut.text) >= (room - 4) // 4 - 1
            assert "\ufffd" not in bytes_.decode(bytes_.segments(cut.text)[-1])
