from askmany.engine.config import SchedulerLimits
from askmany.engine.prefill import MOST_CHUNKS, plan_chunks, ready
from askmany.engine.prefix_tree import PrefixNode
from askmany.engine.request import DocumentState
from tests.helpers.workload import make_document


def make_limits(deterministic: bool = False) -> SchedulerLimits:
    return SchedulerLimits(streams=1, max_rows=1, step_tokens=100, prefill_chunk=8, tail_piece=2, deterministic=deterministic)


def make_states(*lengths: int) -> list[DocumentState]:
    """Documents of so many tokens below one instruction of 3."""
    instruction = PrefixNode(None, (1,) * 3, 0)
    states = []
    for length in lengths:
        state = DocumentState(make_document("a", [], []))
        state.path = [instruction, PrefixNode(instruction, (2,) * length, 3)]
        states.append(state)
    return states


def borders(states: list[DocumentState], budget_tokens: int, deterministic: bool = False) -> list[tuple[int, int, int]]:
    chunks = plan_chunks(states, budget_tokens, make_limits(deterministic))
    return [(len(chunk.node.token_ids), chunk.start, chunk.stop) for chunk in chunks]


def test_a_shared_node_is_planned_once_and_before_what_lies_below() -> None:
    assert borders(make_states(10, 20), 100) == [(3, 0, 3)]


def test_several_documents_fill_the_budget_oldest_first() -> None:
    states = make_states(10, 20, 30)
    assert not ready(states[0])
    states[0].path[0].stored = 3
    states[1].path[1].stored = 15
    assert borders(states, 100) == [(10, 0, 8), (20, 15, 20), (30, 0, 8)]
    assert borders(states, 15) == [(10, 0, 8), (20, 15, 20), (30, 0, 2)]
    assert borders(states, 13) == [(10, 0, 8), (20, 15, 20)]
    assert borders(states, 0) == []
    states[0].path[1].stored = 10
    assert ready(states[0])
    assert borders(states, 4) == [(20, 15, 19)]


def test_deterministic_chunks_are_whole_and_one_a_step() -> None:
    states = make_states(10, 20)
    states[0].path[0].stored = 3
    assert borders(states, 100, deterministic=True) == [(10, 0, 8)]
    assert borders(states, 7, deterministic=True) == []
    states[0].path[1].stored = 8
    assert borders(states, 2, deterministic=True) == [(10, 8, 10)]


def test_a_step_holds_no_more_chunks_than_devices_make_room_for() -> None:
    states = make_states(*[2] * (MOST_CHUNKS + 9))
    states[0].path[0].stored = 3
    assert len(borders(states, 10_000)) == MOST_CHUNKS
