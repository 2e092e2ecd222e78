"""A worker in this process: documents in, one shard and one acknowledgement a group out, whatever happens to a document."""

import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.choice import Expected
from askmany.engine.engine import Engine
from askmany.engine.errors import EngineError
from askmany.engine.fake import Faults, expected_answer, fake_engine
from askmany.engine.request import Document, StreamResult
from askmany.pipeline.acks import Ack
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.building import build_engine, build_preparer, informed
from askmany.pipeline.commit import read_footer, shard_name
from askmany.pipeline.config import RunConfig
from askmany.pipeline.opening import OpenedRun
from askmany.pipeline.plan import Plan, make_plan
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.schema import answer_schema
from askmany.pipeline.worker import GroupWorker, Job
from tests.helpers.runs import opened_run, survey
from tests.helpers.word_model import words


@dataclass
class Bench:
    """An opened run, its plan in one group, and a worker of it."""

    opened: OpenedRun
    plan: Plan
    worker: GroupWorker
    deaths: list[BaseException] = field(default_factory=list)

    @property
    def group(self) -> str:
        return self.plan.groups[0].name

    def process(self) -> Ack:
        return self.worker.process(self.group, self.plan.rows(self.plan.groups[0]))

    def rows(self) -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        table = pq.read_table(self.opened.store.open(shard_name(self.group)))
        assert table.schema.equals(answer_schema(self.opened.config.input.keep))
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows


def bench(
    folder: Path,
    rows: list[Any],
    engine: Callable[[RunConfig], Any] = lambda config: fake_engine(config.engine),
    preparer: Callable[[RunConfig], Preparer] = build_preparer,
    **values: Any,
) -> Bench:
    opened = opened_run(folder, rows, **values)
    plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits(largest_share=1.0, remaining_division=0.1))
    assert len(plan.groups) == 1
    deaths: list[BaseException] = []
    worker = GroupWorker(Job(opened.config, opened.fingerprint, 1, engine, preparer), deaths.append)
    return Bench(opened, plan, worker, deaths)


def docs(count: int) -> list[dict[str, Any]]:
    return [{"doc_id": f"d{i}", "text": words(5 + i, i), "title": f"T{i}"} for i in range(count)]


def test_a_group_becomes_a_shard_and_an_acknowledgement(tmp_path: Path) -> None:
    asked = [{"id": "a", "question": "w1 w2", "answers": ["x"]}, {"id": "b", "question": "w3", "max_new_tokens": 5}]
    made = bench(
        tmp_path,
        [*docs(6), {"doc_id": "empty", "text": " "}, {"doc_id": "long", "text": words(99)}],
        questions=asked,
        input={"keep": ["title"]},
    )
    ack = made.process()
    rows = made.rows()
    assert [(r["doc_id"], r["question_id"]) for r in rows] == sorted(
        (d, q) for d in [*(f"d{i}" for i in range(6)), "empty", "long"] for q in "ab"
    )
    assert (ack.footer.documents, ack.footer.rows, ack.footer.attempt, ack.footer.statuses) == (
        8,
        16,
        1,
        {"ok": 12, "too_long": 2, "empty_document": 2},
    )
    assert ack.footer == read_footer(made.opened.store, shard_name(made.group))
    assert ack.footer.usage["documents"] == 6
    assert ack.footer.usage["answer_tokens"] == 6 * 7
    for row in rows[:12]:
        source = next(d for d in docs(6) if d["doc_id"] == row["doc_id"])
        assert row["title"] == source["title"]
        assert row["document_tokens"] == len(source["text"].split())
        assert row["finish_reason"] == "length"
        assert row["logprob"] == -0.25 * len(row["answer_token_ids"])
        assert row["references"] == (["x"] if row["question_id"] == "a" else None)
        assert row["answer"] == " ".join(map(str, row["answer_token_ids"]))
    made.worker.close()


