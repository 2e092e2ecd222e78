"""Typed questions through the pipeline: refused early, asked as grammars or labels, recorded in the one schema."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.answer_types import answer_type
from askmany.engine.errors import ConfigError
from askmany.engine.grammar_pieces import with_leading_blank
from askmany.engine.labels import label_scores, label_trie
from askmany.engine.request import StreamResult
from askmany.pipeline.documents import Locator, SourceDocument
from askmany.pipeline.preparing import PreparedDocument, Preparer
from askmany.pipeline.questions import as_config, load_questions
from askmany.pipeline.schema import Record, answer_schema, to_table
from askmany.pipeline.typed import typed_fields
from tests.helpers.runs import opened_run, run_config, survey

ROWS = [{"doc_id": "a", "text": "w1 w2"}]
CHOICE = {"id": "c", "question": "w1", "type": "choice", "options": ["w10", "w11 w12", "w11 w13"]}
WHOLE = {"id": "i", "question": "w1", "type": "int", "minimum": 0, "maximum": 99}


def preparer(folder: Path, **values: Any) -> Preparer:
    return opened_run(folder, ROWS, **values).preparer


def prepared(folder: Path, own: Any = None, text: str = "w5 w6", **values: Any) -> PreparedDocument:
    return preparer(folder, **values).prepare(SourceDocument("d", text, own, {}, (), Locator("f", "", "jsonl", 0, 1, 1)))


def stream_result(text: str, reason: str = "stop", **values: Any) -> StreamResult:
    return StreamResult("k", "q", (1, 2), text, reason, -1.0, 0.5, **values)  # type: ignore[arg-type]


def test_a_choice_is_asked_as_labels_and_a_number_as_a_grammar(tmp_path: Path) -> None:
    document = prepared(tmp_path, questions=[CHOICE, WHOLE, "w3"]).for_engine("k")
    choice, whole, free = document.questions
    assert choice.grammar is None
    assert choice.labels is not None
    assert choice.labels.labels == ("w10", "w11 w12", "w11 w13")
    assert len(choice.labels.feed) == 1, "the shared first word is fed once"
    assert whole.labels is None
    assert whole.grammar == with_leading_blank(str(answer_type(WHOLE, "q").grammar)), "there is no chat template"
    assert whole.sampling.max_new_tokens == 3, "the longest legal number, after a blank"
    assert free.grammar is free.labels is None


def test_a_budget_that_the_question_sets_is_kept(tmp_path: Path) -> None:
    document = prepared(tmp_path, questions=[{**WHOLE, "max_new_tokens": 7}]).for_engine("k")
    assert document.questions[0].sampling.max_new_tokens == 7


@pytest.mark.parametrize(("count", "status"), [(60, None), (61, None), (62, "too_long")])
def test_the_longest_label_counts_as_the_answer(tmp_path: Path, count: int, status: str | None) -> None:
    found = prepared(tmp_path, text=" ".join(["w1"] * count), questions=[{**CHOICE, "options": ["w10", "w11 w12"]}])
    assert [question.status for question in found.questions] == [status]


def test_a_documents_own_columns_are_not_taken_for_settings(tmp_path: Path) -> None:
    own = [{"qid": "x", "question": "w1", "options": ["A", "B"], "answer": "A"}, {**WHOLE, "id": "typed"}]
    found = prepared(tmp_path, own, questions=["w9"])
    assert [question.asked.kind.kind for question in found.questions] == ["text", "text", "int"]


def test_a_question_can_list_its_options(tmp_path: Path) -> None:
    question = {**CHOICE, "question": "w1 {{ options }}"}
    (asked,) = load_questions([question], run_config(tmp_path).sampling, {})
    assert asked.text == "w1 w10, w11 w12, w11 w13"
    assert load_questions(as_config([asked], run_config(tmp_path).sampling), run_config(tmp_path).sampling, {}) == (asked,)
    (plain,) = load_questions(["w1 {{ options }}"], run_config(tmp_path).sampling, {})
    assert plain.text == "w1 {{ options }}", "free text has none"


def test_question_sets_keep_their_types_when_written_into_the_configuration() -> None:
    defaults = run_config(Path("/tmp"), model="m").sampling
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    given = [CHOICE, WHOLE, {"id": "j", "question": "w1", "type": "json", "schema": schema, "absent": "-"}, "w1 w2"]
    questions = load_questions(given, defaults, {})
    written = as_config(questions, defaults)
    assert load_questions(json.loads(json.dumps(written)), defaults, {}) == questions


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"id": "bad", "question": "w1", "type": "regex", "pattern": "("}, r"\(bad\): type regex: '\(' is no regular expression"),
        ({"id": "bad", "question": "w1", "type": "json", "schema": {"type": "thing"}}, r"\(bad\): type json"),
        ({**CHOICE, "id": "bad", "options": ["w10", "other words", "more words"]}, "'bad': label 'other words' has the same tokens"),
    ],
)
def test_a_type_that_cannot_be_is_refused_before_anything_is_read(tmp_path: Path, question: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preparer(tmp_path, questions=[question])


def test_a_bad_type_of_a_documents_own_question_refuses_the_run_when_it_is_planned(tmp_path: Path) -> None:
    rows = [{"doc_id": "a", "text": "w1", "own": [{"id": "bad", "question": "w1", "type": "regex", "pattern": "[z"}]}]
    with pytest.raises(ConfigError, match=r"bad.*no regular expression"):
        survey(opened_run(tmp_path, rows, input={"questions": "own"}))


def test_a_grammar_that_the_vocabulary_cannot_have_refuses_the_run(tmp_path: Path) -> None:
    opened = opened_run(tmp_path, ROWS, questions=[WHOLE])

    def fail(grammar: str) -> None:
        raise ValueError("the grammar cannot be compiled: too deep")

    opened.preparer._compile = fail
    with pytest.raises(ConfigError, match="question 'i': type int: the grammar cannot be compiled"):
        survey(opened)


def test_label_trees_need_the_split_layout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="question 'c': labels of several tokens"):
        preparer(tmp_path, questions=[CHOICE], engine={"layout": "interleaved"})
    preparer(tmp_path, questions=[{**CHOICE, "answer": "decode"}], engine={"layout": "interleaved"})


def test_free_text_is_ok_whatever_it_says() -> None:
    assert typed_fields(stream_result("", "length"), answer_type({}, "q")) == {"status": "ok"}


@pytest.mark.parametrize(
    ("values", "text", "reason", "status", "value", "number"),
    [
        ({"type": "int", "maximum": 50}, "17", "stop", "ok", "17", 17.0),
        ({"type": "int", "maximum": 50}, "51", "stop", "invalid_output", None, None),
        ({"type": "int"}, "17", "length", "length", None, None),
        ({"type": "bool", "answer": "decode"}, "yes", "stop", "ok", "true", 1.0),
        ({"type": "bool", "answer": "decode", "absent": "?"}, "?", "stop", "ok", "null", None),
        ({"type": "multi_choice", "options": ["é", "b"]}, '["é"]', "stop", "ok", '["é"]', None),
        ({"type": "json", "schema": {"type": "integer"}}, '{"a', "stop", "invalid_output", None, None),
        ({"type": "regex", "pattern": "a+"}, "aaa", "length", "length", None, None),
    ],
)
def test_the_verdict_on_a_typed_answer(
    values: dict[str, Any], text: str, reason: str, status: str, value: str | None, number: float | None
) -> None:
    fields = typed_fields(stream_result(text, reason), answer_type(values, "q"))
    assert (fields["status"], fields.get("value"), fields.get("value_number")) == (status, value, number)
    assert bool(fields.get("error")) == (status != "ok")


def test_scored_labels_bring_their_distribution() -> None:
    kind = answer_type({"type": "bool"}, "q")
    scores = label_scores(label_trie(kind.labels, ((1,), (2,)), None), [math.log(0.3), math.log(0.3)])
    fields = typed_fields(stream_result(scores.label, labels=scores), kind)
    assert fields["label_probabilities"] == [{"label": "yes", "probability": 0.5}, {"label": "no", "probability": 0.5}]
    assert fields["legal_mass"] == pytest.approx(0.6)
    assert (fields["value"], fields["flags"]) == ("true", ("label_tie",))


def test_typed_and_untyped_shards_have_one_schema() -> None:
    """An optional value that is null everywhere in one shard does not change its type."""
    untyped = to_table([Record("a", "q", "ok", "x")])
    probabilities = [{"label": "yes", "probability": 0.25}]
    typed = Record(
        "b", "q", "ok", "3", answer_type="int", value="3", value_number=3.0, label_probabilities=probabilities, legal_mass=0.5, flags=("f",)
    )
    tables = [untyped, to_table([typed]), to_table([Record("c", "q", "invalid_output", "x", answer_type="int")])]
    assert len({table.schema for table in tables}) == 1 == len({table.schema for table in tables} | {answer_schema()})
    assert tables[1].to_pylist()[0]["label_probabilities"] == probabilities
