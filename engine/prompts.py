"""Prompts as tokens: a prefix that many questions share, and a tail for each question.

    template head + instruction | document | separator + question + template end
    [ shared by documents       | shared by a document's questions ][ tail ]

The ids of prefix + tail are the ids of the whole prompt encoded in one go, or the prompt is refused with the boundary named (`seam` makes
and proves the one between document and question). Document and question are data: a marker string in them stays text. What the operator
wrote may hold markers. Blanks at the end of a document and at the beginning of a question are left out of the prompt: the separator
stands there, and some tokenizers join a run of blanks in a way that depends on the question's first character.

Knows no model weights, no scheduler, and not how long a prompt may be (`fit`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from askmany.engine.chat_template import ChatTemplate, Frame, load_chat_template
from askmany.engine.errors import AskmanyError, ConfigError, DocumentError, QuestionError
from askmany.engine.seam import Seam
from askmany.engine.tokenizer import TextTokenizer

Item = TypeVar("Item", int, str)

_WINDOW_CHARS = 256
_FIRST_BLANKS = re.compile(r"\A[^\S\x1c-\x1f]+")
_END_BLANKS = re.compile(r"(?<![^\S\x1c-\x1f])[^\S\x1c-\x1f]+\Z")  # what tokenizers take for blanks
_MID_WORD = "e middle?"  # makes a word of "Ends inside th"
_PROBE_QUESTIONS = ("What is it?", "1984?", '"Why"', "(a) or b", "東京は?", "🙂?", "éa", _MID_WORD)
PROBE_DOCUMENTS = (
    "Plain words.",
    " begins with a space, ends with a letter",
    "Ends inside th",
    "\n\nBegins and ends with line breaks\n\n",
    "Ends with one line break.\n",
    "CRLF\r\n",
    "Ends with blanks  ",
    "\tTab\t",
    "1,234.5",
    '"Quoted"',
    "'s apostrophe'",
    "日本語。",
    "🙂🏽 emoji 🙂🏽",
    "\u0301combining e\u0301",
    "שלום",
    "a" * 40 + "!?",
    "null \x00",
)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)


class PromptConfig(BaseModel):
    """The `prompt:` section. `document` and `question` are jinja2 (sandboxed, strict); `instruction` and `system` are taken as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    instruction: str = ""
    """Stands before every document; shared by all of them."""
    system: str | None = None
    """The chat template's system message; null leaves the template's own default."""
    document: str = "{{ document }}"
    question: str = "{{ question }}"
    separator: str = "\n\n"
    """Between instruction, document and question."""
    chat: Literal["auto"] | bool = "auto"
    """Whether to use the model's chat template; `auto`: where it has one."""
    template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as `enable_thinking: false`."""

    @field_validator("document", "question")
    @classmethod
    def _uses_its_variable(cls, source: str, info: ValidationInfo) -> str:
        name = info.field_name or ""
        try:
            used = meta.find_undeclared_variables(_environment().parse(source))
        except jinja2.TemplateError as error:
            raise ValueError(f"not a jinja2 template ({error})") from error
        unknown = sorted(used - {name})
        if unknown:
            raise ValueError(f"uses {{{{ {unknown[0]} }}}}, only {{{{ {name} }}}} is there")
        if name not in used:
            raise ValueError(f"does not use {{{{ {name} }}}}")
        return source


class PromptBuilder:
    """The prompts of one model folder under one config.

    Raises ConfigError at once for a template that cannot be split; `check` (at start-up) and `check_document` prove the boundaries.
    `now` is what a template that prints the date sees.
    """

    def __init__(self, folder: Path, config: PromptConfig, now: datetime | None = None) -> None:
        self._tokenizer = TextTokenizer(folder)
        self._chat = _chat(folder, config, now or datetime.now())
        self._frame = self._chat.frame() if self._chat else Frame()
        self._separator = config.separator
        self._document = _environment().from_string(config.document)
        self._question = _environment().from_string(config.question)
        lead = config.instruction + config.separator if config.instruction else ""
        self._lead = lead.lstrip() if self._frame.strips_left else lead
        self._head = self._tokenizer.trusted(self._frame.head + self._lead)
        self._end = self._tokenizer.trusted(self._frame.end)
        documents = [self._document_part(text) for text in PROBE_DOCUMENTS]
        questions = [self._question_part(text) for text in _PROBE_QUESTIONS]
        self._seam = Seam(self._tokenizer, config.separator, self._end, documents, questions)
        self._instruction_ids = self._shared_ids(documents)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer behind the prompts; it also turns answers into text."""
        return self._tokenizer

    @property
    def is_chat(self) -> bool:
        """Whether prompts go through the model's chat template; without one an answer follows a word, after a blank."""
        return self._chat is not None

    @property
    def instruction_ids(self) -> tuple[int, ...]:
        """The ids that every prompt begins with: what prompts of very different documents have in common. May be empty."""
        return self._instruction_ids

    def render(self, document_text: str, question_text: str) -> str:
        """The whole prompt as text, as the model's own template prints it (a BOS that the tokenizer adds is not in it)."""
        document = _without_end_blanks(_fill(self._document, document=document_text))
        question = _without_first_blanks(_fill(self._question, question=question_text))
        content = f"{self._lead}{document}{self._separator}{question}"
        return self._chat.render(content) if self._chat else content

    def reference_ids(self, document_text: str, question_text: str) -> tuple[int, ...]:
        """The ids of the whole prompt, encoded in one go."""
        parts = (self._head, self._document_part(document_text), self._separator, self._question_part(question_text), self._end)
        return self._tokenizer.with_front(self._tokenizer.encode("".join(parts)).ids)

    def segments(self, document_text: str) -> tuple[tuple[int, ...], ...]:
        """The prefix of a document as a path of the prefix tree: instruction ids, then document ids; no segment is empty.

        Raises DocumentError when a token would span the document|question boundary, or when nothing stands before the question.
        """
        ids = self._tokenizer.with_front(self._seam.prefix_ids(self._head, self._document_part(document_text)))
        shared = len(_common([self._instruction_ids, ids]))
        found = tuple(part for part in (ids[:shared], ids[shared:]) if part)
        if not found:
            raise DocumentError("the document is empty, and so is the prompt before it", "empty_document")
        return found

    def tail(self, question_text: str) -> tuple[int, ...]:
        """The ids that follow any document's prefix: separator, question, the template's end.

        Raises QuestionError when the document|question boundary is not exact before this question, or when nothing is left to ask.
        """
        question = self._question_part(question_text)
        self._check_seam(self._document_part(PROBE_DOCUMENTS[0]), question_text, QuestionError)
        ids = tuple(self._seam.tail_ids(question))
        if not ids:
            raise QuestionError("the question is empty, and so is the prompt after it")
        return ids

    def answer_ids(self, question_text: str, answer: str) -> tuple[int, ...]:
        """The ids of an answer as they follow the prompt; without a chat template a blank stands between where the prompt has none.

        Raises QuestionError when the answer's beginning changes the prompt's last tokens, or when the answer has no tokens.
        """
        before = self._separator + self._question_part(question_text) + self._end
        blank = "" if self._chat or before[-1:].isspace() else " "
        lead = self._tokenizer.encode(before).ids
        whole = self._tokenizer.encode(before + blank + answer).ids
        if whole[: len(lead)] != lead or len(whole) == len(lead):
            raise QuestionError(f"the prompt|answer boundary: {answer[:40]!r} is no sequence of tokens of its own after the prompt")
        return tuple(whole[len(lead) :])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of an answer's ids, special tokens left out."""
        return self._tokenizer.decode(ids)

    def leading_bos(self, ids: Sequence[int]) -> int:
        """How many BOS tokens a prompt begins with."""
        others = (at for at, token_id in enumerate(ids) if token_id != self._tokenizer.bos_token_id)
        return next(others, len(ids))

    def check(self, question_texts: Sequence[str], documents: Sequence[str] = PROBE_DOCUMENTS) -> None:
        """Prove that prefix + tail equal the whole prompt, for these questions after documents that begin and end in awkward ways.

        Raises ConfigError naming the boundary and the texts that it fails for.
        """
        try:
            for question in (*question_texts, _MID_WORD):
                self._check_whole(documents[0], question)
                for document in documents:
                    self._check_seam(self._document_part(document), question)
            for document in documents if question_texts else ():
                self._check_whole(document, question_texts[0])
        except (DocumentError, QuestionError) as error:
            raise ConfigError(f"prompt: {error}") from error

    def check_document(self, document_text: str, question_text: str) -> None:
        """Prove the boundaries for a real document: the template leaves its text alone, its end is tokenised as in the whole prompt.

        Raises DocumentError naming the boundary.
        """
        self._check_template(document_text, question_text)
        self._check_seam(self._document_part(document_text)[-_WINDOW_CHARS:], question_text)

    def _shared_ids(self, documents: Sequence[str]) -> tuple[int, ...]:
        """What the prompts of all these documents begin with: tokens of the operator's text alone, untouched by what follows it."""
        operators = len(self._head) + len("".join(_common(documents)))
        encodings = (self._tokenizer.encode(self._head + document) for document in documents)
        own = [[i for i, span in zip(found.ids, found.offsets, strict=True) if span[1] <= operators] for found in encodings]
        return _common([self._tokenizer.with_front(ids) for ids in own])

    def _document_part(self, text: str) -> str:
        part = _without_end_blanks(_fill(self._document, document=text))
        return part.lstrip() if self._frame.strips_left and not self._lead else part

    def _question_part(self, text: str) -> str:
        part = _without_first_blanks(_fill(self._question, question=text))
        return part.rstrip() if self._frame.strips_right else part

    def _check_whole(self, document_text: str, question_text: str) -> None:
        self._check_template(document_text, question_text)
        whole = self.reference_ids(document_text, question_text)
        parts = [token for part in (*self.segments(document_text), self.tail(question_text)) for token in part]
        if parts != list(whole):
            raise DocumentError(_inexact(document_text, question_text))
        if self.leading_bos(whole) > 1:
            raise DocumentError(f"it begins with {self.leading_bos(whole)} BOS tokens")

    def _check_template(self, document_text: str, question_text: str) -> None:
        if self._chat is None:
            return
        content = f"{self._lead}{self._document_part(document_text)}{self._separator}{self._question_part(question_text)}"
        if self.render(document_text, question_text) != self._frame.head + content + self._frame.end:
            raise DocumentError(
                "the template|content boundary: the model's chat template changes the text of the document "
                f"{document_text[:20]!r} or the question {question_text[:20]!r}"
            )

    def _check_seam(self, document: str, question_text: str, kind: type[AskmanyError] = DocumentError) -> None:
        if not self._seam.is_exact(document, self._question_part(question_text)):
            raise kind(_inexact(document, question_text))


