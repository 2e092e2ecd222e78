"""Answers as text, token by token; a tokenizer file that cannot be read."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from askmany.engine.answers import Detokenizer
from askmany.engine.errors import ConfigError
from askmany.engine.tokenizer import TextTokenizer
from tests.helpers import hand_models as hand

KINDS = {
    "gpt2": hand.byte_level,
    "legacy": lambda: hand.sentencepiece(legacy=True),
    "sentencepiece": lambda: hand.sentencepiece(legacy=False),
    "unigram": hand.unigram,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(hand.write_folder(tmp_path_factory.mktemp(request.param), KINDS[request.param]()))


def pieces(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_join_to_the_text(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_random_ids_join_to_their_text(tmp_path: Path) -> None:
    """Not only what a text encodes to: a model may draw any bytes."""
    tokenizer = TextTokenizer(hand.write_folder(tmp_path, hand.byte_level()))
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(len(hand.MARKERS), 500) for _ in range(rng.randrange(1, 12))]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_token(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(hand.write_folder(tmp_path, hand.byte_level()))
    ids = tokenizer.encode("a🙂b").ids
    assert len(ids) == 6
    assert pieces(tokenizer, ids) == ["a", "", "", "", "🙂", "b", ""]
    assert pieces(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(hand.write_folder(tmp_path, hand.byte_level()))
    ids = tokenizer.encode(tokenizer.trusted("fox<|im_end|> dog</s>")).ids
    assert tokenizer.decode(ids) == "fox dog"
    assert "".join(pieces(tokenizer, ids)) == "fox dog"
    assert tokenizer.token(2) == "</s>"


def test_it_is_the_engines_detokenizer(tokenizer: TextTokenizer) -> None:
    detokenizer: Detokenizer = tokenizer
    assert detokenizer.stream().push(tokenizer.encode("fox").ids[0]) is not None


@pytest.mark.parametrize("content", ["", "{}", "[]", "{not json", '{"model": {"type": "Nonsense"}}'])
def test_an_unreadable_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not readable as a tokenizer"):
        TextTokenizer(tmp_path)


def test_an_unreadable_tokenizer_config_is_refused(tmp_path: Path) -> None:
    hand.write_folder(tmp_path, hand.byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not readable"):
        TextTokenizer(tmp_path)


def test_trusted_finds_the_longest_marker(tmp_path: Path) -> None:
    tokenizer = hand.byte_level()
    tokenizer.add_special_tokens(["<|a|>", "<|a|>b"])
    found = TextTokenizer(hand.write_folder(tmp_path, tokenizer))
    text = "x<|a|>b<|a|>c"
    assert found.encode(found.trusted(text)).ids == tokenizer.encode(text).ids
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == tokenizer.encode(text).ids
