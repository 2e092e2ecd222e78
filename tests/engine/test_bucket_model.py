"""Models in a bucket: hashed over the network, fetched once a machine, proved, and never half there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from askmany.engine import bucket_model, model_hash
from askmany.engine.errors import ConfigError
from askmany.engine.models import folder_hash, resolve_model
from askmany.jobs.cli import app
from tests.helpers.word_model import word_model

URI = "memory://models/word model"


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A model in the bucket; its hash."""
    folder = word_model(tmp_path / "local")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "notes.md").write_text("no part of the model")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for path in folder.iterdir():
        fs.pipe_file(f"/models/word model/{path.name}", path.read_bytes())
    return folder_hash(folder)


def test_the_hash_of_a_bucket_is_that_of_the_folder(stored: str, tmp_path: Path) -> None:
    model = resolve_model(URI, cache_dir=tmp_path / "cache")
    assert (model.revision, folder_hash(model.folder)) == (stored, stored)
    assert model.folder.name == f"models-word-model-{stored[:16]}"
    assert not (model.folder / "notes.md").exists()


def test_big_files_are_hashed_by_their_ends(monkeypatch: pytest.MonkeyPatch, stored: str, tmp_path: Path) -> None:
    monkeypatch.setattr(model_hash, "HASHED_WHOLE_BYTES", 5000)
    monkeypatch.setattr(model_hash, "SAMPLE_BYTES", 100)
    sampled = folder_hash(tmp_path / "local")
    assert sampled != stored
    assert resolve_model(URI, cache_dir=tmp_path / "cache", weights=False).revision == sampled


def test_a_driver_fetches_no_weights(stored: str, tmp_path: Path) -> None:
    model = resolve_model(URI, stored, tmp_path / "cache", weights=False)
    assert sorted(path.name for path in model.folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert (model.revision, model.layers) == (stored, 2)
    whole = resolve_model(URI, stored, tmp_path / "cache")
    assert (whole.folder / "model.safetensors").stat().st_size == 7000
    assert resolve_model(URI, stored, tmp_path / "cache", weights=False).folder == whole.folder


def test_many_at_once_fetch_once(monkeypatch: pytest.MonkeyPatch, stored: str, tmp_path: Path) -> None:
    fetched: list[str] = []
    fetch = bucket_model._fetch_whole

    def counted(uri: str, revision: str, work: Path) -> None:
        fetched.append(uri)
        fetch(uri, revision, work)

    monkeypatch.setattr(bucket_model, "_fetch_whole", counted)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(URI, stored, tmp_path / "cache"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len({model.folder for model in found}), len(found), fetched) == (1, 6, [URI])


def test_what_is_in_the_cache_needs_no_bucket(stored: str, tmp_path: Path) -> None:
    first = resolve_model(URI, stored, tmp_path / "cache")
    fsspec.filesystem("memory").store.clear()
    assert resolve_model(URI, stored, tmp_path / "cache") == first


@pytest.mark.parametrize("weights", [True, False])
def test_another_model_than_the_pinned_one_is_refused_and_not_kept(stored: str, tmp_path: Path, weights: bool) -> None:
    fsspec.filesystem("memory").pipe_file("/models/word model/model.safetensors", b"others")
    with pytest.raises(ConfigError, match=f"model_revision is {stored}, what lies there is"):
        resolve_model(URI, stored, tmp_path / "cache", weights)
    assert [path for path in (tmp_path / "cache/models").iterdir() if path.is_dir()] == []


def test_a_fetch_that_breaks_leaves_nothing_and_the_next_succeeds(monkeypatch: pytest.MonkeyPatch, stored: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    with monkeypatch.context() as patched:
        patched.setattr(fs, "get_file", lambda *args: (_ for _ in ()).throw(OSError("connection reset")))
        with pytest.raises(ConfigError, match="cannot be fetched: OSError: connection reset"):
            resolve_model(URI, stored, tmp_path / "cache")
    (tmp_path / f"cache/models/.models-word-model-{stored[:16]}-killed").mkdir()
    assert resolve_model(URI, stored, tmp_path / "cache").revision == stored
    assert len([path for path in (tmp_path / "cache/models").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("memory://models/none", "cannot be fetched: FileNotFoundError"),
        ("nosuch://a/b", "cannot be fetched"),
        ("memory://empty", "no config.json"),
    ],
)
def test_what_cannot_be_had_is_named(stored: str, tmp_path: Path, uri: str, message: str) -> None:
    fsspec.filesystem("memory").pipe_file("/empty/readme.md", b"")
    with pytest.raises(ConfigError, match=f"model {uri}: .*{message}|model {uri}: {message}"):
        resolve_model(uri, cache_dir=tmp_path / "cache")


def test_prefetch_prints_what_to_pin(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASKMANY_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["prefetch", URI])
    assert (done.exit_code, done.output.splitlines()[:2]) == (0, [f"model: {URI}", f"model_revision: {stored}"])
    done = CliRunner().invoke(app, ["prefetch", URI, "--revision", "f" * 64])
    assert done.exit_code == 2
