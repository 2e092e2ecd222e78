"""A benchmark's record on disk, whole at any moment: whoever is killed between two parts of it leaves the former one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_record(path: Path, record: Mapping[str, Any], indent: int | None = 1) -> None:
    """Put `record` at `path` as JSON, in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=indent) + "\n")
    os.replace(part, path)
