"""Files by URI: listing inputs, reading byte ranges, and writing output objects in one atomic put.

Local paths and every fsspec scheme (s3, gs, abfs, hf, http, memory, ...) go through the same few functions. This module knows nothing
of documents or answers. Every failure names the URI and the operation.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from askmany.engine.errors import ConfigError

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
MAGIC = frozenset("*?[")
UNFINISHED = ".writing-"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input. `uri` opens it again anywhere; `name` is its path below the folder or glob it was found by; `version` changes
    when the file is written again (ETag or time)."""

    uri: str
    name: str
    size: int
    version: str = ""


def filesystem(uri: str, options: Mapping[str, Any]) -> tuple[fsspec.AbstractFileSystem, str]:
    """The filesystem and path of a URI; a missing driver package or unknown scheme is a ConfigError that says what to install."""
    scheme = uri.split("://", 1)[0] if "://" in uri else ""
    try:
        fs, path = url_to_fs(uri, **options)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        hint = f"pip install 'askmany[{extra}]'" if extra else str(error)
        raise ConfigError(f"{uri}: no driver for {scheme}:// is installed; {hint}") from error
    except ValueError as error:
        raise ConfigError(f"{uri}: {error}") from error
    return fs, path


def list_files(uris: Sequence[str], options: Mapping[str, Any]) -> list[InputFile]:
    """Every file of the given files, folders (searched deeply, hidden files left out) and globs; sorted by URI, each once."""
    found: dict[str, InputFile] = {}
    for uri in uris:
        for file in _list_one(uri, options):
            found.setdefault(file.uri, file)
    return [found[uri] for uri in sorted(found)]


def _list_one(uri: str, options: Mapping[str, Any]) -> list[InputFile]:
    fs, path = filesystem(uri, options)
    try:
        if MAGIC & set(path) and not fs.exists(path):
            base = path[: min(path.index(c) for c in MAGIC if c in path)].rpartition("/")[0]
            details = fs.glob(path, detail=True)
        elif fs.isdir(path):
            base, details = path.rstrip("/"), fs.find(path, detail=True)
        else:
            base, details = path.rpartition("/")[0], {path: fs.info(path)}
    except FileNotFoundError as error:
        raise ConfigError(f"{uri}: no such file or folder (looked at {path})") from error
    except OSError as error:
        raise ConfigError(f"{uri}: cannot be listed: {error}") from error
    files = [_input_file(fs, base, name, info) for name, info in details.items() if info.get("type") == "file"]
    visible = [file for file in files if not any(part.startswith(".") for part in file.name.split("/"))]
    if not visible:
        raise ConfigError(f"{uri}: no files there (looked at {path})")
    return visible


def _input_file(fs: fsspec.AbstractFileSystem, base: str, path: str, info: Mapping[str, Any]) -> InputFile:
    local = isinstance(fs, LocalFileSystem)
    name = path[len(base) :].lstrip("/") if path.startswith(base) else path.rpartition("/")[2]
    version = next((str(info[key]) for key in ("ETag", "etag", "mtime", "LastModified", "created") if info.get(key)), "")
    return InputFile(path if local else fs.unstrip_protocol(path), name, int(info.get("size") or 0), version)


@contextmanager
def open_binary(uri: str, options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """The file's bytes as a seekable stream. Raises OSError as the filesystem does."""
    fs, path = filesystem(uri, options)
    with fs.open(path, "rb") as stream:
        yield stream


def read_range(uri: str, start: int, length: int, options: Mapping[str, Any]) -> bytes:
    """Bytes [start, start + length) of the file; OSError when there are fewer."""
    fs, path = filesystem(uri, options)
    data: bytes = fs.cat_file(path, start=start, end=start + length) if length else b""
    if len(data) != length:
        raise OSError(f"{uri}: {len(data)} bytes at {start} where {length} were planned; the file has changed")
    return data


def read_bytes(uri: str, options: Mapping[str, Any]) -> bytes:
    """The whole file."""
    fs, path = filesystem(uri, options)
    data: bytes = fs.cat_file(path)
    return data


class ObjectStore:
    """A prefix that holds a run's objects. `put` is atomic: readers see the whole object or none.

    Remote stores get one put. A local file is written beside its place, synced and renamed over it.
    """

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        self.uri = uri.rstrip("/") or "/"
        self._fs, root = filesystem(self.uri, options)
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)

    def uri_of(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Write the object in one piece; an OSError names its URI."""
        try:
            if self._local:
                with self.writer(name) as stream:
                    stream.write(data)
            else:
                self._fs.pipe_file(self._path(name), data)
        except OSError as error:
            raise type(error)(f"{self.uri_of(name)}: cannot be written: {error}") from error

    def get(self, name: str) -> bytes:
        """The object's bytes; FileNotFoundError when there is none."""
        data: bytes = self._fs.cat_file(self._path(name))
        return data

    def exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path(name)))

    def list(self, folder: str) -> dict[str, int]:
        """Names (below the prefix) and sizes of the objects right inside `folder`, unfinished local writes left out."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        files = {f"{folder}/{e['name'].rpartition('/')[2]}".lstrip("/"): int(e["size"] or 0) for e in entries if e["type"] == "file"}
        return {name: size for name, size in sorted(files.items()) if not name.rpartition("/")[2].startswith(UNFINISHED)}

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all below it, if it is there."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._path(folder)):
            self._fs.rm(self._path(folder), recursive=True)

    def open(self, name: str) -> IO[bytes]:
        """The object as a seekable stream."""
        stream: IO[bytes] = self._fs.open(self._path(name), "rb")
        return stream

    @contextmanager
    def writer(self, name: str) -> Iterator[IO[bytes]]:
        """A stream whose object appears under its name when the block ends without an error, and never when it fails.

        For a remote store the bytes are gathered in a local file first.
        """
        path = self._path(name)
        if self._local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with _beside(path) as stream:
                yield stream
            return
        with tempfile.TemporaryDirectory() as folder:
            gathered = os.path.join(folder, "object")
            with open(gathered, "wb") as stream:
                yield stream
            self._fs.put_file(gathered, path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


@contextmanager
def _beside(path: str) -> Iterator[IO[bytes]]:
    """A temporary file in the folder of `path`, renamed over it at the end, removed on an error."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f"{UNFINISHED}{uuid.uuid4().hex}-{name}")
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
