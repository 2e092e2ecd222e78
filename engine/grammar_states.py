"""Where grammars stand, as names: streams under one grammar that have said the same tokens share a state, and so a mask.

States are kept up to a number, the longest unused go first; one that comes again has another name then. Masks are not kept: filling one
costs what copying it would. Knows neither matchers nor streams.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MOST_STATES = 1 << 17


class State:
    """One state. `only_end`: whether the answer must end here, where known."""

    __slots__ = ("only_end",)

    def __init__(self) -> None:
        self.only_end: bool | None = None


class GrammarStates:
    """The states that are known."""

    def __init__(self, most: int = MOST_STATES) -> None:
        self._most = most
        self._states: OrderedDict[tuple[Hashable, int], State] = OrderedDict()  # by where it comes from, and the token said there

    def after(self, where: Hashable, token_id: int) -> State:
        """The state after `token_id` at `where`: a state, or the name of a grammar (and -1)."""
        key = (where, token_id)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = State()
            if len(self._states) > self._most:
                self._states.popitem(last=False)
        else:
            self._states.move_to_end(key)
        return found
