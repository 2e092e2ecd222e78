"""Whole runs over real articles with the real SmolLM2: both layouts, and one question at a time, give the same token ids."""

from __future__ import annotations

import gzip
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from askmany import run
from askmany.engine.models import ResolvedModel
from askmany.engine.tokenizer import TextTokenizer

ARTICLES, QUESTIONS, LONGEST_TOKENS = 5, 32, 7168
NEAR_TIE = 1e-3  # a logit gap that rounding may turn round
LAYOUTS: dict[str, dict[str, Any]] = {
    "together": {"layout": "split"},
    "interleaved": {"layout": "interleaved"},
    "one at a time": {"layout": "split", "streams": 1},
}
Answers = dict[tuple[str, str], dict[str, Any]]


def articles(model: ResolvedModel) -> list[dict[str, Any]]:
    """The first articles that fit, and have questions enough."""
    folder = Path(os.environ.get("ASKMANY_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    path = folder / "squad_v11_dev_articles.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here; ASKMANY_TEST_DATA names another folder")
    tokenizer = TextTokenizer(model.folder)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = map(json.loads, lines)
        fitting = (row for row in rows if len(tokenizer.encode(row["text"]).ids) <= LONGEST_TOKENS and len(row["questions"]) >= QUESTIONS)
        return list(islice(fitting, ARTICLES))


def answers(documents: Path, out: Path, engine: dict[str, Any]) -> Answers:
    result = run(
        {
            "model": "smollm2",
            "prompt": {"instruction": "Answer the question about the article in a few words."},
            "input": {"uri": str(documents), "questions": "questions", "max_questions": QUESTIONS},
            "output": {"uri": str(out)},
            "engine": engine,
            "sampling": {"max_new_tokens": 32},
        }
    )
    assert result.exit_code == 0
    return {(row["doc_id"], row["question_id"]): row for table in result.tables() for row in table.to_pylist()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_layouts_agree(smollm2: ResolvedModel, tmp_path: Path) -> None:
    documents = tmp_path / "articles.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in articles(smollm2)), encoding="utf-8")
    found = {name: answers(documents, tmp_path / name.replace(" ", "-"), engine) for name, engine in LAYOUTS.items()}
    alone = found["one at a time"]
    assert len(alone) == ARTICLES * QUESTIONS
    for name, rows in found.items():
        assert rows.keys() == alone.keys()
        assert {row["status"] for row in rows.values()} == {"ok"}
        parted = [key for key, row in rows.items() if row["answer_token_ids"] != alone[key]["answer_token_ids"]]
        for key in parted:
            print(f"{name}: {key} parts from its lone run, whose smallest top-2 gap is {alone[key]['margin']:.2g}")
            assert alone[key]["margin"] < NEAR_TIE
        print(f"{name}: {len(rows) - len(parted)} of {len(rows)} answers have the lone run's token ids")
        assert len(parted) <= 1
