"""Files by URI: listing inputs, reading byte ranges, and writing output objects in one atomic put.

Local paths and every fsspec scheme (s3, gs, abfs, hf, http, memory, ...) go through the same few functions. This module knows nothing
of documents or answers. Every failure names the URI and the operation.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import IO, Any, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from askmany.engine.errors import ConfigError
from askmany.pipeline.retry import Retrier

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
MAGIC = frozenset("*?[")
UNFINISHED = ".writing-"
_FAILED = {
    **dict.fromkeys(("put", "create"), "cannot be written"),
    **dict.fromkeys(("get", "look"), "cannot be read"),
    "list": "cannot be listed",
    "delete": "cannot be deleted",
}
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input. `uri` opens it again anywhere; `name` is its path below the folder or glob it was found by; `version` changes
    when the file is written again (ETag or time)."""

    uri: str
    name: str
    size: int
    version: str = ""


def told(error: Exception) -> str:
    """What an error says; with its kind, unless it is one of the system's, which say enough."""
    return str(error) if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: {error}"


def filesystem(uri: str, options: Mapping[str, Any]) -> tuple[fsspec.AbstractFileSystem, str]:
    """The filesystem and path of a URI; a missing driver package or unknown scheme is a ConfigError that says what to install."""
    scheme = uri.split("://", 1)[0] if "://" in uri else ""
    try:
        fs, path = url_to_fs(uri, **options)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        hint = f"pip install 'askmany[{extra}]'" if extra else str(error)
        raise ConfigError(f"{uri}: no driver for {scheme}:// is installed; {hint}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{uri}: {error}") from error
    return fs, path


def is_local(uri: str) -> bool:
    """Whether the URI names this machine's own file system."""
    return "://" not in uri or uri.split("://", 1)[0] in ("file", "local")


def list_files(uris: Sequence[str], options: Mapping[str, Any]) -> list[InputFile]:
    """Every file of the given files, folders (searched deeply, hidden files left out) and globs; sorted by URI, each once."""
    found: dict[str, InputFile] = {}
    for uri in uris:
        for file in _list_one(uri, options):
            found.setdefault(file.uri, file)
    return [found[uri] for uri in sorted(found)]


def outside(files: Sequence[InputFile], folder: str, options: Mapping[str, Any]) -> list[InputFile]:
    """The files that do not stand below `folder`. Those that were looked for in that folder, or in one below it, stay."""
    fs, path = filesystem(folder, options)
    local = isinstance(fs, LocalFileSystem)

    @cache
    def resolved(place: str) -> str:
        return f"{(os.path.realpath(place) if local else place).rstrip('/')}/"

    root = resolved(path if local else fs.unstrip_protocol(path))

    def is_below(place: str) -> bool:
        return resolved(place).startswith(root)

    return [
        file
        for file in files
        if is_local(file.uri) != local
        or not is_below(file.uri.rpartition("/")[0])
        or is_below(file.uri.removesuffix(file.name).rstrip("/"))
    ]


def _list_one(uri: str, options: Mapping[str, Any]) -> list[InputFile]:
    path = uri
    try:
        fs, path = filesystem(uri, options)
        fs.invalidate_cache()  # an input that has moved since this process last looked
        base, details = _found(fs, path)
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"{uri}: no such file or folder (looked at {path})") from error
    except Exception as error:  # each client library has errors of its own for credentials, options and names that it cannot use
        raise ConfigError(f"{uri}: cannot be listed: {told(error)}") from error
    files = [_input_file(fs, base, name, info) for name, info in details.items() if info.get("type") == "file"]
    visible = [file for file in files if not any(part.startswith(".") for part in file.name.split("/"))]
    if not visible:
        raise ConfigError(f"{uri}: no files there (looked at {path})")
    for file in visible:
        _refuse_undecodable(file)
    return visible


def _found(fs: fsspec.AbstractFileSystem, path: str) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
    """The folder that names are told below, and what the path names: everything in a folder, every match of a glob, one file."""
    if MAGIC & set(path) and not fs.exists(path):
        return path[: min(path.index(c) for c in MAGIC if c in path)].rpartition("/")[0], fs.glob(path, detail=True)
    if fs.isdir(path):
        return path.rstrip("/"), fs.find(path, detail=True)
    return path.rpartition("/")[0], {path: fs.info(path)}