def test_an_engine_that_knows_the_plan_tells_what_it_chose(tmp_path: Path) -> None:
    expected = Expected(20, 1, 2, 2, most_questions=1, streams=40)
    made = bench(tmp_path, docs(2), engine=informed(build_engine, expected))
    ack = Ack.load(made.process().dump())
    assert ack.choice is not None
    assert {name: ack.choice[name] for name in ("layout", "rows", "streams")} == {"layout": "split", "rows": 40, "streams": 1}
    assert "choice" not in ack.line()
    made.worker.close()
    for name, engine in (("without a plan", build_engine), ("of another kind", informed(fake, expected))):
        (tmp_path / name).mkdir()
        made = bench(tmp_path / name, docs(2), engine=engine)
        assert Ack.load(made.process().dump()).choice is None
        made.worker.close()


def fake(config: RunConfig) -> Engine:
    """Knows of no plan."""
    return fake_engine(config.engine)


def test_answers_are_the_ones_the_engine_gives_for_these_tokens(tmp_path: Path) -> None:
    made = bench(tmp_path, docs(4), sampling={"temperature": 1.0, "seed": 5})
    made.process()
    for row in made.rows():
        source = next(d for d in docs(4) if d["doc_id"] == row["doc_id"])
        (line,) = [n for n, d in enumerate(docs(4)) if d["doc_id"] == row["doc_id"]]
        prepared = made.opened.preparer.prepare(next(s for s in scan_all(made) if s.doc_id == f"d{line}"))
        document = prepared.for_engine("k")
        assert tuple(row["answer_token_ids"]) == expected_answer(document, document.questions[0])
        assert source["text"] == prepared.text


def scan_all(made: Bench) -> Any:
    from askmany.pipeline.readers import plan_spans, scan

    for file in made.opened.files:
        for span in plan_spans(file, made.opened.config.input, 1 << 30):
            yield from scan(span, made.opened.config.input)


def test_documents_that_went_or_changed_are_error_records(tmp_path: Path) -> None:
    made = bench(tmp_path, docs(3))
    path = tmp_path / "d.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1].replace("w1 ", "w7 ") + "x" * (len(lines[2]) - 1) + "\n")
    ack = made.process()
    rows = {row["doc_id"]: row for row in made.rows()}
    assert ack.footer.statuses == {"ok": 1, "error": 2}
    assert "has changed since it was planned" in rows["d1"]["error"]
    assert "malformed JSON" in rows["d2"]["error"]
    assert made.deaths == []


def test_own_questions_of_a_lost_document_have_their_records(tmp_path: Path) -> None:
    rows = [{"doc_id": "a", "text": "w1", "questions": [{"qid": "x", "question": "w2"}, "w3"]}]
    made = bench(tmp_path, rows, input={"questions": "questions"})
    (tmp_path / "d.jsonl").unlink()
    ack = made.process()
    assert ack.footer.rows == made.plan.records == 3
    assert {row["question_id"] for row in made.rows()} >= {"x"}
    assert all(row["status"] == "error" and "cannot be read again" in row["error"] for row in made.rows())


class Exploding(Preparer):
    """Fails on one document in a way nobody foresaw, but only on workers."""

    def parts(self, source: Any) -> Any:
        if source.doc_id == "d1":
            raise ZeroDivisionError("odd")
        return super().parts(source)


def test_an_unforeseen_failure_of_one_document_stays_with_it(tmp_path: Path) -> None:
    def exploding(config: RunConfig) -> Preparer:
        made = build_preparer(config)
        made.__class__ = Exploding
        return made

    made = bench(tmp_path, docs(3), preparer=exploding)
    assert made.process().footer.statuses == {"ok": 2, "error": 1}
    assert "ZeroDivisionError: odd" in next(row["error"] for row in made.rows() if row["doc_id"] == "d1")


def test_documents_over_the_kv_pool_are_too_long(tmp_path: Path) -> None:
    made = bench(
        tmp_path,
        docs(3),
        engine=lambda config: fake_engine(config.engine.model_copy(update={"page_size": 16}), kv_tokens=32),
        questions=["w1", {"id": "q", "question": words(30)}],
    )
    ack = made.process()
    assert ack.footer.statuses == {"ok": 3, "too_long": 3}
    assert all("KV pool" in row["error"] for row in made.rows() if row["status"] == "too_long")


