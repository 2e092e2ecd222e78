"""Holding answers to their grammars: one matcher a stream, all masks of a step at once.

Keyed by stream id, never by row: where a stream stands in a batch, and which others stand beside it, changes nothing. A step without a
constrained stream costs nothing. Masks are filled on the CPU, best while the device is still busy with the forward pass; streams that stand
at the same place of the same grammar share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xgrammar
from torch import Tensor
from xgrammar import BatchGrammarMatcher, GrammarMatcher

from askmany.engine.grammar import GrammarCompiler
from askmany.engine.grammar_states import GrammarStates, State
from askmany.engine.masks import Masks
from askmany.engine.request import Phase, Stream

WORD = 32  # tokens in one word of a mask


@dataclass(slots=True)
class _Held:
    """A stream under a grammar."""

    matcher: GrammarMatcher
    state: State
    ends: tuple[int, ...]


class Constraints:
    """The grammar state of the streams of one engine. The compiler is made when the first constrained stream comes."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make_compiler = make_compiler
        self._held: dict[int, _Held] = {}  # by stream id
        self._states = GrammarStates()
        self._ends: dict[tuple[int, ...], Tensor] = {}  # masks that allow the end of the answer alone

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return self._make_compiler()

    @cached_property
    def _batch(self) -> BatchGrammarMatcher:
        return BatchGrammarMatcher()

    @cached_property
    def _probe(self) -> Tensor:
        return xgrammar.allocate_token_bitmask(1, self._compiler.vocabulary)

    def masks(self, streams: Sequence[Stream], room: Tensor | None = None) -> Masks | None:
        """What is legal next for the streams, row i of the logits belonging to stream i; None when none of them has a grammar. Streams that
        have ended are left out.

        Where a grammar has no way on, the end of the answer is legal: the stream ends by itself, with what it has said. The masks are
        written to `room` [at least N, ceil(V / 32)] int32 where it is given.
        """
        rows = [row for row, stream in enumerate(streams) if _constrained(stream)]
        if not rows:
            return None
        held = [self._hold(streams[row]) for row in rows]
        places: dict[State, int] = {}
        first: list[_Held] = []
        for one in held:
            if one.state not in places:
                places[one.state] = len(first)
                first.append(one)
        bits = xgrammar.allocate_token_bitmask(len(first), self._compiler.vocabulary) if room is None else room[: len(first)]
        self._fill(first, bits)
        return Masks(rows, [places[one.state] for one in held], bits)

    def accept(self, streams: Sequence[Stream], token_ids: Sequence[int]) -> list[bool]:
        """Book a drawn token of each stream; whether nothing may follow it. Does nothing for streams without a grammar, or that have
        ended."""
        complete = [False] * len(streams)
        rows = [row for row, stream in enumerate(streams) if _constrained(stream)]
        held = [self._hold(streams[row]) for row in rows]
        if held:
            accepted = BatchGrammarMatcher.batch_accept_token([one.matcher for one in held], [token_ids[row] for row in rows])
            for row, one, legal in zip(rows, held, accepted, strict=True):
                one.state = self._states.after(one.state, token_ids[row])
                complete[row] = not legal or self._ends_here(one)
        return complete

    def release(self, streams: Iterable[Stream]) -> None:
        """Forget these streams."""
        for stream in streams:
            self._held.pop(stream.stream_id, None)

    def _hold(self, stream: Stream) -> _Held:
        held = self._held.get(stream.stream_id)
        if held is None:
            grammar = stream.question.grammar
            assert grammar is not None
            stops = (token_id for token_id in stream.question.sampling.stop_token_ids if token_id < self._compiler.vocabulary)
            ends = tuple(sorted(self._compiler.end_token_ids.union(stops)))  # what the model cannot say ends nothing
            matcher = GrammarMatcher(self._compiler.compile(grammar), override_stop_tokens=list(ends))
            held = self._held[stream.stream_id] = _Held(matcher, self._states.after((grammar, ends), -1), ends)
        return held

    def _fill(self, held: list[_Held], bits: Tensor) -> None:
        """`bits` [len(held), words]: the masks of these states."""
        self._batch.batch_fill_next_token_bitmask([one.matcher for one in held], bits)
        for place in np.flatnonzero(np.bitwise_or.reduce(bits.numpy(), axis=1) == 0):
            bits[place] = self._end_bits(held[place].ends)

    def _ends_here(self, held: _Held) -> bool:
        """Whether nothing but the end may follow."""
        if held.matcher.is_terminated():
            return True
        if not held.matcher.is_completed():
            return False
        if held.state.only_end is None:
            held.matcher.fill_next_token_bitmask(self._probe)
            held.state.only_end = not bool((self._probe[0] & ~self._end_bits(held.ends)).any())
        return held.state.only_end

    def _end_bits(self, ends: tuple[int, ...]) -> Tensor:
        """The mask that allows the end of the answer alone. [ceil(V / 32)] int32"""
        if ends not in self._ends:
            words = torch.zeros(self._probe.shape[1], dtype=torch.int64)
            for token_id in ends:
                words[token_id // WORD] |= 1 << token_id % WORD
            self._ends[ends] = words.to(torch.int32)
        return self._ends[ends]


def hold(logits: Tensor, masks: Masks) -> Tensor:
    """`logits` [N, V], fp32, with the illegal tokens of the constrained rows set to -inf in place, all rows in one operation."""
    spread = torch.empty(len(logits), masks.bits.shape[1], dtype=masks.bits.dtype)
    spread[masks.rows] = masks.bits[masks.which]
    xgrammar.apply_token_bitmask_inplace(logits, spread.to(logits.device, non_blocking=True), indices=masks.rows)
    return logits


def _constrained(stream: Stream) -> bool:
    return stream.question.grammar is not None and stream.phase is not Phase.DONE