def _refuse_undecodable(file: InputFile) -> None:
    """ConfigError for a local name that is no UTF-8: neither tables nor JSON can hold it."""
    try:
        file.uri.encode("utf-8")
    except UnicodeEncodeError as error:
        name = os.fsencode(file.uri).decode("utf-8", "backslashreplace")
        raise ConfigError(f"{name}: the file's name is not UTF-8; rename it, or narrow input.uri") from error


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

    Remote stores get one put. A local file is written beside its place, synced and renamed over it. What a busy store refuses is tried
    again by `retrier`, which counts; the client libraries' own, uncounted retries are switched off where they can be. An OSError that
    stays names the URI.
    """

    def __init__(self, uri: str, options: Mapping[str, Any], retrier: Retrier | None = None) -> None:
        if uri.endswith("://"):
            raise ConfigError(f"{uri}: a bucket or folder is needed behind the scheme")
        self.uri = uri.rstrip("/") or "/"
        self.retrier = retrier or Retrier()
        self._fs, root = filesystem(self.uri, _without_own_retries(self.uri, options))
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)

    def uri_of(self, name: str) -> str:
        return f"{self.uri}/{name}" if name else self.uri

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write the object in one piece, over one that is there."""
        self._call("put", name, self._put, name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write the object if there is none of that name; whether it was written. Of several writers at once one alone gets True,
        on stores that honour "only if it is not there" (local disks, S3 and its like, Google's, Azure's)."""
        return self._call("create", name, self._create, name, data)

    def delete(self, name: str) -> None:
        """Remove one object; harmless when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._call("delete", name, self._fs.rm_file, self._path(name))

    def get(self, name: str) -> bytes:
        """The object's bytes; FileNotFoundError when there is none."""
        data: bytes = self._call("get", name, self._fs.cat_file, self._path(name))
        return data

    def exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._call("look", name, self._fs.exists, self._path(name)))

    def list(self, folder: str) -> dict[str, int]:
        """Names (below the prefix) and sizes of the objects right inside `folder`, unfinished local writes left out."""
        return self._call("list", folder, self._list, folder)

    def find(self, folder: str) -> dict[str, int]:
        """Names and sizes of all objects below `folder`, at any depth, unfinished local writes too."""
        self._fs.invalidate_cache()
        try:
            entries = self._call("list", folder, partial(self._fs.find, detail=True), self._path(folder))
        except FileNotFoundError:
            return {}
        start = len(self._path("").rstrip("/")) + 1
        return {name[start:]: int(entry["size"] or 0) for name, entry in sorted(entries.items()) if entry["type"] == "file"}

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all below it, if it is there."""
        for name in self.find(folder):
            self.delete(name)
        if self._local:
            shutil.rmtree(self._path(folder), ignore_errors=True)

    def open(self, name: str) -> IO[bytes]:
        """The object as a seekable stream."""
        self._fs.invalidate_cache()  # an older listing may not know the object yet
        stream: IO[bytes] = self._call("get", name, self._fs.open, self._path(name), "rb")
        return stream

    @contextmanager
    def writer(self, name: str) -> Iterator[IO[bytes]]:
        """A stream whose object appears under its name when the block ends without an error, and never when it fails.

        For a remote store the bytes are gathered in a local file first.
        """
        path = self._path(name)
        if self._local:
            try:
                with _beside(path) as stream:
                    yield stream
            except OSError as error:
                raise type(error)(f"{self.uri_of(name)}: cannot be written: {error}") from error
            return
        with tempfile.TemporaryDirectory() as folder:
            gathered = os.path.join(folder, "object")
            with open(gathered, "wb") as stream:
                yield stream
            self._call("put", name, self._fs.put_file, gathered, path)

    def _call(self, operation: str, name: str, action: Callable[..., Result], *args: Any) -> Result:
        try:
            return self.retrier.call(operation, lambda: action(*args))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise type(error)(f"{self.uri_of(name)}: {_FAILED[operation]}: {error}") from error
        except Exception as error:  # of a client library, such as one for missing credentials
            raise OSError(f"{self.uri_of(name)}: {_FAILED[operation]}: {told(error)}") from error

    def _put(self, name: str, data: bytes | memoryview) -> None:
        if self._local:
            with _beside(self._path(name)) as stream:
                stream.write(data)
        else:
            self._fs.pipe_file(self._path(name), bytes(data))

    def _create(self, name: str, data: bytes) -> bool:
        try:
            if self._local:
                return _create_local(self._path(name), data)
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if _already_there(error):
                return False
            raise
        return True

    def _list(self, folder: str) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        files = {f"{folder}/{e['name'].rpartition('/')[2]}".lstrip("/"): int(e["size"] or 0) for e in entries if e["type"] == "file"}
        return {name: size for name, size in sorted(files.items()) if not name.rpartition("/")[2].startswith(UNFINISHED)}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _without_own_retries(uri: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options under which the S3 client tries once, unless they say how often."""
    if uri.split("://", 1)[0] not in ("s3", "s3a"):
        return options
    settings = dict(options.get("config_kwargs") or {})
    return {**options, "config_kwargs": {"retries": {"total_max_attempts": 1}, **settings}}


def _create_local(path: str, data: bytes) -> bool:
    """The whole file appears at once, or another's is left as it is."""
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f"{UNFINISHED}{uuid.uuid4().hex}-{name}")
    try:
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return True


def _already_there(error: OSError) -> bool:
    """Whether a store refused a create because the object exists: each client library says it in its own way."""
    words = f"{error} {error.__cause__ or ''}".lower()
    return any(word in words for word in ("precondition", "pre-condition", "412", "already exists"))


@contextmanager
def _beside(path: str) -> Iterator[IO[bytes]]:
    """A temporary file in the folder of `path`, which is made, renamed over it at the end, removed on an error."""
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
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
