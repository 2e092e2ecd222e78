"""Holding answers to their grammars: one matcher a stream, all masks applied in one operation.

Keyed by stream id, never by row: where a stream stands in a batch, and which others stand beside it, changes nothing. A step without a
constrained stream costs nothing. Masks are filled on the CPU, best while the device is still busy with the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import xgrammar
from torch import Tensor
from xgrammar import BatchGrammarMatcher, GrammarMatcher

from askmany.engine.grammar import GrammarCompiler
from askmany.engine.request import Stream

WORD = 32  # tokens in one word of a mask


@dataclass(frozen=True, slots=True)
class Masks:
    """The legal tokens of a step's constrained rows: `rows` of the logits, a bit a token; other rows of `bits` mean nothing."""

    rows: list[int]  # C
    bits: Tensor  # [N, ceil(V / 32)] int32, on the CPU

    def hold(self, logits: Tensor) -> Tensor:
        """`logits` [N, V], fp32, with the illegal tokens of the constrained rows set to -inf in place, all rows in one operation."""
        xgrammar.apply_token_bitmask_inplace(logits, self.bits.to(logits.device, non_blocking=True), indices=self.rows)
        return logits


class Constraints:
    """The grammar state of the streams of one engine. The compiler is made when the first constrained stream comes."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make_compiler = make_compiler
        self._matchers: dict[int, GrammarMatcher] = {}  # by stream id

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return self._make_compiler()

    @cached_property
    def _batch(self) -> BatchGrammarMatcher:
        return BatchGrammarMatcher()

    @cached_property
    def _probe(self) -> Tensor:
        return xgrammar.allocate_token_bitmask(1, self._compiler.vocabulary)

    def masks(self, streams: Sequence[Stream]) -> Masks | None:
        """What is legal next for the streams, row i of the logits belonging to stream i; None when none of them has a grammar.

        Where a grammar has no way on, the end of the answer is legal: the stream ends by itself, with what it has said.
        """
        rows = [row for row, stream in enumerate(streams) if stream.question.grammar is not None]
        if not rows:
            return None
        bits = xgrammar.allocate_token_bitmask(len(streams), self._compiler.vocabulary)
        self._batch.batch_fill_next_token_bitmask([self._matcher(streams[row]) for row in rows], bits, rows)
        for row in rows:
            if not bool(bits[row].any()):
                bits[row] = self._end_bits(streams[row])
        return Masks(rows, bits)

    def accept(self, stream: Stream, token_id: int) -> bool:
        """Book a drawn token; whether nothing may follow it. Called for every drawn token, does nothing for unconstrained streams."""
        if stream.question.grammar is None:
            return False
        matcher = self._matcher(stream)
        if not matcher.accept_token(token_id):
            return True
        return bool(matcher.is_terminated()) or (bool(matcher.is_completed()) and self._only_the_end(matcher, stream))

    def release(self, streams: Iterable[Stream]) -> None:
        """Forget these streams."""
        for stream in streams:
            self._matchers.pop(stream.stream_id, None)

    def _matcher(self, stream: Stream) -> GrammarMatcher:
        matcher = self._matchers.get(stream.stream_id)
        if matcher is None:
            assert stream.question.grammar is not None
            compiled = self._compiler.compile(stream.question.grammar)
            matcher = GrammarMatcher(compiled, override_stop_tokens=sorted(self._ends(stream)))
            self._matchers[stream.stream_id] = matcher
        return matcher

    def _ends(self, stream: Stream) -> frozenset[int]:
        return self._compiler.end_token_ids.union(stream.question.sampling.stop_token_ids)

    def _only_the_end(self, matcher: GrammarMatcher, stream: Stream) -> bool:
        matcher.fill_next_token_bitmask(self._probe)
        return not bool((self._probe[0] & ~self._end_bits(stream)).any())

    def _end_bits(self, stream: Stream) -> Tensor:
        """The mask that allows the end of the answer alone. [ceil(V / 32)] int32"""
        words = torch.zeros(self._probe.shape[1], dtype=torch.int64)
        for token_id in self._ends(stream):
            words[token_id // WORD] |= 1 << token_id % WORD
        return words.to(torch.int32)
