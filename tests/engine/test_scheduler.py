"""The split scheduler, through the fake engine: its executor refuses any plan that a device could not run rightly."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from askmany.engine.config import EngineConfig
from askmany.engine.errors import DocumentError, QuestionError
from askmany.engine.request import Document, Phase, Question, Sampling, Stream
from tests.helpers.fake_runs import check_pages_come_free, recorded_engine, run_documents, run_workload
from tests.helpers.workload import VOCAB_SIZE, Workload, make_document, make_question, outcome, workloads


def make_config(**changes: object) -> EngineConfig:
    given = {"page_size": 4, "max_rows": 8, "step_tokens": 16, "prefill_chunk": 8, "tail_piece": 2} | changes
    return EngineConfig.model_validate(given)


@settings(max_examples=150, deadline=None)
@given(workloads(layout="split"))
def test_every_question_is_answered_once_and_rightly(work: Workload) -> None:
    assert run_workload(work).results == work.expected


@settings(max_examples=40, deadline=None)
@given(workloads(layout="split", deterministic=True))
def test_deterministic_steps_hold_one_kind_of_work_cut_at_fixed_borders(work: Workload) -> None:
    limits = work.config.limits
    ran = run_workload(work)
    for step in ran.steps:
        assert step.kinds == 1
        assert len(step.chunks) <= 1
        for tokens, start, stop in step.chunks:
            assert start % limits.prefill_chunk == 0
            assert stop == min(start + limits.prefill_chunk, len(tokens))
        for stream_id, start, stop in step.tails:
            assert start % limits.tail_piece == 0
            assert stop == min(start + limits.tail_piece, len(ran.recorder.streams[stream_id].question.token_ids))


@settings(max_examples=30, deadline=None)
@given(workloads(layout="split", deterministic=True))
def test_deterministic_pieces_of_a_stream_do_not_depend_on_its_siblings(work: Workload) -> None:
    together = run_workload(work).pieces()
    assert together.keys() == work.expected.keys()
    for document in work.documents:
        for question in document.questions:
            alone = Document(document.key, document.segments, (question,))
            pieces = run_documents(work.config, work.kv_tokens, [alone]).pieces()
            assert pieces[document.key, question.question_id] == together[document.key, question.question_id]


def test_work_of_all_kinds_shares_a_step_decode_rows_first() -> None:
    engine, recorder = recorded_engine(make_config(max_rows=4), 400)
    engine.submit(make_document("a", [[1], [2] * 7], [3, 3], max_new_tokens=9))
    engine.step(), engine.step(), engine.step()  # the instruction, the document, both tails
    engine.submit(make_document("b", [[1], [2] * 7], [5]))  # the same prefix: stored already
    engine.submit(make_document("c", [[1], [9] * 30], [5]))
    engine.step()
    fed = recorder.steps[-1]
    assert (len(fed.decodes), [stop - start for _, start, stop in fed.tails]) == (2, [5])
    assert [(start, stop) for _, start, stop in fed.chunks] == [(0, 8)]
    engine.step()
    assert recorder.steps[-1].chunks[0][1:] == (8, 16)


def test_documents_that_share_an_instruction_prefill_it_once() -> None:
    ran = run_documents(make_config(), 4000, [make_document(f"d{i}", [[5] * 20, [i] * 10], [2]) for i in range(4)])
    chunks = [chunk for step in ran.steps for chunk in step.chunks]
    assert [(start, stop) for tokens, start, stop in chunks if tokens == (5,) * 20] == [(0, 8), (8, 16), (16, 20)]
    assert ran.engine.metrics.prefill_tokens == 20 + 4 * 10
    assert ran.engine.metrics.prefix_hit_tokens == 3 * 20


def test_an_ended_streams_place_is_taken_at_the_next_step() -> None:
    """One place: question 1 feeds its tail in the very step after question 0 ended."""
    ran = run_documents(make_config(streams=1), 100, [make_document("a", [[8]], [2, 2, 2], max_new_tokens=3)])
    assert [(len(step.tails), len(step.decodes)) for step in ran.steps[1:]] == [(1, 0), (0, 1), (0, 1)] * 3


def test_ended_streams_free_their_pages_at_once() -> None:
    engine, _ = recorded_engine(make_config(page_size=1, streams=1), 100)
    engine.submit(make_document("a", [[8, 8]], [3, 5], max_new_tokens=1))
    pool = engine.scheduler.tree.pool
    free = []
    while engine.has_work:
        engine.step()
        free.append(pool.available)
    assert free == [100 - 2 - 3, 100 - 2, 100 - 2]


def test_documents_and_questions_are_answered_in_order_of_submission() -> None:
    documents = [make_document(f"d{i}", [[3], [20 + i] * 9], [3] * 5) for i in range(6)]
    ran = run_documents(make_config(max_rows=3, streams=2), 200, documents)
    starts = [(stream.document.document.key, stream.question.question_id) for stream in ran.recorder.streams.values()]
    assert starts[0] == ("d0", "q0")
    for key in {key for key, _ in starts}:
        assert [question for start_key, question in starts if start_key == key] == [f"q{i}" for i in range(5)]
    firsts = [key for key, question in starts if question == "q0"]
    assert firsts == [f"d{i}" for i in range(6)]


def test_a_long_question_is_not_starved_by_short_ones_behind_it() -> None:
    """The long one needs half the pool; the short ones of the next document would keep it full for good."""
    long = make_question("long", [1] * 40, 20)
    first = Document("a", ((8,),), (make_question("q0", [1], 30), long))
    second = make_document("b", [[9]], [2] * 50, max_new_tokens=9)
    engine, recorder = recorded_engine(make_config(max_rows=8), 120)
    engine.submit(first)
    engine.submit(second)
    results = list(engine.drain())
    order = [result.question_id for result in results if result.document_key == "a"]
    assert set(order) == {"q0", "long"}
    started = [stream.question.question_id for stream in recorder.streams.values()]
    assert started[:2] == ["q0", "long"]


def test_a_document_without_questions_is_done_already() -> None:
    engine, _ = recorded_engine(make_config(), 100)
    engine.submit(make_document("a", [[1]], []))
    assert not engine.has_work
    assert engine.step() == []


def test_what_cannot_fit_and_keys_in_use_are_refused_at_submit() -> None:
    engine, _ = recorded_engine(make_config(), 40)
    with pytest.raises(DocumentError, match="KV pool 10 pages of 4 tokens") as caught:
        engine.submit(make_document("a", [[1] * 40], [1]))
    assert caught.value.status == "too_long"
    with pytest.raises(QuestionError, match="'q1'"):
        engine.submit(make_document("a", [[1] * 30], [1, 30]))
    assert not engine.has_work
    engine.submit(make_document("a", [[1]], [1]))
    with pytest.raises(DocumentError, match="document 'a' is in the engine already"):
        engine.submit(make_document("a", [[1]], [1]))
    assert len(list(engine.drain())) == 1
    engine.submit(make_document("a", [[1]], [1]))
    assert len(list(engine.drain())) == 1


def test_plan_and_advance_alternate() -> None:
    engine, recorder = recorded_engine(make_config(), 100)
    scheduler = engine.scheduler
    scheduler.submit(make_document("a", [[1]], [1]))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match="was not advanced"):
        scheduler.plan()
    scheduler.advance(plan, recorder.execute(plan), {})
    with pytest.raises(AssertionError, match="advance without its plan"):
        scheduler.advance(plan, [], {})


def test_a_stream_ends_at_its_budget_even_if_nobody_says_so() -> None:
    engine, recorder = recorded_engine(make_config(), 100)
    scheduler = engine.scheduler
    scheduler.submit(make_document("a", [[1]], [1, 1], max_new_tokens=3))
    ended: list[Stream] = []
    while plan := scheduler.plan():
        ended += scheduler.advance(plan, recorder.execute(plan), {})
    assert [(len(stream.answer_token_ids), stream.finish_reason) for stream in ended] == [(3, "length")] * 2
    assert all((stream.document.live, stream.document.done, stream.document.finished) == (0, 2, True) for stream in ended)


@pytest.mark.parametrize("spoil", ["phase", "pages", "stored", "answer", "budget"])
def test_check_integrity_sees_what_is_wrong(spoil: str) -> None:
    engine, recorder = recorded_engine(make_config(), 100)
    engine.submit(make_document("a", [[1]], [1], max_new_tokens=9))
    engine.step(), engine.step(), engine.step()
    assert engine.scheduler.check_integrity()
    (stream,) = recorder.streams.values()
    if spoil == "phase":
        stream.phase = Phase.WAITING
    elif spoil == "pages":
        stream.pages = []
    elif spoil == "stored":
        stream.stored += 1
    elif spoil == "answer":
        stream.phase = Phase.TAIL
    else:
        stream.answer_token_ids += [1] * 9
    with pytest.raises(AssertionError):
        engine.scheduler.check_integrity()


def isolation_questions() -> list[Question]:
    """Forty questions, each with its own limit (1 to 40), temperature, seed and, every third, stop string or stop token."""
    questions = []
    for i in range(40):
        sampling = Sampling(max_new_tokens=i + 1, temperature=(i % 4) / 2, seed=i * 17)
        if i % 3 == 1:
            sampling = replace(sampling, stop=(f" {(i * 7) % VOCAB_SIZE}",))
        elif i % 3 == 2:
            sampling = replace(sampling, stop_token_ids=((i * 5) % VOCAB_SIZE,))
        questions.append(Question(f"q{i}", tuple(range(i, i + 1 + i % 9)), sampling))
    return questions


@pytest.mark.parametrize("layout", ["split", "interleaved"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("wave", [1, 7, 40])
def test_streams_are_isolated(layout: str, deterministic: bool, wave: int) -> None:
    """In order, reversed, shuffled and alone, in waves of any size: the same results, none over its own limit."""
    questions = isolation_questions()
    prefix = ((4, 5), tuple(range(30)))
    config = make_config(layout=layout, deterministic=deterministic, streams=wave, max_rows=40, step_tokens=48)
    expected = {q.question_id: outcome(Document("a", prefix, (q,)), q) for q in questions}
    assert len({len(ids) for ids, _, _ in expected.values()}) > 15
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}
    orders = [questions, questions[::-1], questions[::3] + questions[1::3] + questions[2::3], *([q] for q in questions[::5])]
    for order in orders:
        answered = run_documents(config, 4000, [Document("a", prefix, tuple(order))]).results
        results = {question_id: result for (_, question_id), result in answered.items()}
        assert results == {q.question_id: expected[q.question_id] for q in order}
        assert all(len(results[q.question_id][0]) <= q.sampling.max_new_tokens for q in order)


def test_many_small_documents_run_together() -> None:
    """Rows are filled from several documents when none has questions enough."""
    engine, recorder = recorded_engine(make_config(), 4000)
    for i in range(4):
        engine.submit(make_document(f"d{i}", [[1], [12 + i]], [1, 1], max_new_tokens=12))
    list(engine.drain())
    assert max(len(step.decodes) for step in recorder.steps) == 8
    check_pages_come_free(engine)
