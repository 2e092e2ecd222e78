"""Where grammars stand, as names: streams under one grammar that have said the same tokens share a state, and a mask.

A state that a second stream comes to keeps its mask; both states and masks are kept up to a number, the longest unused go first. Knows
neither matchers nor streams; what a mask says is not its business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor

MOST_STATES = 1 << 15
MOST_MASKS = 1024


class State:
    """One state. `bits` [ceil(V / 32)] int32: its mask, where it is kept; `only_end`: whether the answer must end here, where known."""

    __slots__ = ("bits", "only_end", "visits")

    def __init__(self) -> None:
        self.bits: Tensor | None = None
        self.only_end: bool | None = None
        self.visits = 0


class GrammarStates:
    """The states that are known."""

    def __init__(self, most_states: int = MOST_STATES, most_masks: int = MOST_MASKS) -> None:
        self._most_states, self._most_masks = most_states, most_masks
        self._states: OrderedDict[tuple[Hashable, int], State] = OrderedDict()  # by where it comes from, and the token said there
        self._kept: OrderedDict[State, None] = OrderedDict()

    def after(self, where: Hashable, token_id: int) -> State:
        """The state after `token_id` at `where`: a state, or the name of a grammar (and -1)."""
        found = self._states.setdefault((where, token_id), State())
        self._states.move_to_end((where, token_id))
        if len(self._states) > self._most_states:
            self._states.popitem(last=False)
        return found

    def visit(self, state: State) -> None:
        """A mask is asked for here."""
        state.visits += 1
        if state in self._kept:
            self._kept.move_to_end(state)

    def keep(self, state: State, bits: Tensor) -> None:
        """Keep a copy of the state's mask if it was asked for more than once."""
        if state.visits < 2 or state.bits is not None:
            return
        state.bits = bits.clone()
        self._kept[state] = None
        if len(self._kept) > self._most_masks:
            self._kept.popitem(last=False)[0].bits = None
