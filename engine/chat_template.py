"""A model's chat template, rendered once and split around the text of the user's message.

Templates come with models from strangers: they run in jinja's immutable sandbox, with the helpers that Hugging Face gives them and nothing
else. Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from askmany.engine.errors import ConfigError

_FIRST, _LAST = "\ue000askmany begins\ue001", "\ue000askmany ends\ue001"
_MIDDLE = "\n\n  <b>\\n & \u00e9 "  # what a template that escapes, collapses or normalises text would not leave alone
_BLANK = "\u2003\u2003"  # blanks that no template prints, to see whether it strips the message


@dataclass(frozen=True, slots=True)
class Frame:
    """A rendered template around the user's message: text before, text after, and whether the message loses blanks at its ends."""

    head: str = ""
    end: str = ""
    strips_left: bool = False
    strips_right: bool = False


class ChatTemplate:
    """One template with all it is rendered with but the user's message; every rendering sees the same `now`."""

    def __init__(self, source: str, tokens: dict[str, str], system: str | None, template_kwargs: dict[str, Any], now: datetime) -> None:
        reserved = sorted({"messages", "add_generation_prompt", *tokens} & template_kwargs.keys())
        if reserved:
            raise ConfigError(f"prompt.template_kwargs: {reserved[0]} is set by askmany itself")
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._variables = {"tools": None, "documents": None, **tokens, **template_kwargs}
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid jinja ({error})") from error

    def render(self, message: str) -> str:
        """The prompt for one user message, up to where the answer begins. Raises ConfigError where the template refuses."""
        messages = [*self._system, {"role": "user", "content": message}]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._variables)
        except Exception as error:  # a template can raise anything
            raise ConfigError(f"the model's chat template refuses the prompt ({type(error).__name__}: {error})") from error

    def frame(self) -> Frame:
        """Split the template around the message. Raises ConfigError where the message does not come out once, whole and as it was."""
        text = self.render(f"{_BLANK}{_FIRST}{_MIDDLE}{_LAST}{_BLANK}")
        if text.count(_FIRST) != 1 or text.count(_LAST) != 1:
            times = min(text.count(_FIRST), text.count(_LAST))
            raise _unsplittable(
                f"the user's message comes out {times} times" if times else "the user's message does not come out as it was"
            )
        head, rest = text.split(_FIRST)
        middle, end = rest.split(_LAST)
        if middle != _MIDDLE:
            raise _unsplittable("it changes the text of the user's message")
        strips_left, strips_right = not head.endswith(_BLANK), not end.startswith(_BLANK)
        head, end = head.removesuffix(_BLANK), end.removeprefix(_BLANK)
        if _BLANK[0] in head + end:
            raise _unsplittable("it changes the blanks around the user's message")
        return Frame(head, end, strips_left, strips_right)


def _unsplittable(reason: str) -> ConfigError:
    return ConfigError(f"the model's chat template cannot be split at the template|content boundary: {reason}; use prompt.chat: false")


def load_chat_template(folder: Path, system: str | None, template_kwargs: dict[str, Any], now: datetime) -> ChatTemplate | None:
    """The template of a model folder (chat_template.jinja, else tokenizer_config's), None where the model has none."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: the chat template cannot be read ({error})") from error
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
        if source is None:
            raise ConfigError(f"{path}: chat templates {sorted(named)}, none is named 'default'")
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(config), system, template_kwargs, now)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, as templates name them."""
    found = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _clock(now)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _clock(now: datetime) -> Callable[[str], str]:
    return lambda pattern: now.strftime(pattern)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; when prompting it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
