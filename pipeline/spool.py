"""Reading compressed files: as a stream, or at any byte through a decompressed copy in a temporary folder.

A worker that fetches documents out of one compressed file decompresses it once, not once a document.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, cast

import zstandard

from askmany.pipeline.storage import open_binary

COMPRESSED = (".gz", ".zst")
_ZST_BYTES = 4 << 10  # decompressed at once; a block of 128 KiB can be as short as 4 bytes, so that this bounds memory


def is_compressed(uri: str) -> bool:
    return uri.lower().endswith(COMPRESSED)


@contextmanager
def open_decompressed(uri: str, options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed by the ending of its name; a stream that is not seekable when it was compressed."""
    with open_binary(uri, options) as raw:
        if uri.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(IO[bytes], stream)
        elif uri.lower().endswith(".zst"):
            with io.BufferedReader(_ZstdFrames(raw), buffer_size=1 << 20) as reader:
                yield reader
        else:
            yield raw


class _ZstdFrames(io.RawIOBase):
    """What the zstd frames of a file hold, one after another. EOFError when the last one breaks off, as `gzip` has it; the library's own
    stream reader takes that for the end of the file."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._chunks = _decompressed(raw)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)


def _decompressed(raw: IO[bytes]) -> Iterator[bytes]:
    frame = None
    for data in iter(lambda: raw.read(_ZST_BYTES), b""):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")


class Spool:
    """Decompressed copies of compressed files, at most `max_bytes` of them together with the one in use; removed by `close`.

    Safe to share between threads.
    """

    def __init__(self, options: Mapping[str, Any], max_bytes: int = 8 << 30) -> None:
        self._options = options
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._copies: OrderedDict[str, str] = OrderedDict()

    def open(self, uri: str) -> IO[bytes]:
        """The decompressed copy of `uri`, opened (so that eviction by another thread does not matter)."""
        with self._lock:
            if uri not in self._copies:
                self._copies[uri] = self._decompress(uri)
            self._copies.move_to_end(uri)
            self._evict()
            return open(self._copies[uri], "rb")

    def close(self) -> None:
        with self._lock:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._copies.clear()

    def _decompress(self, uri: str) -> str:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="askmany-spool-")
        handle, path = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(handle, "wb") as target, open_decompressed(uri, self._options) as source:
            shutil.copyfileobj(source, target, 1 << 20)
        return path

    def _evict(self) -> None:
        while len(self._copies) > 1 and sum(map(os.path.getsize, self._copies.values())) > self._max_bytes:
            _, path = self._copies.popitem(last=False)
            os.unlink(path)
