"""What makes two runs the same run: everything that an answer depends on besides its document and its question, and nothing else.

Workers, batch sizes and places do not count; answers of runs with different fingerprints are never put into one output. Documents and
questions may come, go and change: each record has its own identity then (see `replanning`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from askmany.pipeline.config import RunConfig
from askmany.pipeline.schema import SCHEMA_VERSION

ASKING = ("questions", "max_questions")  # keys of the input section that say what is asked


def identity(config: RunConfig) -> dict[str, Any]:
    """The parts of a resolved configuration (revision and questions filled in) that answers depend on, by the keys a user knows."""
    whole = config.model_dump(mode="json")
    source, engine = whole["input"], whole["engine"]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": whole["model_revision"],
        "context_tokens": whole["context_tokens"],
        "date": whole["date"],
        "prompt": whole["prompt"],
        "questions": whole["questions"],
        "sampling": whole["sampling"],
        "long_documents": whole["long_documents"],
        "input": {key: source[key] for key in ("id", "text", "questions", "keep", "max_questions")},
        "engine": {key: engine[key] for key in ("backend", "layout", "dtype", "deterministic")},
    }


def basis(parts: Mapping[str, Any]) -> dict[str, Any]:
    """An identity without what is asked: what every answer of a run depends on."""
    source = {key: value for key, value in parts.get("input", {}).items() if key not in ASKING}
    return {key: source if key == "input" else value for key, value in parts.items() if key != "questions"}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """16 hex digits over the basis of an identity."""
    return hashlib.sha256(json.dumps(basis(parts), sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """The keys in which two identities differ, as a user writes them."""
    found: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{path}{key}.")
        elif old != new:
            found.append(f"{path}{key}")
    return found
