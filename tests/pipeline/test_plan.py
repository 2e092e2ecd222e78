"""The plan: all documents, named groups, nothing of their text."""

import hashlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.errors import ConfigError
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.documents import Locator
from askmany.pipeline.plan import DOCUMENTS, PLANNED, Plan, from_bytes, group_name, make_plan, planned_documents, to_bytes
from tests.helpers.runs import opened_run, survey
from tests.helpers.word_model import words


def row(doc_id: str, tokens: int = 10, **values: Any) -> dict[str, Any]:
    base = {
        "doc_id": doc_id,
        "uri": "f.jsonl",
        "format": "jsonl",
        "start": 0,
        "length": 5,
        "line": 1,
        "content_hash": hashlib.md5(doc_id.encode()).digest(),
        "prompt": 7,
        "document_tokens": tokens,
        "longest_tokens": tokens,
        "chunks": 1,
        "questions": 2,
        "question_tokens": 4,
        "answer_tokens": 8,
        "answerable": 2,
        "shared": "set",
        "own_questions": None,
        "own_identities": None,
    }
    return {**base, **values}


def table(rows: list[dict[str, Any]]) -> pa.Table:
    plain = pa.schema([pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in DOCUMENTS])
    return pa.Table.from_pylist(rows, schema=plain).cast(DOCUMENTS)


def plan(rows: list[dict[str, Any]], **limits: Any) -> Plan:
    return make_plan(table(rows), 1.0, CostModel(), GroupLimits(**limits))


@given(st.lists(st.tuples(st.text(max_size=4), st.integers(0, 100_000)), max_size=60, unique_by=lambda pair: pair[0]), st.integers(1, 9))
def test_every_document_is_planned_once_and_groups_do_not_depend_on_input_order(pairs: list[tuple[str, int]], size: int) -> None:
    rows = [row(doc_id, tokens) for doc_id, tokens in pairs]
    shuffled = random.Random(0).sample(rows, len(rows))
    one, other = plan(rows, max_documents=size), plan(shuffled, max_documents=size)
    assert one.table.equals(other.table)
    assert one.groups == other.groups
    assert sorted(one.table.column("doc_id").to_pylist()) == sorted(doc_id for doc_id, _ in pairs)
    assert [d for group in one.groups for d in one.rows(group).column("doc_id").to_pylist()] == one.table.column("doc_id").to_pylist()
    assert len({group.name for group in one.groups}) == len(one.groups)
    assert one.records == 2 * len(rows)
    assert one.total("document_tokens") == sum(tokens for _, tokens in pairs)
    costs = [group.cost for group in one.groups]
    assert costs == sorted(costs, reverse=True)


def test_a_plan_reads_back_from_its_file() -> None:
    made = plan(
        [row("a", own_questions=["x", "y"], own_identities=[1, -2]), row("b", 500), row("c", questions=1, answerable=0)], max_documents=2
    )
    read, listing = from_bytes(to_bytes(made, "listing"))
    assert listing == "listing"
    assert read.groups == made.groups
    assert read.table.schema == PLANNED == made.table.schema
    assert read.table.to_pylist() == made.table.to_pylist()


def test_what_is_no_plan_raises(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowException):
        from_bytes(b"not a plan")


def test_names_come_from_content() -> None:
    one = group_name(table([row("a"), row("b")]))
    assert one == group_name(table([row("b"), row("a", 99, start=7)]))
    assert one != group_name(table([row("a"), row("b", prompt=8)]))
    assert one != group_name(table([row("a")]))
    assert one != group_name(table([row("a"), row("b", shared="other set")]))
    own = [group_name(table([row("a", own_questions=["x"], own_identities=[n])])) for n in (1, 2)]
    assert len({one, *own}) == 3
    assert len(one) == 16


def test_documents_that_need_no_engine_cost_little() -> None:
    made = plan([row("long", 100_000, answerable=0, answer_tokens=0), row("short", 1000)])
    assert made.table.column("doc_id").to_pylist() == ["short", "long"]


def test_planned_documents_carry_their_locators() -> None:
    own = row("a", own_questions=["x"], own_identities=[5], start=7, length=9, line=3, chunks=2)
    made = plan([own, row("folder/b.txt", 5, uri="/data/folder/b.txt", format="txt")])
    first, second = planned_documents(made.table, {"set": (("s", 1), ("t", 2))})
    assert first.locator == Locator("f.jsonl", "", "jsonl", 7, 9, 3)
    assert (first.asked, first.chunks) == (("s", "t", "x"), 2)
    assert second.locator.name == "folder/b.txt"
    assert (second.asked, second.chunks) == (("s", "t"), 1)


def test_done_groups_are_left_out() -> None:
    made = plan([row("a", 500), row("b")], max_documents=1)
    first, second = made.groups
    assert made.without({first.name: None}) == [second]
    assert made.without(set()) == [first, second]


def test_duplicate_documents_are_refused_with_both_places() -> None:
    rows = [row("a", line=3), row("b"), row("a", uri="g.jsonl", line=9)]
    with pytest.raises(ConfigError, match=r"doc_id 'a' occurs 2 times: f\.jsonl:3 and g\.jsonl:9"):
        plan(rows)


def test_the_plan_holds_no_text(tmp_path: Path) -> None:
    opened = opened_run(tmp_path, [{"doc_id": f"d{i}", "text": f"secret{i} " + words(20)} for i in range(5)], questions=["w7 hush"])
    made = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits())
    data = to_bytes(made, "x")
    assert b"secret" not in data
    assert b"hush" not in data
    assert "secret" not in str(made.table.to_pylist())
    assert made.documents == 5


def test_memory_of_a_planned_document_is_bounded() -> None:
    count = 20_000
    rows = [row(f"document-{i:08d}", i % 3000, content_hash=i.to_bytes(16), start=i * 5000) for i in range(count)]
    made = plan(rows)
    assert made.table.nbytes / count < 250
