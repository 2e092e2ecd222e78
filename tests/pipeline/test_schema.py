"""The one schema of answers."""

import pyarrow as pa
import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline.schema import FIELDS, KEY, STATUSES, Record, answer_schema, count_statuses, to_table

DOCUMENTED = [
    "doc_id",
    "question_id",
    "status",
    "answer",
    "answer_token_ids",
    "finish_reason",
    "document_tokens",
    "question_tokens",
    "logprob",
    "truncated",
    "chunk",
    "attempt",
    "error",
]


def test_the_documented_fields_are_there() -> None:
    schema = answer_schema()
    assert set(DOCUMENTED) <= set(schema.names)
    assert schema.field("answer_token_ids").type == pa.list_(pa.int32())
    assert KEY == ("doc_id", "question_id", "chunk")


def test_tables_have_the_declared_schema_whatever_is_null() -> None:
    failed = to_table([Record("d", "q", "error", error="x")], keep=("title",))
    answered = to_table(
        [
            Record(
                "d", "r", "ok", "a", (1, 2), "stop", 10, 3, -0.5, 1.5, references=("a",), flags=("f:1",), keep={"title": "T", "other": "no"}
            )
        ],
        keep=("title",),
    )
    assert failed.schema == answered.schema == answer_schema(("title",))
    assert answered.to_pylist()[0]["title"] == "T"
    assert failed.to_pylist()[0]["title"] is None
    assert pa.concat_tables([failed, answered]).num_rows == 2
    assert to_table([]).schema == answer_schema()


def test_rows_are_sorted_by_key() -> None:
    records = [Record("b", "1", "ok"), Record("a", "2", "ok"), Record("a", "1", "ok", chunk=1), Record("a", "1", "ok")]
    rows = to_table(records).to_pylist()
    assert [(r["doc_id"], r["question_id"], r["chunk"]) for r in rows] == [("a", "1", 0), ("a", "1", 1), ("a", "2", 0), ("b", "1", 0)]


def test_two_records_for_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two records for \('a', '1', 0\)"):
        to_table([Record("a", "1", "ok"), Record("a", "1", "error")])


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="status 'fine' is none of ok"):
        to_table([Record("a", "1", "fine")])  # type: ignore[arg-type]


def test_kept_columns_may_not_hide_fields() -> None:
    with pytest.raises(ConfigError, match=r"input\.keep: 'answer' is a field of every record"):
        answer_schema(("title", "answer"))


def test_counts_are_in_declared_order() -> None:
    assert list(count_statuses(["error", "ok", "too_long", "ok"]).items()) == [("ok", 2), ("too_long", 1), ("error", 1)]
    assert set(STATUSES) == {"ok", "invalid_output", "length", "too_long", "empty_document", "error", "skipped"}
    assert len({field.name for field in FIELDS}) == len(FIELDS)
