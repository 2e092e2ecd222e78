"""What is asked: a set shared by all documents, each document's own, or both.

A question is a string, or an object with `id|qid`, `question|text`, and optionally `answers`, `type` (with its settings beside it)
and any key of the sampling section. A question without an id gets one from its text, so that moving it in the file changes nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from askmany.engine.answer_types import TEXT, TYPE_KEYS, AnswerType, BoolType, ChoiceType, MultiChoiceType, answer_type
from askmany.engine.errors import ConfigError
from askmany.pipeline.config import SamplingConfig
from askmany.pipeline.config_file import load_yaml
from askmany.pipeline.documents import named_twice
from askmany.pipeline.storage import read_bytes, told
from askmany.pipeline.text import clean, decode, is_blank

ID_KEYS, TEXT_KEYS = ("id", "qid"), ("question", "text")
KNOWN_KEYS = (*ID_KEYS, *TEXT_KEYS, "answers", "type", *SamplingConfig.model_fields)
ENDINGS = ("yaml", "yml", "json", "jsonl", "txt")
_OPTIONS = re.compile(r"\{\{\s*options\s*\}\}")
_TYPO = 0.8  # an unknown key of a document's own question that is this like a known one is a mistake, not somebody's extra column


class QuestionSetError(ConfigError):
    """Questions that would make the run wrong as a whole: an id given twice, a type that is not supported."""


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One question with everything it was given; `kind` is the type of its answer, `template` its text with `{{ options }}` where the
    type's options stand in `text`.

    `references` are known right answers; askmany never shows them to the model.
    """

    question_id: str
    text: str
    sampling: SamplingConfig
    references: tuple[str, ...] = ()
    kind: AnswerType = field(default=TEXT, hash=False)
    template: str = ""


def load_questions(source: str | Sequence[Any] | None, defaults: SamplingConfig, options: Mapping[str, Any]) -> tuple[AskedQuestion, ...]:
    """The shared question set of a file (YAML, JSON lines, one a line of text) or of a list in the configuration. Raises ConfigError."""
    if source is None:
        return ()
    if isinstance(source, str):
        raw, place = _read(source, options), source
    else:
        raw, place = source, "questions"
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise ConfigError(f"{place}: a list of questions is needed, not {_kind(raw)}")
    questions = tuple(parse_question(item, defaults, f"{place}: question {n}", strict=True) for n, item in enumerate(raw, start=1))
    if not questions:
        raise ConfigError(f"{place}: the question set is empty")
    refuse_duplicates(questions, place)
    return questions


def as_config(questions: Sequence[AskedQuestion], defaults: SamplingConfig) -> tuple[dict[str, Any], ...] | None:
    """The set as a configuration lists it, so that no other process has to read the file again; None when it is empty."""
    return tuple(_as_config(question, defaults) for question in questions) or None


def _as_config(question: AskedQuestion, defaults: SamplingConfig) -> dict[str, Any]:
    sampling, usual = question.sampling.model_dump(mode="json"), defaults.model_dump(mode="json")
    own = {key: value for key, value in sampling.items() if value != usual[key]}
    references = {"answers": list(question.references)} if question.references else {}
    kind = {"type": question.kind.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"kind": question.kind.kind}}
    typed = kind if question.kind != TEXT else {}
    return {"id": question.question_id, "question": question.template or question.text, **typed, **references, **own}


def own_questions(value: Any, defaults: SamplingConfig, place: str) -> tuple[AskedQuestion, ...]:
    """A document's own questions, from its column: a list, one string, or either as JSON text (CSV). ConfigError when malformed."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: questions are malformed JSON: {error}") from error
    if value is None or value == "":
        return ()
    items = [value] if isinstance(value, (str, Mapping)) else value
    if not isinstance(items, Sequence):
        raise ConfigError(f"{place}: questions must be a list, not {_kind(value)}")
    return tuple(parse_question(item, defaults, f"{place}: question {n}", strict=False) for n, item in enumerate(items, start=1))


def ask(shared: Sequence[AskedQuestion], own: Sequence[AskedQuestion], max_questions: int | None, place: str) -> tuple[AskedQuestion, ...]:
    """The questions of one document, shared ones first, at most `max_questions`. QuestionSetError when an id comes twice."""
    asked = (*shared, *own)
    if own:
        refuse_duplicates(asked, place)
    return asked[:max_questions]


def refuse_duplicates(questions: Iterable[AskedQuestion], place: str) -> None:
    """QuestionSetError naming the first question id that occurs twice."""
    seen: dict[str, AskedQuestion] = {}
    for number, question in enumerate(questions, start=1):
        first = seen.setdefault(question.question_id, question)
        if first is not question:
            what = f"the question {question.text!r}" if first.text == question.text else f"question id {question.question_id!r}"
            raise QuestionSetError(f"{place}: {what} is given twice (the second is question {number}); each needs an id of its own")


def parse_question(item: Any, defaults: SamplingConfig, place: str, strict: bool) -> AskedQuestion:
    """One question of any accepted shape. `strict` refuses every unknown key, otherwise only those that look like a slip of a known one."""
    if isinstance(item, str):
        item = {"question": item}
    if not isinstance(item, Mapping):
        raise ConfigError(f"{place}: a string or an object is needed, not {_kind(item)}")
    values = {str(key): value for key, value in item.items() if value is not None}
    _refuse_unknown(values, place, strict)
    text = clean(_text(values, place)).text
    question_id = _id(values, text, place)
    references = _references(values.get("answers", ()), place)
    kind = _type(values, f"{place} ({question_id})", strict)
    sampling = _sampling(values, defaults, place)
    if kind.max_new_tokens is not None and "max_new_tokens" not in values:
        sampling = sampling.model_copy(update={"max_new_tokens": kind.max_new_tokens})
    shown = with_options(text, kind)
    return AskedQuestion(question_id, shown, sampling, references, kind, "" if shown == text else text)


def with_options(text: str, kind: AnswerType) -> str:
    """The question's text with `{{ options }}` replaced by the options, and the text for "absent" where there is one, commas between."""
    if not isinstance(kind, ChoiceType | BoolType | MultiChoiceType):
        return text
    absent = () if kind.absent is None or kind.absent in kind.options else (kind.absent,)
    return _OPTIONS.sub(lambda _: ", ".join((*kind.options, *absent)), text)