class Unreliable:
    """Gives results in random order, drops one question's the first time, gives another's twice."""

    def __init__(self, inner: Engine, drop: str, double: str, drops: int) -> None:
        self.inner, self.drop, self.double, self.drops = inner, drop, double, drops
        self.random = random.Random(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> list[StreamResult]:
        results = self.inner.step()
        for result in list(results):
            if result.question_id == self.drop and self.drops:
                self.drops -= 1
                results.remove(result)
            elif result.question_id == self.double:
                results.append(result)
        self.random.shuffle(results)
        return results


@pytest.mark.parametrize(("drops", "status"), [(1, "ok"), (2, "error")])
def test_answers_are_joined_by_their_own_keys(tmp_path: Path, drops: int, status: str) -> None:
    asked = [{"id": name, "question": f"w{i}"} for i, name in enumerate(["a", "b", "c", "d"])]
    made = bench(tmp_path, docs(1), engine=lambda config: Unreliable(fake_engine(config.engine), "b", "c", drops), questions=asked)
    ack = made.process()
    rows = {row["question_id"]: row for row in made.rows()}
    assert rows["b"]["status"] == status
    assert sum(ack.footer.statuses.values()) == ack.footer.rows == 4
    assert ack.footer.usage["unexpected_answers"] >= 1
    clean = bench(tmp_path / "clean" if (tmp_path / "clean").mkdir() is None else tmp_path, docs(1), questions=asked)
    clean.process()
    for row in clean.rows():
        if row["question_id"] != "b" or status == "ok":
            assert rows[row["question_id"]]["answer_token_ids"] == row["answer_token_ids"]
    if status == "error":
        assert "missing_stream" in rows["b"]["error"]


def test_a_broken_engine_ends_the_worker_and_writes_nothing(tmp_path: Path) -> None:
    def breaking(config: RunConfig) -> Engine:
        return fake_engine(config.engine, faults=Faults(raise_on=frozenset({f"{group}/d1"})))

    group = bench(tmp_path, docs(3)).group
    made = bench(tmp_path, docs(3), engine=breaking)
    with pytest.raises(EngineError, match="fault injected"):
        made.process()
    assert len(made.deaths) == 1
    assert not made.opened.store.exists(shard_name(group))


def dying(poison: str, died: list[list[str]]) -> Callable[[RunConfig], Any]:
    """Engines that end their process when this document is in them; `died` gets the documents that were."""

    class Dying:
        def __init__(self, inner: Engine) -> None:
            self.inner, self.keys = inner, []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def submit(self, document: Document) -> None:
            self.keys.append(document.key.rpartition("/")[2])
            self.inner.submit(document)

        def step(self) -> list[StreamResult]:
            if poison in self.keys:
                died.append(sorted(self.keys))
                raise EngineError("gone")
            results = self.inner.step()
            self.keys = [key for key in self.keys if key not in {r.document_key.rpartition("/")[2] for r in results}]
            return results

    return lambda config: Dying(fake_engine(config.engine))


@pytest.mark.parametrize(("limit", "count"), [(1, 3), (2, 5), (3, 30)])
def test_a_poison_document_is_given_up_and_the_others_answered(tmp_path: Path, limit: int, count: int) -> None:
    died: list[list[str]] = []
    made = bench(tmp_path, docs(count), engine=dying("d1", died), workers={"max_attempts": limit})
    job = Job(made.opened.config, made.opened.fingerprint, 1, dying("d1", died), build_preparer)
    for _ in range(limit):
        worker = GroupWorker(job, lambda error: None)
        with pytest.raises(EngineError):
            worker.process(made.group, made.plan.rows(made.plan.groups[0]))
    assert len(died) == limit
    if limit > 1:
        assert died[-1] == ["d1"]
    last = GroupWorker(job, lambda error: None).process(made.group, made.plan.rows(made.plan.groups[0]))
    rows = {row["doc_id"]: row for row in made.rows()}
    given_up = {doc_id for doc_id, row in rows.items() if row["status"] == "error"}
    assert given_up == ({"d1"} if limit > 1 else set(rows))
    assert rows["d1"]["error"] == f"worker_lost: the worker process ended at each of {limit} tries of this document"
    assert last.footer.rows == count
    assert made.opened.store.find("attempts") == {}


def test_marks_of_another_launch_charge_nobody(tmp_path: Path) -> None:
    died: list[list[str]] = []
    made = bench(tmp_path, docs(2), workers={"max_attempts": 1})
    job = Job(made.opened.config, made.opened.fingerprint, 1, dying("d1", died), build_preparer)
    with pytest.raises(EngineError):
        GroupWorker(job, lambda error: None).process(made.group, made.plan.rows(made.plan.groups[0]))
    fresh = replace(job, epoch=2, build_engine=lambda config: fake_engine(config.engine))
    ack = GroupWorker(fresh, lambda error: None).process(made.group, made.plan.rows(made.plan.groups[0]))
    assert ack.footer.statuses == {"ok": 2}
    assert ack.footer.epoch == 2


def test_a_draining_worker_keeps_what_is_finished_and_the_next_launch_takes_it_up(tmp_path: Path) -> None:
    slow = [words(5, 1), *(words(5 + i, i) for i in range(1, 6))]
    asked = [{"id": "q", "question": "w1", "max_new_tokens": 4}]
    rows = [{"doc_id": f"d{i}", "text": text} for i, text in enumerate(slow)]
    gate, seen = threading.Event(), threading.Event()

    class Holding:
        """Answers the first document, then holds its breath."""

        def __init__(self, inner: Engine) -> None:
            self.inner, self.given = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def step(self) -> list[StreamResult]:
            if self.given:
                seen.set()
                gate.wait(20)
                return []
            results = self.inner.step()
            self.given += len(results)
            return results[:1]

    made = bench(tmp_path, rows, lambda config: Holding(fake_engine(config.engine)), questions=asked)
    found: list[Ack] = []
    thread = threading.Thread(target=lambda: found.append(made.process()))
    thread.start()
    assert seen.wait(20)
    made.worker.drain()
    thread.join(20)
    gate.set()
    assert found[0].shard is None
    assert not made.opened.store.exists(shard_name(made.group))
    kept = list(made.opened.store.find("attempts"))
    assert len(kept) == 1
    again: list[str] = []

    class Counting:
        def __init__(self, inner: Engine) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def submit(self, document: Document) -> None:
            again.append(document.key)
            self.inner.submit(document)

    job = Job(made.opened.config, made.opened.fingerprint, 2, lambda config: Counting(fake_engine(config.engine)), build_preparer)
    ack = GroupWorker(job, lambda error: None).process(made.group, made.plan.rows(made.plan.groups[0]))
    assert ack.footer.statuses == {"ok": 6}
    assert len(again) == 5
    assert [row["doc_id"] for row in made.rows()] == [f"d{i}" for i in range(6)]


def test_odd_values_of_an_engine_are_made_fit_for_the_schema(tmp_path: Path) -> None:
    class Odd:
        metrics: Any

        def __init__(self) -> None:
            self.waiting: list[Document] = []
            self.metrics = fake_engine().metrics

        @property
        def has_work(self) -> bool:
            return bool(self.waiting)

        def submit(self, document: Document) -> None:
            self.waiting.append(document)

        def step(self) -> list[StreamResult]:
            document = self.waiting.pop()
            return [StreamResult(document.key, q.question_id, (), "a\ud800", "stop", 0.0, float("inf")) for q in document.questions]

    made = bench(tmp_path, docs(1), engine=lambda config: Odd())
    made.process()
    (row,) = made.rows()
    assert (row["answer"], row["margin"], row["answer_token_ids"]) == ("a\ufffd", None, [])
    json.dumps(row).encode()
