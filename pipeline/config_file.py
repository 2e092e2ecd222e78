"""From a YAML file and command-line overrides to a RunConfig, or to one line that says what is wrong and where.

Messages read `file: section.key: what is wrong`; an unknown key names the nearest known one.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from askmany.engine.errors import ConfigError
from askmany.pipeline.config import RunConfig


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file, `a.b=value` overrides laid over it. Raises ConfigError."""
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such configuration file (looked at {Path(path).absolute()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: the configuration file cannot be read: {error}") from error
    return parse_config(_mapping(load_yaml(text, source), source), overrides, source)


def parse_config(values: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> RunConfig:
    """The configuration of a plain mapping. Raises ConfigError."""
    try:
        merged = _copy(values)
        for override in overrides:
            _apply(merged, override)
        refuse_unknown_keys(merged, RunConfig, source)
        _refuse_half_characters(merged, source)
        return RunConfig.model_validate(merged)
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    except ValidationError as error:
        raise ConfigError(_message(error, source)) from error


def refuse_unknown_keys(values: Mapping[str, Any], model: type[BaseModel], source: str, path: str = "") -> None:
    """ConfigError for the first key, at any depth, that the model does not have; it names the nearest one."""
    fields = _fields(model)
    for key, value in values.items():
        where = f"{path}{key}"
        if key not in fields:
            raise ConfigError(f"{source}: {where}: unknown key; {_nearest(str(key), list(fields))}")
        section = _section(fields[key])
        if section is not None and isinstance(value, Mapping):
            refuse_unknown_keys(value, section, source, f"{where}.")


def _refuse_half_characters(value: Any, source: str, path: str = "") -> None:
    """ConfigError for text that is none: half of a surrogate pair, which nothing can be made of later."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            _refuse_half_characters(below, source, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for below in value:
            _refuse_half_characters(below, source, path)
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{source}: {path}: {value!r} holds half a character (a lone surrogate)")


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {name: field.annotation for name, field in model.model_fields.items()}


def _section(annotation: Any) -> type[BaseModel] | None:
    """The nested section a field holds, if it is one."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def load_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. ConfigError when it is malformed, gives a key twice, or holds itself."""
    try:
        value = yaml.load(text, Loader=UniqueKeyLoader)
        _refuse_endless(value, source, set(), set())
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    return value


def _refuse_endless(value: Any, source: str, holders: set[int], seen: set[int]) -> None:
    """ConfigError for a value that an alias of its own anchor stands in. What many aliases name is looked at once."""
    if not isinstance(value, (dict, list)) or id(value) in seen:
        return
    if id(value) in holders:
        raise ConfigError(f"{source}: a YAML anchor contains itself")
    holders.add(id(value))
    for item in value.values() if isinstance(value, dict) else value:
        _refuse_endless(item, source, holders, seen)
    holders.remove(id(value))
    seen.add(id(value))


def _mapping(value: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{source}: the configuration must be a mapping of keys, not {'empty' if value is None else type(value).__name__}"
        )
    return value


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice in one mapping; plain YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep)


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _apply(values: dict[str, Any], override: str) -> None:
    """Lay `a.b=value` over the mapping; the value is read as YAML, so 4, true, null and [a, b] mean what they say."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: write it as section.key=value")
    for key in keys[:-1]:
        below = values.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {override}: {key} is not a section")
        values = below
    values[keys[-1]] = load_yaml(text, f"--set {override}")


def _message(error: ValidationError, source: str) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"] if not _is_union_tag(part))
    reason = str(first["msg"]).removeprefix("Value error, ")
    shown = "" if isinstance(first.get("input"), (Mapping, BaseModel)) or first["type"] == "missing" else f", not {_short(first['input'])}"
    more = len({_top(p["loc"]) for p in problems}) - 1
    tail = f" (and {more} more to mend)" if more else ""
    return f"{source}: {f'{where}: ' if where else ''}{reason[:1].lower()}{reason[1:]}{shown}{tail}"


def _is_union_tag(part: int | str) -> bool:
    """Pydantic names the branch of a union it tried (`int`, `literal['auto']`, `constrained-int`); users did not write that."""
    return isinstance(part, str) and (part in {"int", "float", "str", "constrained-int", "constrained-float"} or "[" in part)


def _top(location: Sequence[int | str]) -> tuple[int | str, ...]:
    return tuple(part for part in location if not _is_union_tag(part))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
