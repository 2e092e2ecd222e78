from collections.abc import Callable

import pytest

from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine, describe
from askmany.engine.errors import EngineError
from askmany.engine.fake import FakeExecutor, FakeTextStream, Faults, fake_engine
from askmany.engine.request import Document, Stream
from askmany.engine.step import Sampled, StepPlan
from tests.helpers.workload import make_document, make_question


def make_engine(**changes: object) -> Engine:
    return fake_engine(EngineConfig.model_validate({"page_size": 4} | changes), kv_tokens=4000)


class Altered:
    """The fake executor with its samples changed."""

    def __init__(self, change: Callable[[list[Sampled]], list[Sampled]]) -> None:
        self.inner = FakeExecutor(page_size=4)
        self.change = change
        self.released: list[Stream] = []

    def execute(self, plan: StepPlan) -> list[Sampled]:
        return self.change(self.inner.execute(plan))

    def release(self, streams: list[Stream]) -> None:
        self.released += streams


def test_results_by_hand() -> None:
    """1+2 + 3+4 + 5+6 = 21; the second question stops before "9 40", the third at its stop token."""
    questions = (
        make_question("plain", [5, 6], 3),
        make_question("string", [26], 9, stop=("9 40",)),
        make_question("token", [20], 9, stop_token_ids=(32,)),
    )
    engine = make_engine()
    engine.submit(Document("doc", ((1, 2), (3, 4)), questions))
    assert engine.has_work
    results = {result.question_id: result for result in engine.drain()}
    assert not engine.has_work
    plain, string, token = results["plain"], results["string"], results["token"]
    assert (plain.document_key, plain.answer_token_ids, plain.text, plain.finish_reason) == ("doc", (21, 22, 23), "21 22 23", "length")
    assert (plain.logprob, plain.margin) == (-0.75, 1.021)
    assert (string.answer_token_ids, string.text, string.finish_reason) == ((36, 37, 38, 39, 40), "36 37 38 3", "stop")
    assert (token.answer_token_ids, token.text, token.finish_reason, token.logprob) == ((30, 31), "30 31", "stop", -0.5)


def test_end_of_sequence_ends_every_answer() -> None:
    engine = fake_engine(kv_tokens=400, eos_token_ids=(12, 15))
    engine.submit(Document("doc", ((1,),), (make_question("a", [10], 9), make_question("b", [12], 9))))
    assert {result.question_id: (result.answer_token_ids, result.finish_reason) for result in engine.drain()} == {
        "a": ((11,), "stop"),
        "b": ((13, 14), "stop"),
    }


def test_results_come_as_they_finish_and_streams_are_released() -> None:
    engine = make_engine()
    executor = Altered(lambda samples: samples)
    engine.executor = executor
    engine.submit(Document("doc", ((1,),), (make_question("long", [5], 3), make_question("short", [6], 1))))
    assert engine.step() == []
    assert [result.question_id for result in engine.step()] == ["short"]
    assert [stream.question.question_id for stream in executor.released] == ["short"]
    assert engine.step() == []
    assert [result.question_id for result in engine.step()] == ["long"]
    assert engine.step() == []


def test_documents_can_be_submitted_while_others_run() -> None:
    engine = make_engine()
    answered = []
    for i in range(5):
        engine.submit(make_document(f"d{i}", [[1], [i] * 9], [2, 3]))
        answered += engine.step()
    answered += engine.drain()
    assert len({(result.document_key, result.question_id) for result in answered}) == len(answered) == 10
    assert engine.metrics.documents == 5


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_a_failing_step_is_an_engine_error_that_describes_it(layout: str) -> None:
    config = EngineConfig.model_validate({"layout": layout})
    engine = fake_engine(config, kv_tokens=4000, faults=Faults(raise_on=frozenset({"bad"})))
    engine.submit(make_document("good", [[1], [2] * 5], [2], max_new_tokens=9))
    engine.submit(make_document("bad", [[1], [3] * 5], [2, 2]))
    unit = "3 runs" if layout == "split" else "2 masked runs"
    with pytest.raises(EngineError, match=rf"step 3 \(6 tokens, 0 chunks, {unit} of documents 'bad', 'good'\) failed: .*on document 'bad'"):
        list(engine.drain())
    with pytest.raises(EngineError, match=r"the engine broke before: step 3"):
        engine.step()


def broken_by(change: Callable[[list[Sampled]], list[Sampled]]) -> EngineError:
    engine = make_engine()
    engine.executor = Altered(change)
    engine.submit(make_document("doc", [[1]], [2, 2]))
    with pytest.raises(EngineError) as caught:
        list(engine.drain())
    return caught.value


@pytest.mark.parametrize(
    "change",
    [lambda samples: samples[:-1], lambda samples: samples + samples, lambda samples: samples[::-1]],
    ids=["dropped", "doubled", "reordered"],
)
def test_samples_that_do_not_match_the_plan_break_the_engine(change: Callable[[list[Sampled]], list[Sampled]]) -> None:
    assert "the plan asks for a token of 2 streams" in str(broken_by(change))


def test_a_detokenizer_that_fails_breaks_the_engine() -> None:
    class Failing(FakeTextStream):
        def push(self, token_id: int) -> str:
            raise ValueError(f"no piece {token_id}")

    class FailingDetokenizer:
        def stream(self) -> Failing:
            return Failing()

    engine = make_engine()
    broken = Engine(engine.scheduler, engine.executor, FailingDetokenizer())
    broken.submit(make_document("doc", [[1]], [2]))
    with pytest.raises(EngineError, match="ValueError: no piece 3"):
        list(broken.drain())


def test_a_plan_that_cannot_be_made_breaks_the_engine() -> None:
    engine = make_engine()
    engine.submit(make_document("doc", [[1]], [2]))
    engine.scheduler.plan()  # a stranger's plan that is never advanced
    with pytest.raises(EngineError, match="step 1 failed: AssertionError: the last plan was not advanced"):
        engine.step()


def test_lost_pages_are_noticed_when_the_engine_falls_idle() -> None:
    engine = make_engine()
    engine.submit(make_document("doc", [[1]], [2]))
    engine.step()
    engine.scheduler.tree.pool.allocate(1)
    with pytest.raises(EngineError, match="pages were lost or counted twice"):
        list(engine.drain())


def test_many_documents_are_described_shortly() -> None:
    engine = make_engine()
    for i in range(8):
        engine.submit(make_document(f"d{i}", [[1]], [2]))
    first = engine.scheduler.plan()
    assert first is not None
    assert describe(first) == "1 tokens, 1 chunks, 0 masked runs"
    engine.scheduler.advance(first, engine.executor.execute(first), {})
    second = engine.scheduler.plan()
    assert second is not None
    assert describe(second) == "16 tokens, 0 chunks, 8 runs of documents 'd0', 'd1', 'd2', 'd3', 'd4' and 3 more"
