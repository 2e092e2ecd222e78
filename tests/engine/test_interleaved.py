"""The interleaved scheduler, through the fake engine: its executor refuses any plan that a device could not run rightly."""

import pytest
from hypothesis import given, settings

from askmany.engine.config import EngineConfig
from askmany.engine.errors import DocumentError, QuestionError
from askmany.engine.interleaved import weave
from askmany.engine.request import Document, Phase
from tests.helpers.fake_runs import recorded_engine, run_documents, run_workload
from tests.helpers.workload import Workload, make_document, make_question, workloads


def make_config(**changes: object) -> EngineConfig:
    given = {"layout": "interleaved", "page_size": 4, "max_rows": 4, "step_tokens": 16, "prefill_chunk": 8, "tail_piece": 2} | changes
    return EngineConfig.model_validate(given)


@settings(max_examples=150, deadline=None)
@given(workloads(layout="interleaved"))
def test_every_question_is_answered_once_and_rightly(work: Workload) -> None:
    assert run_workload(work).results == work.expected


@settings(max_examples=40, deadline=None)
@given(workloads(layout="interleaved", deterministic=True))
def test_deterministic_steps_hold_one_kind_of_work_cut_at_fixed_borders(work: Workload) -> None:
    chunk = work.config.prefill_chunk
    ran = run_workload(work)
    for step in ran.steps:
        tails, decodes = 0, 0
        for stream_ids, start, entries in step.woven:
            lengths = [len(ran.recorder.streams[stream_id].question.token_ids) for stream_id in stream_ids]
            in_tails = start < sum(lengths)
            tails, decodes = tails + in_tails, decodes + (not in_tails)
            if in_tails:
                assert start % chunk == 0
                assert start + len(entries) == min(start + chunk, sum(lengths))
        assert sum(map(bool, (step.chunks, tails, decodes))) == 1
        assert len(step.chunks) <= 1


def test_tails_are_woven_token_by_token_in_turn() -> None:
    assert weave([2, 1, 3]) == ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (2, 2))
    assert weave([1]) == ((0, 0),)


def test_a_request_by_hand() -> None:
    """Two streams with tails of 2 and 1 tokens, answers of 1 and 3; the dead one feeds nothing more."""
    questions = (make_question("x", [20, 21], 1), make_question("y", [30], 3))
    ran = run_documents(make_config(streams=2), 100, [Document("a", ((5,),), questions)])
    assert ran.results == {("a", "x"): ((46,), "46", "length"), ("a", "y"): ((35, 36, 37), "35 36 37", "length")}
    assert [step.woven for step in ran.steps] == [
        (),
        (((0, 1), 0, ((0, 0), (1, 0), (0, 1))),),
        (((0, 1), 3, ((1, 1),)),),
        (((0, 1), 4, ((1, 2),)),),
    ]


def test_a_request_keeps_its_place_and_pages_until_all_of_it_is_done() -> None:
    questions = (make_question("short", [1], 1), make_question("long", [2], 6), make_question("next", [3], 1))
    engine, recorder = recorded_engine(make_config(streams=2, max_rows=2, page_size=1), 100)
    engine.submit(Document("a", ((10,),), questions))
    free, done = [], []
    while engine.has_work:
        done += [result.question_id for result in engine.step()]
        free.append(engine.scheduler.tree.pool.available)
    assert done == ["short", "long", "next"]
    assert free == [92] * 6 + [99] * 2  # 1 + (1 + 6) slots until the request is done; "next" starts and ends within one step
    assert [len(step.woven) for step in recorder.steps] == [0, *[1] * 7]


def unequal_documents() -> list[Document]:
    """Four documents of one request each, of answers 2, 9, 2, 2 tokens long; the prefixes are alike, so they are prefilled once."""
    return [make_document(f"d{i}", [[10]], [1, 1], max_new_tokens=length) for i, length in enumerate([2, 9, 2, 2])]


def live_requests(config: EngineConfig) -> list[int]:
    return [len(step.woven) for step in run_documents(config, 400, unequal_documents()).steps]


def test_continuous_batching_refills_a_place_at_once() -> None:
    assert live_requests(make_config(streams=2)) == [0, 2, 2, 2, 2, 2, 2, 1, 1, 1]


def test_run_to_completion_starts_a_batch_when_the_last_one_is_done() -> None:
    assert live_requests(make_config(streams=2, batching="run_to_completion")) == [0, 2, 2, *[1] * 7, 2, 2]


def test_requests_are_cut_where_the_pool_ends() -> None:
    """P is 4, but the pool holds the path and two streams."""
    ran = run_documents(make_config(page_size=1), 5 + 2 * 6, [make_document("a", [[11] * 5], [3] * 5, max_new_tokens=4)])
    assert {stream_ids for step in ran.steps for stream_ids, _, _ in step.woven} == {(0, 1), (2, 3), (4,)}
    assert len(ran.results) == 5


def test_tails_beyond_the_budget_take_several_steps() -> None:
    ran = run_documents(make_config(step_tokens=4, streams=3), 400, [make_document("a", [[11]], [2, 3, 1], max_new_tokens=2)])
    assert [entries for step in ran.steps for _, _, entries in step.woven] == [
        ((0, 0), (1, 0), (2, 0), (0, 1)),
        ((1, 1), (1, 2)),
        ((0, 2), (1, 3), (2, 1)),
    ]


def test_what_cannot_fit_and_keys_in_use_are_refused_at_submit() -> None:
    engine, _ = recorded_engine(make_config(), 40)
    with pytest.raises(DocumentError, match="KV pool 10 pages of 4 tokens"):
        engine.submit(make_document("a", [[1] * 40], [1]))
    with pytest.raises(QuestionError, match="'q1'"):
        engine.submit(make_document("a", [[1] * 30], [1, 30]))
    engine.submit(make_document("none", [[1]], []))
    assert not engine.has_work
    engine.submit(make_document("a", [[1]], [1]))
    with pytest.raises(DocumentError, match="in the engine already"):
        engine.submit(make_document("a", [[1]], [1]))


def test_plan_and_advance_alternate() -> None:
    engine, recorder = recorded_engine(make_config(), 100)
    engine.submit(make_document("a", [[1]], [1]))
    plan = engine.scheduler.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match="was not advanced"):
        engine.scheduler.plan()
    engine.scheduler.advance(plan, recorder.execute(plan), {})
    with pytest.raises(AssertionError, match="advance without its plan"):
        engine.scheduler.advance(plan, [], {})


@pytest.mark.parametrize("spoil", ["phase", "stored", "done"])
def test_check_integrity_sees_what_is_wrong(spoil: str) -> None:
    engine, recorder = recorded_engine(make_config(), 100)
    engine.submit(make_document("a", [[1]], [1, 1], max_new_tokens=9))
    engine.step(), engine.step(), engine.step()
    assert engine.scheduler.check_integrity()
    streams = list(recorder.streams.values())
    if spoil == "phase":
        streams[0].phase = Phase.TAIL
    elif spoil == "stored":
        streams[1].stored += 1
    else:
        for stream in streams:
            stream.phase = Phase.DONE
    with pytest.raises(AssertionError):
        engine.scheduler.check_integrity()
