"""A model's tokenizer, with one rule of its own: markers count only where the operator wrote them.

A marker is an added token that is special or holds punctuation (`<|im_end|>`, `[INST]`). Inside the tokenizer that encodes, every marker
goes by a secret name; `trusted` puts the secret names into operator's text, so a marker string inside a document or question stays plain
text while prompt and data are still encoded in one go. Added tokens of letters, digits or blanks alone are vocabulary and work everywhere.

Knows neither prompts nor templates; needs the `tokenizers` library alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from askmany.engine.errors import ConfigError

_SURROGATES = re.compile("[\ud800-\udfff]")


class TextTokenizer:
    """The tokenizer in a model folder. Also the engine's detokenizer: `stream` follows one answer."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        try:
            text = self._file.read_text(encoding="utf-8")
            self._full = _unbounded(FastTokenizer.from_str(text))
            definition = json.loads(text)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{self._file}: not readable as a tokenizer ({error})") from error
        self._secret = _secret_names(definition)
        self._encoder = _unbounded(FastTokenizer.from_str(json.dumps(_renamed(definition, self._secret))))
        self._markers = _marker_pattern(definition, self._secret)
        self._refuse_open_markers(definition)
        self.bos_token_id, self.front = self._bos(_config(folder))

    def trusted(self, text: str) -> str:
        """Operator's text as `encode` expects it: each marker under its secret name."""
        return self._markers.sub(lambda found: self._secret[found[0]], text)

    def encode(self, text: str) -> Encoding:
        """Ids and character offsets of `text`, markers not recognised (but by their secret names), nothing added in front or behind.

        Never fails on odd text: a lone surrogate is encoded as U+FFFD.
        """
        return self._encoder.encode(_SURROGATES.sub("\ufffd", text), add_special_tokens=False)

    def with_front(self, ids: Sequence[int]) -> tuple[int, ...]:
        """`ids` of a whole prompt with what the tokenizer puts in front (BOS), unless the prompt's own text already begins with it."""
        own = tuple(ids[: len(self.front)]) == self.front
        return tuple(ids) if own else (*self.front, *ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out, an incomplete character as U+FFFD."""
        return self._full.decode(list(ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token, for people to look at."""
        return self._full.id_to_token(token_id) or f"<{token_id}>"

    def stream(self) -> AnswerText:
        """Follow one answer token by token."""
        return AnswerText(self)

    def _refuse_open_markers(self, definition: dict[str, Any]) -> None:
        unknown = _unknown(definition["model"])
        special = [token["content"] for token in definition.get("added_tokens") or () if token.get("special")]
        for marker in special:
            token_id = self._full.token_to_id(marker)
            if marker != unknown and token_id in self.encode(marker).ids:
                raise ConfigError(f"{self._file}: the plain text {marker!r} becomes the marker of that name; a document could forge it")

    def _bos(self, config: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
        """The BOS id, and the ids the tokenizer puts before a text: tokenizer_config's `add_bos_token`, else what tokenizer.json does."""
        token = config.get("bos_token")
        content = token.get("content") if isinstance(token, dict) else token
        bos = self._full.token_to_id(content) if isinstance(content, str) else None
        bare, whole = (self._full.encode("a", add_special_tokens=added).ids for added in (False, True))
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        front = tuple(whole[: next(starts, 0)])
        if config.get("add_bos_token") is True and bos is not None and not front:
            front = (bos,)
        elif config.get("add_bos_token") is False and front == (bos,):
            front = ()
        return (bos if bos is not None or not front else front[0]), front


class AnswerText:
    """The text of one growing answer. A character spread over several tokens comes out with its last one."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # tokens [context, read) are decoded again, so that what depends on a left neighbour comes out right
        self._read = 0

    def push(self, token_id: int) -> str:
        """The text that this token made certain; empty while a character is incomplete."""
        self._ids.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        """What was held back, an incomplete character as U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._read])
        text = self._tokenizer.decode(self._ids[self._context :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not final):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(known) :]


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path}: not readable as a JSON object ({error})") from error


def _unbounded(tokenizer: FastTokenizer) -> FastTokenizer:
    """Without the truncation and padding that a tokenizer.json may carry: text is never cut here."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _unknown(model: dict[str, Any]) -> str | None:
    """The piece that stands for what the model does not know: plain text may become it."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _is_marker(token: dict[str, Any]) -> bool:
    vocabulary = (char.isalnum() or char.isspace() or char == "▁" for char in token["content"])  # ▁ is SentencePiece's blank
    return bool(token.get("special")) or not all(vocabulary)


def _secret_names(definition: dict[str, Any]) -> dict[str, str]:
    """Marker -> a name of private characters that no document can know. Normalizers leave such characters alone."""
    markers = [token["content"] for token in definition.get("added_tokens") or () if _is_marker(token)]
    return {marker: "".join(chr(0xF0000 + secrets.randbelow(0xFFFD)) for _ in range(8)) for marker in markers}


def _renamed(definition: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The tokenizer with its markers renamed wherever plain text could reach them; ids stay. Nothing is added to what it encodes."""
    model = dict(definition["model"])
    merged = {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "") for merge in model.get("merges") or ()}
    fixed = {_unknown(model)} | merged  # the model itself refers to these
    hidden = {marker: name for marker, name in names.items() if marker not in fixed}
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {hidden.get(piece, piece): index for piece, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocab]
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in definition.get("added_tokens") or ()]
    return {**definition, "model": model, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None}


def _marker_pattern(definition: dict[str, Any], names: dict[str, str]) -> re.Pattern[str]:
    """Finds markers as the tokenizer does: leftmost, then longest; `single_word` ones only between other than word characters."""
    single = {token["content"] for token in definition.get("added_tokens") or () if token.get("single_word")}
    patterns = [
        rf"(?<!\w){re.escape(marker)}(?!\w)" if marker in single else re.escape(marker)
        for marker in sorted(names, key=len, reverse=True)
        if marker
    ]
    return re.compile("|".join(patterns) or r"(?!)")