def _type(values: Mapping[str, Any], place: str, strict: bool) -> AnswerType:
    """The answer's type; a document's own question without one may have columns that are called like a type's settings."""
    if "type" not in values and not strict:
        return TEXT
    try:
        return answer_type(values, place)
    except ConfigError as error:
        raise QuestionSetError(str(error)) from error


def _refuse_unknown(values: Mapping[str, Any], place: str, strict: bool) -> None:
    for key in values:
        if key in KNOWN_KEYS or key in TYPE_KEYS:
            continue
        close = difflib.get_close_matches(key, (*KNOWN_KEYS, *TYPE_KEYS), n=1, cutoff=0.5 if strict else _TYPO)
        if close:
            raise ConfigError(f"{place}: {key}: unknown key; did you mean {close[0]!r}?")
        if strict:
            raise ConfigError(f"{place}: {key}: unknown key; known here: {', '.join((*KNOWN_KEYS, *TYPE_KEYS))}")


def _text(values: Mapping[str, Any], place: str) -> str:
    given = [values[key] for key in TEXT_KEYS if key in values]
    if len(given) != 1:
        raise ConfigError(f"{place}: exactly one of 'question' and 'text' is needed")
    if not isinstance(given[0], str) or is_blank(given[0]):
        raise ConfigError(f"{place}: the question's text is {given[0]!r}; it must be text that is not blank")
    return given[0].strip()


def _id(values: Mapping[str, Any], text: str, place: str) -> str:
    given = [values[key] for key in ID_KEYS if key in values]
    if len(given) > 1:
        raise ConfigError(f"{place}: both 'id' and 'qid' are given")
    if not given:
        return "q-" + hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    question_id = "" if isinstance(given[0], bool) or not isinstance(given[0], (str, int)) else clean(str(given[0])).text
    if not question_id:
        raise ConfigError(f"{place}: the id is {given[0]!r}; it must be text or a whole number")
    return question_id


def _references(value: Any, place: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, (str, int, float)) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, (str, int, float)) for item in items):
        raise ConfigError(f"{place}: answers must be a list of texts, not {value!r}")
    return tuple(clean(str(item)).text for item in items)


def _sampling(values: Mapping[str, Any], defaults: SamplingConfig, place: str) -> SamplingConfig:
    own = {key: value for key, value in values.items() if key in SamplingConfig.model_fields}
    if not own:
        return defaults
    try:
        return SamplingConfig.model_validate({**defaults.model_dump(), **own})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{place}: {key}: {reason[:1].lower()}{reason[1:]}, not {own.get(key)!r}") from error


def _read(uri: str, options: Mapping[str, Any]) -> Any:
    ending = uri.lower().rpartition(".")[2]
    if ending not in ENDINGS:
        raise ConfigError(f"{uri}: a question set is a {', '.join(ENDINGS)} file")
    try:
        text = decode(read_bytes(uri, options)).text
    except FileNotFoundError:
        raise ConfigError(f"{uri}: no such question file") from None
    except ConfigError:
        raise
    except Exception as error:  # each client library has errors of its own
        raise ConfigError(f"{uri}: the question file cannot be read: {told(error)}") from error
    if ending == "txt":
        return [line for line in text.splitlines() if not is_blank(line)]
    return _json_lines(text, uri) if ending == "jsonl" else _yaml(text, uri)


def _json_lines(text: str, uri: str) -> list[Any]:
    items = []
    for number, line in enumerate(text.split("\n"), start=1):
        if is_blank(line):
            continue
        try:
            items.append(json.loads(line, object_pairs_hook=_unique))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{uri}:{number}: malformed JSON: {error}") from error
    return items


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    twice = named_twice(key for key, _ in pairs)
    if twice is not None:
        raise ValueError(f"key {twice!r} is given twice")
    return dict(pairs)


def _yaml(text: str, uri: str) -> Any:
    value = load_yaml(text, uri)
    if value is None:
        return []
    if isinstance(value, Mapping):
        if set(value) != {"questions"}:
            raise ConfigError(f"{uri}: a list of questions, or one key 'questions' that holds it, is needed")
        return value["questions"] or []
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
