"""A small text file, whole and decoded: data sets and gold files, gzip or not. Knows nothing of what is in it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from typing import Any

from askmany.engine.errors import ConfigError
from askmany.pipeline.storage import read_bytes


def read_text(uri: str, options: Mapping[str, Any], what: str) -> str:
    """The text of the file, unpacked when its name ends in .gz, without a byte-order mark. ConfigError names the file, called `what`."""
    try:
        data = read_bytes(uri, options)
        data = gzip.decompress(data) if uri.endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:  # EOFError: the packed file is cut short
        raise ConfigError(f"{uri}: {what} cannot be read: {error}") from error
    return data.decode("utf-8-sig", errors="replace")
