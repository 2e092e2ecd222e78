"""Question sets: every accepted shape, stable ids, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline.config import SamplingConfig
from askmany.pipeline.questions import QuestionSetError, as_config, ask, load_questions, own_questions, parse_question

DEFAULTS = SamplingConfig(max_new_tokens=8, temperature=0.5)


def load(source: Any) -> list[tuple[str, str]]:
    return [(q.question_id, q.text) for q in load_questions(source, DEFAULTS, {})]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_no_source_is_no_question() -> None:
    assert load_questions(None, DEFAULTS, {}) == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("q.yaml", "- {id: a, question: 'One?'}\n- {qid: 2, text: 'Two?'}\n"),
        ("q.yml", "questions:\n  - {id: a, question: 'One?'}\n  - id: 2\n    question: Two?\n"),
        ("q.json", json.dumps([{"id": "a", "question": "One?"}, {"id": 2, "text": "Two?"}])),
        ("q.jsonl", '{"id": "a", "question": "One?"}\n\n{"qid": 2, "question": "Two?"}'),
    ],
)
def test_files(tmp_path: Path, name: str, text: str) -> None:
    assert load(write(tmp_path / name, text)) == [("a", "One?"), ("2", "Two?")]


def test_plain_strings_have_ids_that_do_not_depend_on_their_place(tmp_path: Path) -> None:
    first = dict(load(write(tmp_path / "a.txt", "One?\n\n  Two?\r\nThree?\n")))
    second = dict(load(["Zero?", "Three?", "Two?", "One?"]))
    assert set(first.values()) == {"One?", "Two?", "Three?"}
    assert first.items() < second.items()
    assert all(question_id.startswith("q-") for question_id in first)


def test_objects_bring_sampling_and_references() -> None:
    (question,) = load_questions([{"question": "Q?", "answers": ["a", 3], "max_new_tokens": 2, "stop": "\n", "type": "text"}], DEFAULTS, {})
    assert question.references == ("a", "3")
    assert question.sampling == SamplingConfig(max_new_tokens=2, temperature=0.5, stop=("\n",))
    (plain,) = load_questions([{"question": "Q?", "answers": "a"}], DEFAULTS, {})
    assert plain.sampling is DEFAULTS
    assert plain.references == ("a",)


def test_a_loaded_set_reads_back_from_its_configuration() -> None:
    questions = load_questions(["One?", {"id": "b", "question": "Two?", "answers": ["x"], "stop": ["s"], "seed": 4}], DEFAULTS, {})
    listed = as_config(questions, DEFAULTS)
    assert load_questions(json.loads(json.dumps(listed)), DEFAULTS, {}) == questions
    assert as_config((), DEFAULTS) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "question set is empty"),
        (["Same?", "Same?"], "the question 'Same?' is given twice"),
        ([{"id": "a", "question": "X?"}, {"id": "a", "question": "Y?"}], "question id 'a' is given twice"),
        ([{"id": "1", "question": "X?"}, {"id": 1, "question": "Y?"}], "question id '1' is given twice"),
        ([{"question": "X?", "max_new_token": 3}], "question 1: max_new_token: unknown key; did you mean 'max_new_tokens'"),
        ([{"question": "X?", "zzz": 3}], "zzz: unknown key; known here: id, qid"),
        ([{"question": "X?", "type": "choice"}], "type choice: options: field required"),
        ([{"id": "a"}], "exactly one of 'question' and 'text'"),
        ([{"question": "X?", "text": "Y?"}], "exactly one of 'question' and 'text'"),
        ([{"id": "a", "qid": "b", "question": "X?"}], "both 'id' and 'qid'"),
        ([{"id": True, "question": "X?"}], "the id is True"),
        ([{"id": "", "question": "X?"}], "the id is ''"),
        ([{"id": "\ufeff", "question": "X?"}], "the id is '\\ufeff'"),
        (["X?", " \n"], "question 2: the question's text is"),
        ([{"question": 5}], "the question's text is 5"),
        ([5], "question 1: a string or an object is needed, not int"),
        ([{"question": "X?", "answers": {"a": 1}}], "answers must be a list of texts"),
        ([{"question": "X?", "max_new_tokens": 0}], "max_new_tokens: input should be greater than or equal to 1, not 0"),
        ([{"question": "X?", "stop": [""]}], "stop: an empty stop string"),
    ],
)
def test_bad_sets_are_refused_in_one_line(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.yaml", "", "question set is empty"),
        ("q.yaml", "questions:", "question set is empty"),
        ("q.yaml", "a: [", "not valid YAML"),
        ("q.yaml", "a: 1", "one key 'questions'"),
        ("q.yaml", "just text", "a list of questions is needed, not str"),
        ("q.jsonl", '{"question": "X?"}\n{', "q.jsonl:2: malformed JSON"),
        ("q.txt", " \n\n", "question set is empty"),
        ("q.docx", "x", "a question set is a yaml"),
        ("q.yaml", "- {id: a, question: X, id: b}", "key 'id' is given twice"),
        ("q.json", '[{"id": "a", "question": "X?", "question": "Y?"}]', "key 'question' is given twice"),
        ("q.jsonl", '{"id": "a", "question": "X?", "id": "b"}', "q.jsonl:1: malformed JSON: key 'id' is given twice"),
        ("q.yaml", "- &q [*q]", "a YAML anchor contains itself"),
        ("q.yaml", "[" * 5000, "nested too deeply"),
        ("q.jsonl", "[" * 200_000, "q.jsonl:1: malformed JSON"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path / name, text))
    assert name in str(caught.value)


def test_missing_and_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such question file"):
        load(str(tmp_path / "none.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml: the question file cannot be read"):
        load(str(tmp_path / "folder.yaml"))


@pytest.mark.parametrize("uri", ["memory://\0/q.txt", "hf://q.txt", "zip://q.txt::/tmp"])
def test_question_files_that_a_driver_cannot_name_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(uri)
    assert str(caught.value).startswith(uri)


def test_whatever_a_driver_raises_names_the_question_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*arguments: object) -> bytes:
        raise LookupError("no credentials")

    monkeypatch.setattr("askmany.pipeline.questions.read_bytes", denied)
    with pytest.raises(ConfigError, match=r"s3://b/q\.txt: the question file cannot be read: LookupError: no credentials"):
        load("s3://b/q.txt")


def own(value: Any) -> list[tuple[str, str]]:
    return [(q.question_id, q.text) for q in own_questions(value, DEFAULTS, "f:1")]


def test_a_documents_own_questions_in_every_shape() -> None:
    expected = [("a", "One?")]
    item = {"qid": "a", "question": "One?", "answers": ["x"], "max_new_tokens": None, "is_impossible": False}
    assert own([item]) == own((item,)) == own(item) == own(json.dumps([item])) == expected
    assert [text for _, text in own("Just one?")] == ["Just one?"]
    assert [text for _, text in own(["One?", "Two?"])] == ["One?", "Two?"]
    assert own(None) == own("") == own([]) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "questions must be a list, not int"),
        ("[broken", "questions are malformed JSON"),
        ("[" * 200_000, "questions are malformed JSON"),
        ([None], "question 1: a string or an object is needed, not nothing"),
        ([{"question": "X?", "max_new_token": 3}], "did you mean 'max_new_tokens'"),
    ],
)
def test_malformed_own_questions(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        own(value)
    assert str(caught.value).startswith("f:1")
    assert not isinstance(caught.value, QuestionSetError)


def test_shared_and_own_together() -> None:
    def one(question_id: str) -> Any:
        return parse_question({"id": question_id, "question": question_id}, DEFAULTS, "p", strict=True)

    shared, mine = (one("a"), one("b")), (one("c"), one("d"))
    assert [q.question_id for q in ask(shared, mine, None, "f:1")] == ["a", "b", "c", "d"]
    assert [q.question_id for q in ask(shared, mine, 3, "f:1")] == ["a", "b", "c"]
    assert ask(shared, (), 1, "f:1") == shared[:1]
    with pytest.raises(QuestionSetError, match=r"f:1: the question 'b' is given twice"):
        ask(shared, (one("b"),), None, "f:1")
