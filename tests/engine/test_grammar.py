"""Grammars compiled for tokenizers of every kind: exactly the legal texts can be spelled, whatever the tokens look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import xgrammar
from tokenizers import Tokenizer, decoders
from xgrammar import GrammarMatcher

from askmany.engine.answer_types import answer_type
from askmany.engine.errors import ConfigError
from askmany.engine.grammar import GrammarCompiler
from askmany.engine.prompts import PromptBuilder, PromptConfig
from tests.helpers import hand_models as hand

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": hand.byte_level,
    "newer byte-level": lambda: hand.byte_level(hand.NEWER_SPLIT),
    "sentencepiece": lambda: hand.sentencepiece(legacy=False),
    "legacy sentencepiece": lambda: hand.sentencepiece(legacy=True),
}
TEXTS = ("yes", "not stated", "No: 12,345", 'say "no"', "日本")


def compiled(folder: Path, kind: str) -> tuple[GrammarCompiler, PromptBuilder, int]:
    tokenizer = KINDS[kind]()
    hand.write_folder(folder, tokenizer, hand.CHATML)
    end = tokenizer.token_to_id("<|im_end|>")
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True) + 5  # logits are often padded
    return GrammarCompiler.load(folder, vocabulary, [end]), PromptBuilder(folder, PromptConfig()), end


def legal(matcher: GrammarMatcher, vocabulary: int) -> set[int]:
    bits = xgrammar.allocate_token_bitmask(1, vocabulary)
    matcher.fill_next_token_bitmask(bits)
    return {i for i in range(vocabulary) if bits[0][i // 32] >> (i % 32) & 1}


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_spelled_is_what_is_legal(kind: str, tmp_path: Path) -> None:
    compiler, prompts, end = compiled(tmp_path, kind)
    choice = answer_type({"type": "choice", "options": TEXTS, "answer": "decode"}, "q")
    grammar = compiler.compile(str(choice.grammar))
    for text in TEXTS:
        matcher = GrammarMatcher(grammar)
        spelled = []
        for token_id in prompts.answer_ids("What?", text):
            assert token_id in legal(matcher, compiler.vocabulary), (text, prompts.tokenizer.token(token_id))
            assert matcher.accept_token(token_id)
            spelled.append(token_id)
        assert legal(matcher, compiler.vocabulary) == {end}
        assert choice.parse(prompts.decode(spelled)) == text
    wrong = GrammarMatcher(grammar)
    assert not all(wrong.accept_token(token_id) for token_id in prompts.answer_ids("What?", "maybe"))


@pytest.mark.parametrize("kind", KINDS)
def test_markers_are_never_part_of_an_answer(kind: str, tmp_path: Path) -> None:
    compiler, _, end = compiled(tmp_path, kind)
    anything = compiler.compile(str(answer_type({"type": "regex", "pattern": "[^\\x00]*"}, "q").grammar))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    markers = {tokenizer.token_to_id(marker) for marker in hand.MARKERS}
    found = legal(GrammarMatcher(anything), compiler.vocabulary)
    assert found & markers == {end}
    assert max(found) < tokenizer.get_vocab_size(with_added_tokens=True), "padding of the logits is no token"


def test_the_same_text_is_compiled_once_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    compiler, _, _ = compiled(tmp_path, "byte-level")
    text = str(answer_type({"type": "int"}, "q").grammar)
    assert compiler.compile(text) is compiler.compile(text)
    with pytest.raises(ValueError, match="the grammar cannot be compiled"):
        compiler.compile("root ::= (")


def test_a_tokenizer_whose_pieces_cannot_be_read_is_refused(tmp_path: Path) -> None:
    tokenizer = hand.byte_level()
    tokenizer.decoder = decoders.WordPiece()
    hand.write_folder(tmp_path, tokenizer, hand.CHATML)
    with pytest.raises(ConfigError, match="answers cannot be constrained for a decoder of kind WordPiece"):
        GrammarCompiler.load(tmp_path, 600, [1])
