"""The hash that names a model's contents: which files count, and what is read of them. The same for a local folder and for a bucket."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
HASHED_WHOLE_BYTES = 64 << 20
SAMPLE_BYTES = 1 << 20


def is_small(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SMALL_FILES)


def is_weights(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in WEIGHT_FILES)


def model_hash(files: Iterable[tuple[str, int, Callable[[], IO[bytes]]]]) -> str:
    """SHA-256 over a model's files, each (name, size in bytes, opener): names, sizes and contents, of a file over 64 MiB its first and last
    MiB. Other files are left out."""
    total = hashlib.sha256()
    counted = [file for file in files if is_small(file[0]) or is_weights(file[0])]
    for name, size, opened in sorted(counted, key=lambda file: file[0]):
        total.update(f"{name}\0{size}\0".encode())
        with opened() as handle:
            if size <= HASHED_WHOLE_BYTES:
                total.update(handle.read())
            else:
                total.update(handle.read(SAMPLE_BYTES))
                handle.seek(-SAMPLE_BYTES, 2)
                total.update(handle.read())
    return total.hexdigest()


def opener(path: Path) -> Callable[[], IO[bytes]]:
    """Of a local file."""
    return lambda: path.open("rb")
