"""The loop that owns an engine: several callers, refusals, losses, failures."""

import threading
from dataclasses import dataclass, replace

import pytest

from askmany.engine.errors import DocumentError, EngineError, QuestionError
from askmany.engine.fake import expected_answer, fake_engine
from askmany.engine.request import Document, Question, Sampling, StreamResult
from askmany.pipeline.engine_loop import EngineLoop


def document(key: str, questions: int = 3, tokens: int = 20) -> Document:
    asked = tuple(Question(f"q{i}", (i + 1, i + 2), Sampling(max_new_tokens=i + 1)) for i in range(questions))
    return Document(key, ((1, 2), tuple(range(tokens))), asked)


@dataclass(frozen=True)
class Counters:
    steps: int = 0


class Scripted:
    """An engine that gives what it is told to, a list of results a step."""

    def __init__(self, steps: list[list[StreamResult]], refuse: dict[str, Exception] | None = None) -> None:
        self.steps = steps
        self.refuse = refuse or {}
        self.submitted: list[Document] = []
        self.metrics = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self.steps)

    def submit(self, document: Document) -> None:
        if document.key in self.refuse:
            raise self.refuse.pop(document.key)
        self.submitted.append(document)

    def step(self) -> list[StreamResult]:
        self.metrics = replace(self.metrics, steps=self.metrics.steps + 1)
        return self.steps.pop(0)


def result(key: str, question_id: str) -> StreamResult:
    return StreamResult(key, question_id, (1,), "1", "length", -0.25, 1.0)


def test_many_callers_get_their_own_answers() -> None:
    loop = EngineLoop(fake_engine(kv_tokens=4096))
    failures: list[str] = []

    def caller(name: str) -> None:
        for i in range(5):
            asked = document(f"{name}{i}", questions=4, tokens=30 + i)
            ticket = loop.submit(asked)
            ticket.wait()
            for question in asked.questions:
                if ticket.results[question.question_id].answer_token_ids != expected_answer(asked, question):
                    failures.append(f"{name}{i}")

    threads = [threading.Thread(target=caller, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    loop.close()
    assert failures == []
    usage = loop.take_usage()
    assert usage["documents"] == 15
    assert usage["streams"] == 60
    assert loop.take_usage() == {}


def test_each_answer_is_reported_once() -> None:
    heard: list[str] = []
    loop = EngineLoop(fake_engine(), lambda found: heard.append(found.question_id))
    loop.submit(document("a")).wait()
    loop.close()
    assert sorted(heard) == ["q0", "q1", "q2"]


def test_refused_questions_leave_the_others() -> None:
    engine = Scripted([[result("a", "q0"), result("a", "q2")]], {"a": QuestionError("q1 is too long", ("q1",))})
    loop = EngineLoop(engine)
    ticket = loop.submit(document("a"))
    ticket.wait()
    assert set(ticket.results) == {"q0", "q2"}
    assert str(ticket.refused["q1"]) == "q1 is too long"
    assert [q.question_id for q in engine.submitted[0].questions] == ["q0", "q2"]
    loop.close()


@pytest.mark.parametrize("error", [DocumentError("too long", "too_long"), QuestionError("all of them")])
def test_refused_documents_end_at_once(error: Exception) -> None:
    loop = EngineLoop(Scripted([], {"a": error}))
    ticket = loop.submit(document("a"))
    ticket.wait()
    assert set(ticket.refused) == {"q0", "q1", "q2"}
    assert ticket.lost == ()
    loop.close()


def test_a_document_without_questions_is_done() -> None:
    loop = EngineLoop(Scripted([]))
    ticket = loop.submit(document("a", questions=0))
    assert ticket.done.wait(20)
    assert (ticket.results, ticket.refused, ticket.lost, ticket.failure) == ({}, {}, (), None)
    loop.close()


def test_lost_answers_are_named_and_unexpected_ones_counted() -> None:
    steps = [[result("a", "q2"), result("a", "q2"), result("a", "nobody asked")], [result("b", "q0"), result("gone", "q0")]]
    loop = EngineLoop(Scripted(steps))
    ticket = loop.submit(document("a"))
    ticket.wait()
    assert ticket.lost == ("q0", "q1")
    assert set(ticket.results) == {"q2"}
    assert loop.take_usage() == {"steps": 2, "unexpected_answers": 4}
    loop.close()


def test_a_broken_engine_fails_everything_from_then_on() -> None:
    class Broken(Scripted):
        def step(self) -> list[StreamResult]:
            raise ValueError("device lost")

    loop = EngineLoop(Broken([[]]))
    first = loop.submit(document("a"))
    with pytest.raises(EngineError, match="device lost"):
        first.wait()
    with pytest.raises(EngineError, match="device lost"):
        loop.submit(document("b")).wait()
    loop.close()


def test_an_engine_that_breaks_while_taking_in_is_broken_too() -> None:
    loop = EngineLoop(Scripted([], {"a": MemoryError("no room")}))
    with pytest.raises(EngineError, match="no room"):
        loop.submit(document("a")).wait()
    loop.close()


def test_close_finishes_the_work_at_hand() -> None:
    loop = EngineLoop(fake_engine())
    tickets = [loop.submit(document(f"d{i}")) for i in range(4)]
    loop.close()
    assert all(ticket.done.is_set() and len(ticket.results) == 3 for ticket in tickets)