def _without_end_blanks(text: str) -> str:
    return _END_BLANKS.sub("", text, count=1)


def _without_first_blanks(text: str) -> str:
    return _FIRST_BLANKS.sub("", text, count=1)


def _inexact(document: str, question: str) -> str:
    return (
        "the document|question boundary: tokens of prefix and question differ from those of the whole prompt "
        f"where {question[:20]!r} follows {document[-20:]!r}; change prompt.separator"
    )


def _fill(template: jinja2.Template, **text: str) -> str:
    try:
        return template.render(text)
    except Exception as error:  # a template can raise anything
        raise ConfigError(f"prompt.{next(iter(text))}: the template fails ({type(error).__name__}: {error})") from error


def _common(sequences: Sequence[Sequence[Item]]) -> tuple[Item, ...]:
    """The items that all sequences begin with."""
    rows = takewhile(lambda row: len(set(row)) == 1, zip(*sequences, strict=False))
    return tuple(row[0] for row in rows)


def _chat(folder: Path, config: PromptConfig, now: datetime) -> ChatTemplate | None:
    found = load_chat_template(folder, config.system, config.template_kwargs, now) if config.chat is not False else None
    if found is None:
        why = "prompt.chat is false" if config.chat is False else f"{folder} has no chat template"
        asked = {"chat: true": config.chat is True, "system": config.system is not None, "template_kwargs": bool(config.template_kwargs)}
        for key in (key for key, given in asked.items() if given):
            raise ConfigError(f"prompt.{key} needs a chat template, and {why}")
    return found
