"""When an answer ends, and what it says: stop tokens, stop strings, text.

Knows one stream at a time and nothing of steps. Text comes from a `Detokenizer` (the real one wraps the model's tokenizer).
"""

from __future__ import annotations

from typing import Protocol

from askmany.engine.labels import LabelTrie, label_scores
from askmany.engine.request import FinishReason, Sampling, Stream, StreamResult
from askmany.engine.step import Sampled


class TextStream(Protocol):
    """Turns one answer's tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token made certain; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        ...


class Detokenizer(Protocol):
    """Opens a text stream for every answer."""

    def stream(self) -> TextStream: ...


class GrowingAnswer(Protocol):
    """What the engine asks of an answer."""

    def push(self, sampled: Sampled) -> FinishReason | None:
        """Take what the last step gave; the reason if it ends the answer."""
        ...

    def result(self, stream: Stream) -> StreamResult:
        """The finished answer of `stream`."""
        ...


class Answer:
    """One stream's answer while it grows.

    A token after which a grammar lets nothing follow ends the answer and is part of it. A stop token ends it and is not: its id, its text
    and its log-probability are left out. Tokens that spell a stop string stay among the ids; the text ends before the string's first
    occurrence.
    """

    def __init__(self, sampling: Sampling, eos_token_ids: frozenset[int], text: TextStream) -> None:
        self.token_ids: list[int] = []
        self.logprob = 0.0
        self.text = ""
        self._stop = sampling.stop
        self._stop_tokens = eos_token_ids.union(sampling.stop_token_ids)
        self._left_tokens = sampling.max_new_tokens
        self._stream = text

    def push(self, sampled: Sampled) -> FinishReason | None:
        """Take the next token; the reason if it ends the answer."""
        self._left_tokens -= 1
        if sampled.token_id in self._stop_tokens:
            self._extend(self._stream.flush())
            return "stop"
        self.token_ids.append(sampled.token_id)
        self.logprob += sampled.logprob
        if self._extend(self._stream.push(sampled.token_id)):
            return "stop"
        if self._left_tokens > 0 and not sampled.complete:
            return None
        return "stop" if self._extend(self._stream.flush()) or sampled.complete else "length"

    def result(self, stream: Stream) -> StreamResult:
        """The finished answer of `stream`."""
        assert stream.finish_reason is not None
        return StreamResult(
            document_key=stream.document.document.key,
            question_id=stream.question.question_id,
            answer_token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=stream.finish_reason,
            logprob=self.logprob,
            margin=stream.margin,
        )

    def _extend(self, text: str) -> bool:
        """Append text; True when a stop string is in it now, after cutting the text before it."""
        searched_from = len(self.text)
        self.text += text
        if not self._stop:
            return False
        found = [at for stop in self._stop if (at := self.text.find(stop, max(0, searched_from - len(stop) + 1))) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


class LabelAnswer:
    """The distribution over a question's labels: complete with the first thing it hears."""

    def __init__(self, trie: LabelTrie) -> None:
        self._trie = trie
        self._logprobs: tuple[float, ...] = ()

    def push(self, sampled: Sampled) -> FinishReason | None:
        """Take the label tree's log-probabilities."""
        self._logprobs = sampled.label_logprobs
        return "stop"

    def result(self, stream: Stream) -> StreamResult:
        """The scores of all labels, and the likeliest as the answer."""
        scores = label_scores(self._trie, self._logprobs)
        return StreamResult(
            document_key=stream.document.document.key,
            question_id=stream.question.question_id,
            answer_token_ids=self._trie.token_ids[scores.best],
            text=scores.label,
            finish_reason="stop",
            logprob=scores.logprobs[scores.best],
            margin=scores.margin,
            labels=scores,
        )
