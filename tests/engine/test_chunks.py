"""Chunks of a long document: together they are all of it, they overlap as asked, and none is over the limit."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.engine.chunks import Chunk, chunk_document
from askmany.engine.errors import DocumentError
from askmany.engine.fit import Ask, chunk_room
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.engine.truncate import document_tokens
from tests.helpers import hand_models as hand

TEXTS = st.text(st.sampled_from("ab c.\n日🙂é "), min_size=1, max_size=400) | st.text(min_size=1, max_size=80)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    folder = hand.write_folder(tmp_path_factory.mktemp("words"), hand.word_level([f"w{i}" for i in range(3000)]))
    return PromptBuilder(folder, PromptConfig())


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    folder = hand.write_folder(tmp_path_factory.mktemp("bytes"), hand.byte_level(), hand.CHATML)
    return PromptBuilder(folder, PromptConfig(instruction="Read."))


def check(builder: PromptBuilder, text: str, size: int, overlap: int, chunks: tuple[Chunk, ...], exact: bool) -> None:
    spans = builder.tokenizer.encode(text).offsets
    assert chunks[0].chars[0] == 0
    assert chunks[-1].chars[1] == len(text)
    assert (chunks[0].tokens[0], chunks[-1].tokens[1]) == (0, len(spans))
    for chunk in chunks:
        assert text[slice(*chunk.chars)] == chunk.text
        assert not chunk.text.strip() or document_tokens(builder, chunk.text) <= size
    for before, after in itertools.pairwise(chunks):
        shared = before.tokens[1] - after.tokens[0]
        assert before.chars[0] <= after.chars[0] <= before.chars[1] < after.chars[1]
        assert shared == overlap if exact else overlap <= shared <= overlap + 3  # a character of four bytes is four tokens


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 300), size=st.integers(1, 60), overlap=st.integers(0, 30))
def test_chunks_of_words(words: PromptBuilder, count: int, size: int, overlap: int) -> None:
    text = " ".join(f"w{i}" for i in range(count))
    if overlap >= size and count > size:
        with pytest.raises(DocumentError, match="no chunk of"):
            chunk_document(words, text, size, overlap)
        return
    chunks = chunk_document(words, text, size, overlap)
    check(words, text, size, overlap, chunks, exact=True)
    covered = [token for chunk in chunks for token in range(*chunk.tokens)]
    assert sorted(set(covered)) == list(range(count))
    assert len(chunks) <= 1 + max(0, count - overlap) // max(1, (3 * (size - overlap)) // 4 - overlap if overlap < size // 3 else 1)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, size=st.integers(24, 80), overlap=st.integers(0, 8))
def test_chunks_of_odd_text(bytes_: PromptBuilder, text: str, size: int, overlap: int) -> None:
    check(bytes_, text, size, overlap, chunk_document(bytes_, text, size, overlap), exact=False)


@pytest.mark.parametrize(
    ("text", "size", "end"),
    [
        ("One two. " * 6 + "Three four five six.\n\nSeven eight nine ten eleven twelve", 76, "five six."),
        ("One two three four five six seven eight. Nine ten eleven twelve thirteen", 44, "seven eight."),
        ("One two three four five six seven eight nine ten eleven twelve thirteen", 44, "nine ten"),
        ("0123456789" * 12, 60, "9"),
    ],
)
def test_chunks_end_where_text_does(bytes_: PromptBuilder, text: str, size: int, end: str) -> None:
    """Paragraph before sentence before word before token."""
    assert chunk_document(bytes_, text, size, 4)[0].text.rstrip().endswith(end)


def test_the_room_of_a_chunk_is_what_the_most_demanding_question_leaves() -> None:
    """Overhead 10, context 100: the questions leave 70, 40 and 5; chunks of less than 16 are not worth while."""
    room, found = chunk_room(500, 10, [Ask(10, 10), Ask(10, 40), Ask(5, 80)], 100, 16)
    assert (room, found.too_long, found.total_tokens, found.truncated) == (40, (2,), (530, 560, 595), False)
    assert chunk_room(4, 10, [Ask(5, 80)], 100, 16)[0] == 5
    assert chunk_room(500, 10, [Ask(90, 10)], 100, 0) == (0, found.__class__(((0, 500),), False, (0,), (610,)))
