"""run.json: written when a launch begins and when it ends, read by the next one. What is in it is `result`'s business."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import askmany
from askmany.engine.errors import ConfigError
from askmany.pipeline.commit import RUN
from askmany.pipeline.storage import ObjectStore

HIDDEN = "***"  # stands where a value is not told
PACKAGES = ("torch", "transformers", "tokenizers", "ray", "pyarrow", "sglang")


def versions() -> dict[str, str]:
    """Of the interpreter and the packages that answers may depend on."""
    found = {"python": platform.python_version(), "askmany": askmany.__version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def read_run(store: ObjectStore) -> dict[str, Any] | None:
    """run.json of an output, None when there is none. ConfigError when it is not readable."""
    try:
        values = json.loads(store.get(RUN))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{store.uri_of(RUN)}: not valid JSON: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(values.get(key, {}), dict) for key in ("identity", "config")):
        raise ConfigError(f"{store.uri_of(RUN)}: not a run's file: it, its `identity` and its `config` must be JSON objects")
    return values


def write_run(store: ObjectStore, values: Mapping[str, Any]) -> None:
    """Put run.json."""
    store.put(RUN, json.dumps(values, indent=1, ensure_ascii=False).encode("utf-8"))


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration fit for files: storage options keep their names and lose their values."""
    return {
        key: dict.fromkeys(value, HIDDEN) if key == "storage_options" else redacted(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
    }
