"""Published formats, each in its own shape, as documents with questions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline import eval_loaders as loaders
from askmany.pipeline.eval_loaders import Loader, articles, chunked_articles, read_data, rows_of

SQUAD = {
    "data": [
        {
            "title": "Oil",
            "paragraphs": [
                {
                    "context": "It began in 1973.",
                    "qas": [{"id": "a", "question": " When? ", "answers": [{"text": "1973"}, {"text": "1973"}]}],
                },
                {"context": "It ended later.", "qas": [{"id": "b", "question": "Unanswered?", "answers": [], "is_impossible": True}]},
            ],
        }
    ]
}
QUALITY = [
    {
        "article_id": "7",
        "title": "T",
        "article": "<p>A story.</p>",
        "questions": [{"question": "Who?", "options": ["He", "She"], "gold_label": 2}],
    }
]
LOOGLE_OLD = [{"title": "T", "input": "Long text.", "qa_pairs": "[{'Q': 'What?', 'A': 'This.', 'S': ['x']}]"}]
LOOGLE_NEW = [{"doc_id": "d", "title": "T", "context": "Long text.", "question": "What?", "answer": "This.", "id": "q1"}]
QMSUM = [
    {
        "meeting_transcripts": [{"speaker": "PM", "content": "Hello."}, {"speaker": "ME", "content": "Hi."}],
        "general_query_list": [{"query": "Summarise.", "answer": "They greet."}],
        "specific_query_list": [{"query": "Who spoke?", "answer": "PM.", "relevant_text_span": [["0", "1"]]}],
    }
]
QUAC = {
    "data": [
        {
            "title": "Band",
            "section_title": "Start",
            "paragraphs": [
                {
                    "id": "p",
                    "context": "They began in 1990. CANNOTANSWER",
                    "qas": [
                        {"id": "1", "question": "When?", "answers": [{"text": "in 1990"}], "orig_answer": {"text": "in 1990"}},
                        {"id": "2", "question": "Where?", "answers": [{"text": "CANNOTANSWER"}], "orig_answer": {"text": "CANNOTANSWER"}},
                    ],
                }
            ],
        }
    ]
}
DROP = {
    "p1": {
        "passage": "He ran 3 miles.",
        "qa_pairs": [
            {"query_id": "n", "question": "How far?", "answer": {"number": "3", "date": {}, "spans": []}},
            {
                "query_id": "s",
                "question": "Who?",
                "answer": {"number": "", "spans": ["He", "she"]},
                "validated_answers": [{"number": "", "spans": ["He"]}],
            },
            {
                "query_id": "d",
                "question": "When?",
                "answer": {"number": "", "spans": [], "date": {"day": "3", "month": "May", "year": "1990"}},
            },
        ],
    }
}


@pytest.mark.parametrize(
    ("loader", "data", "documents", "questions"),
    [
        (loaders.load_squad, SQUAD, [("Oil#0", "It began in 1973.")], [("a", "When?", ["1973"])]),
        (loaders.load_quality, QUALITY, [("7", " A story. ")], [("7-0", "Who?\nA. He\nB. She", ["B"])]),
        (loaders.load_loogle, LOOGLE_OLD, [("T#0", "Long text.")], [("T#0-0", "What?", ["This."])]),
        (loaders.load_loogle, LOOGLE_NEW, [("d", "Long text.")], [("q1", "What?", ["This."])]),
        (
            loaders.load_qmsum,
            QMSUM,
            [("meeting-0", "PM: Hello.\nME: Hi.")],
            [("meeting-0-0", "Summarise.", ["They greet."]), ("meeting-0-1", "Who spoke?", ["PM."])],
        ),
        (
            loaders.load_quac,
            QUAC,
            [("p", "They began in 1990.")],
            [("1", "When?", ["in 1990"]), ("2", "Earlier question: When?\nIts answer: in 1990\nWhere?", ["no answer"])],
        ),
        (
            loaders.load_drop,
            DROP,
            [("p1", "He ran 3 miles.")],
            [("n", "How far?", ["3"]), ("s", "Who?", ["He she", "He"]), ("d", "When?", ["3 May 1990"])],
        ),
        (
            loaders.load_cuad,
            SQUAD,
            [("Oil#0", "It began in 1973."), ("Oil#1", "It ended later.")],
            [("a", "When?", ["yes"]), ("b", "Unanswered?", ["no"])],
        ),
    ],
)
def test_each_format(loader: Loader, data: Any, documents: list[tuple[str, str]], questions: list[tuple[str, str, list[str]]]) -> None:
    rows = rows_of(loader, data, "f")
    assert [(row["doc_id"], row["text"]) for row in rows] == documents
    assert [(q["qid"], q["question"], q["answers"]) for row in rows for q in row["questions"]] == questions


def test_choices_and_clauses_are_typed() -> None:
    quality = rows_of(loaders.load_quality, QUALITY, "f")[0]["questions"][0]
    assert (quality["type"], quality["options"]) == ("choice", ["A", "B"])
    assert rows_of(loaders.load_cuad, SQUAD, "f")[0]["questions"][0]["type"] == "bool"


@pytest.mark.parametrize("loader", [loaders.load_plain, loaders.load_squad, loaders.load_drop, loaders.load_qmsum])
def test_our_own_shape_is_taken_by_every_task_and_another_is_refused(loader: Loader) -> None:
    plain = [{"doc_id": "d", "text": "x", "questions": [{"qid": "q", "question": "Q?", "answers": ["a"]}, {"qid": "r", "question": "R?"}]}]
    (row,) = rows_of(loader, plain, "f")
    assert [question["qid"] for question in row["questions"]] == ["q"]
    with pytest.raises(ConfigError, match=r"f: (not of the expected shape|no document)"):
        rows_of(loader, [{"other": 1}], "f")


def test_paragraphs_become_articles_and_pieces() -> None:
    rows = [
        {
            "doc_id": f"{title}#{n}",
            "title": title,
            "text": "word " * n,
            "questions": [{"qid": f"{title}{n}", "question": "?", "answers": ["x"]}],
        }
        for title in ("A", "B")
        for n in range(1, 6)
    ]
    whole = articles(rows)
    assert [(row["doc_id"], len(row["questions"])) for row in whole] == [("A", 5), ("B", 5)]
    pieces = chunked_articles(rows, lambda text: len(text.split()), 6)
    assert all(len(piece["text"].split()) <= 6 for piece in pieces)
    assert [question["qid"] for piece in pieces for question in piece["questions"]] == [q["qid"] for row in rows for q in row["questions"]]
    assert [len(piece["questions"]) for piece in pieces] == [3, 1, 1, 3, 1, 1]
    assert len({piece["doc_id"] for piece in pieces}) == len(pieces)


def test_files_are_json_or_json_lines_gzip_or_not(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(SQUAD))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, LOOGLE_NEW * 2)).encode()))
    assert read_data(str(tmp_path / "one.json"), {}) == SQUAD
    assert read_data(str(tmp_path / "lines.jsonl.gz"), {}) == LOOGLE_NEW * 2
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"b":\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl:2: malformed JSON"):
        read_data(str(tmp_path / "bad.jsonl"), {})
    with pytest.raises(ConfigError, match=r"none.jsonl: the data cannot be read"):
        read_data(str(tmp_path / "none.jsonl"), {})


@pytest.mark.parametrize(
    "packed", [gzip.compress(b"{}" * 99)[:-9], b"plain", gzip.compress(b"{}")[:10] + b"\xff" * 20], ids=["cut", "plain", "broken"]
)
def test_a_packed_file_that_is_cut_or_none_is_refused(tmp_path: Path, packed: bytes) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match=r"cut.jsonl.gz: the data cannot be read"):
        read_data(str(tmp_path / "cut.jsonl.gz"), {})


PLAIN = [{"doc_id": "d", "text": "x", "questions": [{"qid": "q", "question": "Q?", "answers": ["a"]}]}]


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (loaders.load_plain, PLAIN[0]),
        (loaders.load_drop, PLAIN[0]),
        (loaders.load_quality, QUALITY[0]),
        (loaders.load_loogle, LOOGLE_NEW[0]),
        (loaders.load_qmsum, QMSUM[0]),
    ],
)
def test_a_file_of_one_line_is_read_as_of_several(tmp_path: Path, loader: Loader, line: dict[str, Any]) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(line) + "\n")
    assert rows_of(loader, read_data(str(tmp_path / "one.jsonl"), {}), "f") == rows_of(loader, [line], "f")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"questions": ["Who?"]}, "f: row 2: a question must be an object with qid, question and answers, not 'Who\\?'"),
        ({"questions": "Who?"}, "f: row 2: a document must have a text and a list of questions"),
        ({"text": None}, "f: row 2: a document must have a text and a list of questions"),
    ],
)
def test_a_row_of_another_shape_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(loaders.load_plain, [*PLAIN, {**PLAIN[0], **values}], "f")
