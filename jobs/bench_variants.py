"""How a benchmark row's engine was set up, and the name of what differs from the benchmark's own setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def values_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `OursSetup` that the row's call was given."""
    return dict(row.get("setup") or {})


def label(row: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """`page_size 64, streams 16`; empty for the benchmark's own setup."""
    return ", ".join(f"{name} {value}" for name, value in sorted(values_of(row).items()) if name not in without)
