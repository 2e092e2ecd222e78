"""Prompts for the comparison of answers, made of small documents with one token a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.jobs import verify_prompts
from askmany.jobs.baselines_sglang import KEPT_TOKENS
from tests.helpers.runs import write_jsonl
from tests.helpers.word_model import word_model, words

CONTEXT = 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return word_model(tmp_path / "model", CONTEXT)


def made(tmp_path: Path, model: Path, *more: str) -> list[tuple[list[int], list[list[int]]]]:
    """What the command writes for the documents in `d.jsonl`."""
    out = tmp_path / "prompts.jsonl"
    verify_prompts.main(["--model", str(model), "--documents", str(tmp_path / "d.jsonl"), *more, "--new-tokens", "4", "--out", str(out)])
    return [(line["document"], line["questions"]) for line in map(json.loads, out.read_text().splitlines())]


def test_prompts_are_those_of_a_run(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shared questions of two files first, then the document's own, up to the most; nothing is written beside the prompts."""
    rows = [{"doc_id": "a", "text": words(9), "questions": [{"qid": "own", "question": "w50"}]}, {"doc_id": "b", "text": words(7, 20)}]
    write_jsonl(tmp_path / "d.jsonl", rows)
    (tmp_path / "one.txt").write_text("w30 w31\nw32\n")
    (tmp_path / "two.yaml").write_text("- {id: q, question: w40}\n")
    files = ["--questions", str(tmp_path / "one.txt"), str(tmp_path / "two.yaml"), "--question-column", "questions"]
    more = [*files, "--max-questions", "4", "--set", "prompt.instruction=w1 w2"]
    found = made(tmp_path, model, *more)
    builder = PromptBuilder(model, PromptConfig(instruction="w1 w2"))
    asked = {words(9): ["w30 w31", "w32", "w40", "w50"], words(7, 20): ["w30 w31", "w32", "w40"]}
    wanted = [[list(builder.reference_ids(text, question)) for question in questions] for text, questions in asked.items()]
    assert [[document + question for question in questions] for document, questions in found] == wanted
    assert "7 prompts of 2 documents; the longest has 13 tokens" in capsys.readouterr().out
    assert not (tmp_path / "prompts.jsonl.run").exists()


def test_every_prompt_has_room_for_its_answer_and_for_what_stock_keeps(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": str(count), "text": words(count)} for count in (5000, 30, 0)])
    (tmp_path / "q.txt").write_text("w1 w2 w3\nw4\n")
    shared = ["--questions", str(tmp_path / "q.txt")]
    assert [len(document) for document, _ in made(tmp_path, model, *shared)] == [CONTEXT - KEPT_TOKENS - 4 - 3, 30]
    assert [len(document) for document, _ in made(tmp_path, model, *shared, "--document-tokens", "12")] == [12, 12]
    assert len(made(tmp_path, model, *shared, "--max-documents", "1")) == 1


def test_a_question_without_room_for_verifys_answers_is_left_out(tmp_path: Path, model: Path) -> None:
    """Answers all have one length in the comparison, whatever a run would give the question."""
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "a", "text": words(5000)}])
    (tmp_path / "q.yaml").write_text("- {question: w1 w2, max_new_tokens: 1}\n- w3\n")
    ((document, questions),) = made(tmp_path, model, "--questions", str(tmp_path / "q.yaml"))
    assert [len(question) for question in questions] == [1]
    assert len(document) + 1 + 4 + KEPT_TOKENS == CONTEXT


@pytest.mark.parametrize(
    ("rows", "more", "complaint"),
    [
        ([{"doc_id": "a", "text": ""}], ["--set", "questions=[w1]"], "no document has a question that fits"),
        ([{"doc_id": "a", "text": "w1"}], [], "questions: none given"),
        ([{"doc_id": "a", "text": "w1"}], ["--set", "questions=[w1]", "--set", "prompt.chat=true"], "no chat template"),
    ],
)
def test_what_makes_no_prompt_is_refused(tmp_path: Path, model: Path, rows: list[dict[str, str]], more: list[str], complaint: str) -> None:
    write_jsonl(tmp_path / "d.jsonl", list(rows))
    with pytest.raises(SystemExit, match=complaint):
        made(tmp_path, model, *more)
