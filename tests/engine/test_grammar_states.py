"""States of grammars: the same tokens lead to the same state, others to others, and the longest unused is forgotten."""

from __future__ import annotations

from askmany.engine.grammar_states import GrammarStates


def test_a_state_is_its_grammar_and_its_tokens() -> None:
    states = GrammarStates()
    one, other = states.after("a", -1), states.after("b", -1)
    assert one is not other
    assert states.after("a", -1) is one
    assert states.after(one, 3) is states.after(one, 3)
    assert states.after(one, 3) is not states.after(other, 3)
    assert states.after(one, 4) is not states.after(one, 3)
    assert states.after(states.after(one, 3), 4) is not states.after(states.after(one, 4), 3)


def test_the_longest_unused_is_forgotten() -> None:
    states = GrammarStates(most=2)
    first, second = states.after("g", 1), states.after("g", 2)
    assert states.after("g", 1) is first
    states.after("g", 3)
    assert states.after("g", 1) is first
    assert states.after("g", 2) is not second
