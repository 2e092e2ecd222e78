"""Compiling grammars for a model's vocabulary, with XGrammar.

Importing this loads torch (XGrammar does), so it belongs to the device half; a plan compiles in its CPU tasks. A grammar's text comes from
`answer_types`; compiling the same text twice is free.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import xgrammar
from tokenizers import Tokenizer
from xgrammar import CompiledGrammar, TokenizerInfo, VocabType

from askmany.engine.errors import ConfigError
from askmany.engine.grammar_pieces import with_leading_blank

CACHED = 4096  # compiled grammars kept


class GrammarCompiler:
    """Compiles for `pieces`, the vocabulary by id ("" for a token that no answer may hold), of `vocab_type`.

    `vocabulary` is the number of the model's logits; ids beyond the tokenizer's are never legal. `end_token_ids` end an answer. Where
    the vocabulary spells a word's beginning with a blank (SentencePiece, whose decoder drops the first), an answer may begin with one.
    """

    def __init__(self, pieces: Sequence[str], vocab_type: VocabType, vocabulary: int, end_token_ids: Iterable[int]) -> None:
        self._leads = vocab_type == VocabType.BYTE_FALLBACK
        self.vocabulary = vocabulary
        self.end_token_ids = frozenset(end_token_ids)
        padded = [*pieces[:vocabulary], *([""] * (vocabulary - len(pieces)))]
        info = TokenizerInfo(padded, vocab_type, vocab_size=vocabulary, stop_token_ids=sorted(self.end_token_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    @classmethod
    def load(cls, folder: Path, vocabulary: int, end_token_ids: Iterable[int]) -> GrammarCompiler:
        """For the tokenizer of a model folder. ConfigError when it is of a kind whose pieces cannot be read."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        barred = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        pieces = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size(with_added_tokens=True))]
        vocab_type = _vocab_type(json.loads(tokenizer.to_str()), folder)
        return cls(["" if piece in barred else piece for piece in pieces], vocab_type, vocabulary, end_token_ids)

    @classmethod
    def plain(cls, pieces: Sequence[str], vocabulary: int, end_token_ids: Iterable[int]) -> GrammarCompiler:
        """For a vocabulary whose pieces are texts as they stand."""
        return cls(pieces, VocabType.RAW, vocabulary, end_token_ids)

    def compile(self, text: str) -> CompiledGrammar:
        """The grammar of this EBNF. ValueError when XGrammar cannot make it."""
        if text not in self._compiled:
            try:
                self._compiled[text] = self._compiler.compile_grammar(with_leading_blank(text) if self._leads else text)
            except RuntimeError as error:
                raise ValueError(f"the grammar cannot be compiled: {str(error).splitlines()[0]}") from error
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return self._compiled[text]


def _vocab_type(definition: dict[str, Any], folder: Path) -> VocabType:
    """How the vocabulary spells bytes: in byte-level letters, with `<0x0A>` pieces, or as plain text."""
    decoders = _kinds(definition.get("decoder"))
    if "ByteLevel" in decoders:
        return VocabType.BYTE_LEVEL
    if "ByteFallback" in decoders:
        return VocabType.BYTE_FALLBACK
    if not decoders or "Fuse" in decoders:
        return VocabType.RAW
    raise ConfigError(f"{folder / 'tokenizer.json'}: answers cannot be constrained for a decoder of kind {', '.join(sorted(decoders))}")


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    parts = decoder.get("decoders")
    return {decoder["type"]} if parts is None else {kind for part in parts for kind in _kinds(part)}
