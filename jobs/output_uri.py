"""What the commands that look at an output share: its URI and the options that open it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
import yaml

from askmany.engine.errors import ConfigError
from askmany.pipeline.storage import ObjectStore

Output = Annotated[str, typer.Argument(help="The output folder or URI of a run.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="A storage option; credentials are better left to the environment. Repeatable."),
]


def storage_options(options: Sequence[str] | None) -> dict[str, Any]:
    """`a.b=value` pairs as nested storage options, values read as YAML. ConfigError for one that is no pair."""
    found: dict[str, Any] = {}
    for option in options or ():
        path, equals, text = option.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            raise ConfigError(f"--option {path}: write it as key=value")
        below = found
        for key in keys[:-1]:
            below = below.setdefault(key, {})
        below[keys[-1]] = yaml.safe_load(text)
    return found


def open_output(uri: str, options: Sequence[str] | None) -> ObjectStore:
    return ObjectStore(uri, storage_options(options))
