"""How a benchmark row's engine was set up: what a contender's name says of it, and a name for what differs from the benchmark's setup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from askmany.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Named:
    """A contender's name: `split`, or, with fields of `OursSetup` of its own, `split:deterministic=true,page_size=16`."""

    layout: str
    setup: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, contender: str) -> Named:
        """ConfigError for what is no `NAME=VALUE` behind the colon. Values are JSON, or text where they are none."""
        layout, colon, rest = contender.partition(":")
        setup: dict[str, Any] = {}
        for part in rest.split(",") if colon else ():
            name, equals, value = part.partition("=")
            if not (name and equals and value):
                raise ConfigError(f"contender {contender!r}: {part!r} is no NAME=VALUE")
            setup[name] = _value(value)
        return cls(layout, setup)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def values_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `OursSetup` that the row's engine was given."""
    return dict(row.get("setup") or {})


def shown(row: Mapping[str, Any]) -> str:
    """`split`, or, of another setup, `split (page_size 64)`: for rows that name their setup by `setup_label`."""
    return f"{row['layout']} ({row['setup_label']})" if row.get("setup_label") else str(row["layout"])


def label(row: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """`page_size 64, streams 16`; empty for the benchmark's own setup."""
    return ", ".join(f"{name} {value}" for name, value in sorted(values_of(row).items()) if name not in without)
