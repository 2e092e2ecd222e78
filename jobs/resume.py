"""`askmany resume OUT`: go on with the run whose output this is, by the configuration that its run.json tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.lock import IfRunning
from askmany.pipeline.run import run
from askmany.pipeline.run_file import HIDDEN, read_run
from askmany.pipeline.storage import ObjectStore


def main(
    store: ObjectStore, options: Mapping[str, Any], sets: Sequence[str], if_running: IfRunning, retry_errors: bool, console: Console
) -> int:
    """Run what is left. ConfigError when there is no run, or the configuration needs secrets that are not at hand."""
    before = read_run(store)
    if before is None:
        raise ConfigError(f"{store.uri}: no run.json there; is it the output of a run?")
    values = without_hidden(before["config"])
    values["output"] = {**values["output"], "uri": store.uri, "storage_options": dict(options)}
    config = parse_config(values, sets, store.uri_of("run.json"))
    return run(config, console=console, if_running=if_running, retry_errors=retry_errors).exit_code


def without_hidden(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration less the values that run.json does not tell; they come from the environment, or by --set and --option."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found[key] = without_hidden(value)
        elif value != HIDDEN:
            found[key] = value
    return found
