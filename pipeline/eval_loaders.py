"""Published question-answering sets as documents with questions: one function a format.

Every loader takes the parsed contents of a file (one JSON value, as of a file of one line, or a list with one for each line) and gives
rows `{"doc_id", "title", "text", "questions": [{"qid", "question", "answers", ...}]}`, which is also the shape that is taken as it is.
Nothing is downloaded: the user names the file.
"""

from __future__ import annotations

import ast
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from askmany.engine.errors import ConfigError
from askmany.pipeline.whole_text import read_text

Row = dict[str, Any]
Loader = Callable[[Any], Iterator[Row]]
LETTERS = "ABCDEFGHIJ"
_TAG = re.compile(r"<[^>]+>")


def read_data(uri: str, options: Mapping[str, Any]) -> Any:
    """A JSON or JSON lines file, gzip or not. ConfigError names file and line."""
    text = read_text(uri, options, "the data")
    try:
        return json.loads(text)
    except ValueError:
        pass
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{uri}:{number}: malformed JSON: {error}") from error
    return rows


def rows_of(loader: Loader, data: Any, uri: str) -> list[Row]:
    """The rows that have a text and a question with answers. ConfigError when the file, or a row of it, has another shape, or no row is
    such."""
    own = _lines(data)
    try:
        plain = isinstance(own, list) and own and all("text" in row and "questions" in row for row in own)
        rows = own if plain else list(loader(data))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, SyntaxError) as error:
        raise ConfigError(f"{uri}: not of the expected shape: {type(error).__name__}: {error}") from error
    kept = [_answered(row, f"{uri}: row {number}") for number, row in enumerate(rows, start=1)]
    kept = [row for row in kept if row["text"].strip() and row["questions"]]
    if not kept:
        raise ConfigError(f"{uri}: no document with an answered question there")
    return kept


def _lines(data: Any) -> Any:
    """One value for each line: a file of one line was read as one value."""
    return [data] if isinstance(data, Mapping) else data


def _answered(row: Any, where: str) -> Row:
    """The row with those of its questions that have answers. ConfigError when it is no document with questions."""
    if not isinstance(row, Mapping) or not isinstance(row["text"], str) or not isinstance(row["questions"], list):
        raise ConfigError(f"{where}: a document must have a text and a list of questions, not {reprlib.repr(row)}")
    odd = next((question for question in row["questions"] if not isinstance(question, Mapping)), None)
    if odd is not None:
        raise ConfigError(f"{where}: a question must be an object with qid, question and answers, not {reprlib.repr(odd)}")
    return {**row, "questions": [question for question in row["questions"] if question.get("answers")]}


def load_plain(data: Any) -> Iterator[Row]:
    """Documents in our own shape."""
    raise ValueError("each line must be a document with doc_id, text and questions that have answers")


def load_squad(data: Any) -> Iterator[Row]:
    """SQuAD 1.1 and 2.0: a paragraph is a document; of 2.0, the questions that have an answer."""
    for article in data["data"]:
        for number, paragraph in enumerate(article["paragraphs"]):
            questions = [_question(qa["id"], qa["question"], _texts(qa["answers"])) for qa in paragraph["qas"]]
            yield _row(f"{article['title']}#{number}", article["title"], paragraph["context"], questions)


def load_quality(data: Any) -> Iterator[Row]:
    """QuALITY: articles with four-way multiple choice; answers are letters."""
    by_article: dict[str, Row] = {}
    for line in _lines(data):
        text = _TAG.sub(" ", line["article"])
        row = by_article.setdefault(line["article_id"], _row(line["article_id"], line["title"], text, []))
        for number, question in enumerate(line["questions"]):
            letters = LETTERS[: len(question["options"])]
            shown = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, question["options"], strict=True))
            gold = question.get("gold_label")
            qid = question.get("question_unique_id", f"{line.get('set_unique_id', line['article_id'])}-{number}")
            typed = {"type": "choice", "options": list(letters)}
            row["questions"].append(_question(qid, f"{question['question']}\n{shown}", [letters[gold - 1]] if gold else [], **typed))
    yield from by_article.values()


def load_loogle(data: Any) -> Iterator[Row]:
    """LooGLE: a line a document with `input` and `qa_pairs` (also as a quoted Python list), or a line a question with `context`."""
    by_document: dict[str, Row] = {}
    for number, line in enumerate(_lines(data)):
        if "qa_pairs" in line:
            pairs = line["qa_pairs"]
            pairs = ast.literal_eval(pairs) if isinstance(pairs, str) else pairs
            doc_id = f"{line['title']}#{number}"
            questions = [_question(f"{doc_id}-{i}", pair["Q"], [pair["A"]]) for i, pair in enumerate(pairs)]
            yield _row(doc_id, line["title"], line["input"], questions)
        else:
            row = by_document.setdefault(line["doc_id"], _row(line["doc_id"], line.get("title", ""), line["context"], []))
            row["questions"].append(_question(line.get("id", f"{line['doc_id']}-{number}"), line["question"], [line["answer"]]))
    yield from by_document.values()


