"""Models in a bucket: fetched once a machine into its own cache, whichever process comes first, and proved by their hash.

The hash is that of a local model folder (`models.folder_hash`), and it is found over the network too, by reading small files whole and the
ends of big ones: a driver checks 100 GB of weights without fetching them. Credentials come from the environment of the storage driver.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from askmany.engine.errors import ConfigError
from askmany.engine.known_models import locked
from askmany.engine.model_hash import is_small, is_weights, model_hash, opener

_HEAD = "-head"  # a folder that holds all but the weights


def is_bucket(name: str) -> bool:
    """Whether a model's name is the URI of a folder in a bucket."""
    return "://" in name


def obtain_from_bucket(uri: str, revision: str | None, cache: Path, weights: bool) -> tuple[Path, str]:
    """The local folder of a model in a bucket, and its hash.

    With `revision` given and the model in the cache already, nothing is asked of the bucket. Without `weights` the small files alone are
    fetched. Raises ConfigError when it cannot be read or is not what `revision` says.
    """
    with _named(uri):
        revision = revision or _remote_hash(uri)
        whole = cache / "models" / f"{_slug(uri)}-{revision[:16]}"
        for folder in (whole, *([] if weights else [whole.with_name(whole.name + _HEAD)])):
            if folder.is_dir():
                return folder, revision
        whole.parent.mkdir(parents=True, exist_ok=True)
        if weights:
            return _once(whole, lambda work: _fetch_whole(uri, revision, work)), revision
        return _once(whole.with_name(whole.name + _HEAD), lambda work: _fetch_head(uri, revision, work)), revision


def _once(folder: Path, fetch: Callable[[Path], None]) -> Path:
    """`folder`, filled by whoever holds the lock of this machine and renamed when it is whole; the others wait and find it."""
    with locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        prefix = f".{folder.name}-"
        for stale in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed: the lock says that nobody works in it
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            fetch(work)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _fetch_whole(uri: str, revision: str, work: Path) -> None:
    fs, root, files = _listed(uri)
    for name in files:
        fs.get_file(f"{root}/{name}", str(work / name))
    _require(uri, revision, model_hash((path.name, path.stat().st_size, opener(path)) for path in work.iterdir()))


def _fetch_head(uri: str, revision: str, work: Path) -> None:
    _require(uri, revision, _remote_hash(uri))
    fs, root, files = _listed(uri)
    for name in files:
        if not is_weights(name):
            fs.get_file(f"{root}/{name}", str(work / name))


def _require(uri: str, revision: str, found: str) -> None:
    if found != revision:
        raise ConfigError(f"model {uri}: model_revision is {revision}, what lies there is {found}")


def _remote_hash(uri: str) -> str:
    fs, root, files = _listed(uri)
    return model_hash((name, size, partial(fs.open, f"{root}/{name}", "rb")) for name, size in files.items())


def _listed(uri: str) -> tuple[Any, str, dict[str, int]]:
    """The filesystem, the folder's path, and the sizes of the files that make up a model."""
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(uri)
    fs.invalidate_cache()
    entries: Iterable[Any] = fs.ls(root, detail=True)
    files = {str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0) for entry in entries if entry["type"] == "file"}
    files = {name: size for name, size in files.items() if is_small(name) or is_weights(name)}
    if "config.json" not in files:
        raise ConfigError(f"model {uri}: holds no config.json")
    return fs, root.rstrip("/"), files


def _slug(uri: str) -> str:
    """A folder name that tells where the model came from."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", uri.partition("://")[2]).strip("-")[-60:]


@contextmanager
def _named(uri: str) -> Iterator[None]:
    """Whatever a storage driver raises, as one line that names the model."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"model {uri}: no driver for this kind of bucket is installed ({error})") from error
    except Exception as error:
        raise ConfigError(f"model {uri}: cannot be fetched: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