def load_qmsum(data: Any) -> Iterator[Row]:
    """QMSum: meetings with general and specific queries; the answers are summaries."""
    for number, meeting in enumerate(_lines(data)):
        text = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"])
        queries = [*meeting.get("general_query_list", ()), *meeting.get("specific_query_list", ())]
        doc_id = f"meeting-{number}"
        yield _row(doc_id, "", text, [_question(f"{doc_id}-{i}", query["query"], [query["answer"]]) for i, query in enumerate(queries)])


def load_quac(data: Any) -> Iterator[Row]:
    """QuAC: dialogues; each question is given with the turns before it, their right answers included, and asked by itself."""
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            text = paragraph["context"].removesuffix("CANNOTANSWER").strip()
            turns: list[str] = []
            questions = []
            for qa in paragraph["qas"]:
                questions.append(_question(qa["id"], "\n".join([*turns[-4:], qa["question"]]), _texts(qa["answers"])))
                gold = qa.get("orig_answer") or qa["answers"][0]
                turns += [f"Earlier question: {qa['question']}", f"Its answer: {gold['text']}"]
            title = " ".join(filter(None, (article.get("title"), article.get("section_title"))))
            yield _row(str(paragraph.get("id", title)), title, text, questions)


def load_drop(data: Any) -> Iterator[Row]:
    """DROP: passages whose answers are numbers, dates or spans; validated answers count as references, too."""
    for passage_id, passage in data.items():
        questions = []
        for pair in passage["qa_pairs"]:
            found = [_drop_answer(answer) for answer in (pair["answer"], *pair.get("validated_answers", ()))]
            questions.append(_question(pair["query_id"], pair["question"], list(dict.fromkeys(filter(None, found)))))
        yield _row(passage_id, "", passage["passage"], questions)


def load_cuad(data: Any) -> Iterator[Row]:
    """CUAD and sets like it (SQuAD's format, one paragraph a contract): for each clause, whether the contract has it."""
    for contract in data["data"]:
        for number, paragraph in enumerate(contract["paragraphs"]):
            questions = [
                _question(qa["id"], qa["question"], ["yes" if qa["answers"] and not qa.get("is_impossible") else "no"], type="bool")
                for qa in paragraph["qas"]
            ]
            yield _row(f"{contract['title']}#{number}", contract["title"], paragraph["context"], questions)


def articles(rows: Sequence[Row]) -> list[Row]:
    """Paragraphs (`title#n`) put together again into whole articles, in their order."""
    return [_joined(title, parts) for title, parts in _by_title(rows).items()]


def chunked_articles(rows: Sequence[Row], count: Callable[[str], int], limit_tokens: int) -> list[Row]:
    """Articles cut between paragraphs into pieces of at most `limit_tokens`; each piece is asked what its own paragraphs are."""
    pieces: list[Row] = []
    for title, parts in _by_title(rows).items():
        piece: list[Row] = []
        for part in parts:
            if piece and count("\n\n".join(p["text"] for p in (*piece, part))) > limit_tokens:
                pieces.append(_joined(f"{title}@{len(pieces)}", piece))
                piece = []
            piece.append(part)
        pieces.append(_joined(f"{title}@{len(pieces)}", piece))
    return pieces


def _by_title(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_title: dict[str, list[Row]] = {}
    for row in rows:
        by_title.setdefault(str(row["doc_id"]).rpartition("#")[0] or str(row["doc_id"]), []).append(row)
    return by_title


def _joined(doc_id: str, parts: Sequence[Row]) -> Row:
    questions = [question for part in parts for question in part["questions"]]
    return _row(doc_id, parts[0].get("title", ""), "\n\n".join(part["text"] for part in parts), questions)


def _row(doc_id: str, title: str, text: str, questions: list[Row]) -> Row:
    return {"doc_id": doc_id, "title": title, "text": text, "questions": questions}


def _question(qid: str, question: str, answers: list[str], **typed: Any) -> Row:
    return {"qid": str(qid), "question": question.strip(), "answers": answers, **typed}


def _texts(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [answer["text"] for answer in answers]
    return list(dict.fromkeys("no answer" if text == "CANNOTANSWER" else text for text in found))


def _drop_answer(answer: Mapping[str, Any]) -> str:
    if answer.get("number"):
        return str(answer["number"])
    if answer.get("spans"):
        return " ".join(answer["spans"])
    day = answer.get("date") or {}
    return " ".join(str(day[key]) for key in ("day", "month", "year") if day.get(key))
