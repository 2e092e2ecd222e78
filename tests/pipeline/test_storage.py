"""Listing, reading ranges, and objects that appear whole or not at all, on local folders and an in-memory store."""

import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from askmany.engine.errors import ConfigError
from askmany.pipeline.storage import ObjectStore, filesystem, list_files, open_binary, outside, read_bytes, read_range


@pytest.fixture(params=["local", "memory"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A URI prefix of each kind."""
    if request.param == "local":
        yield str(tmp_path / "store")
        return
    uri = f"memory://{uuid.uuid4().hex}"
    yield uri
    fs, path = fsspec.core.url_to_fs(uri)
    if fs.exists(path):
        fs.rm(path, recursive=True)


def names(uris: list[str]) -> list[str]:
    return [file.name for file in list_files(uris, {})]


def test_folder_file_and_glob(prefix: str) -> None:
    store = ObjectStore(prefix, {})
    for name in ("b.txt", "a.txt", "deep/er/c.txt", ".hidden/d.txt", ".e.txt"):
        store.put(name, name.encode())
    assert names([prefix]) == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert names([f"{prefix}/a.txt"]) == ["a.txt"]
    assert names([f"{prefix}/*.txt"]) == ["a.txt", "b.txt"]
    assert names([f"{prefix}/**/*.txt"])[-1] == "deep/er/c.txt"
    assert names([f"{prefix}/a.txt", f"{prefix}/*.txt"]) == ["a.txt", "b.txt"]
    (file,) = list_files([f"{prefix}/deep/er/c.txt"], {})
    assert file.size == 13
    assert read_bytes(file.uri, {}) == b"deep/er/c.txt"
    assert read_range(file.uri, 5, 2, {}) == b"er"
    with open_binary(file.uri, {}) as stream:
        assert stream.read(4) == b"deep"


def test_a_listed_file_changes_its_version_when_it_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    (before,) = list_files([str(path)], {})
    os.utime(path, (1, 1))
    assert list_files([str(path)], {})[0].version != before.version


def test_names_with_glob_characters_are_found(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert names([str(tmp_path / "a[1].txt")]) == ["a[1].txt"]


@pytest.mark.parametrize("uri", ["nowhere", "nowhere/*.txt", "memory://nowhere/x.txt"])
def test_nothing_there_is_refused_by_name(uri: str) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        list_files([uri], {})


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no files there"):
        list_files([str(tmp_path)], {})


def test_unknown_schemes_and_missing_drivers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nosuch://x"):
        filesystem("nosuch://x", {})

    def missing(uri: str, **options: object) -> None:
        raise ImportError("no module")

    monkeypatch.setattr("askmany.pipeline.storage.url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"pip install 'askmany\[s3\]'"):
        filesystem("s3://bucket/x", {})


def test_listing_failures_name_the_uri(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(self: object, path: str) -> bool:
        raise PermissionError("Access Denied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.isdir", denied)
    with pytest.raises(ConfigError, match="cannot be listed: Access Denied"):
        list_files([str(tmp_path)], {})


def outside_names(uri: str, folder: str) -> list[str]:
    return [file.name for file in outside(list_files([uri], {}), folder, {})]


def test_files_below_a_folder_are_left_out_unless_they_were_looked_for_there(prefix: str) -> None:
    store = ObjectStore(prefix, {})
    for name in ("a.txt", "out/run.json", "out/answers/x.parquet", "outer/b.txt"):
        store.put(name, b"x")
    for folder in ("out", "out/", "outer/../out") if "://" not in prefix else ("out", "out/"):
        assert outside_names(prefix, f"{prefix}/{folder}") == ["a.txt", "outer/b.txt"]
        assert outside_names(f"{prefix}/**", f"{prefix}/{folder}") == ["a.txt", "outer/b.txt"]
        assert outside_names(f"{prefix}/*/*", f"{prefix}/{folder}") == ["outer/b.txt"]
        assert outside_names(f"{prefix}/out/run.json", f"{prefix}/{folder}") == ["run.json"]
        assert outside_names(f"{prefix}/out/answers", f"{prefix}/{folder}") == ["x.parquet"]
    assert outside_names(f"{prefix}/outer", prefix) == ["b.txt"]
    assert len(outside_names(prefix, "memory://elsewhere")) == 4
    assert len(outside_names(prefix, "elsewhere")) == 4


def test_a_folder_is_the_same_by_any_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "in" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for name in ("a.txt", "out/b.txt"):
        (tmp_path / "in" / name).write_text("x")
    assert outside_names(str(tmp_path / "link"), f"file://{tmp_path}/in/out") == ["a.txt"]
    assert outside_names(str(tmp_path / "in"), str(tmp_path / "link" / "out")) == ["a.txt"]


def test_whatever_a_driver_raises_names_the_uri(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(self: object, path: str, **how: object) -> bytes:
        raise LookupError("no credentials")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.isdir", denied)
    with pytest.raises(ConfigError, match="cannot be listed: LookupError: no credentials"):
        list_files([str(tmp_path)], {})
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.cat_file", denied)
    with pytest.raises(OSError, match=f"{tmp_path}/a: cannot be read: LookupError: no credentials"):
        ObjectStore(str(tmp_path), {}).get("a")


@pytest.mark.parametrize(
    ("uri", "options"),
    [("s3://", {}), ("hf://x", {}), ("/tmp/a\0b", {}), ("zip://x::/tmp", {}), ("s3://b/x", {"endpoint_url": 5, "key": "k", "secret": "s"})],
)
def test_uris_that_name_nothing_are_refused(uri: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        list_files([uri], options)
    assert str(caught.value).startswith(uri)


def test_names_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(bytes(tmp_path) + b"/.\xff.txt")).write_text("hidden")
    (tmp_path / "a.txt").write_text("x")
    assert names([str(tmp_path)]) == ["a.txt"]
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff.txt")).write_text("x")
    with pytest.raises(ConfigError) as caught:
        list_files([str(tmp_path)], {})
    assert str(caught.value) == f"{tmp_path}/\\xff.txt: the file's name is not UTF-8; rename it, or narrow input.uri"


def test_a_range_past_the_end_says_that_the_file_changed(prefix: str) -> None:
    ObjectStore(prefix, {}).put("a", b"abc")
    with pytest.raises(OSError, match="the file has changed"):
        read_range(f"{prefix}/a", 2, 5, {})
    assert read_range(f"{prefix}/a", 1, 0, {}) == b""


def test_objects(prefix: str) -> None:
    store = ObjectStore(prefix + "/", {})
    assert store.list("answers") == {}
    assert not store.exists("answers/a")
    store.put("answers/a", b"one")
    store.put("answers/a", b"three")
    store.put("answers/deeper/b", b"")
    with store.writer("answers/c") as stream:
        stream.write(b"x" * 10)
    assert store.list("answers") == {"answers/a": 5, "answers/c": 10}
    assert store.get("answers/a") == b"three"
    with store.open("answers/c") as stream:
        assert stream.read() == b"x" * 10
    assert store.uri_of("answers/a") == f"{prefix}/answers/a"
    with pytest.raises(FileNotFoundError):
        store.get("answers/none")
    store.remove_folder("answers")
    store.remove_folder("answers")
    assert store.list("answers") == {}


def test_a_write_that_fails_leaves_what_was_there(prefix: str) -> None:
    store = ObjectStore(prefix, {})
    store.put("answers/a", b"old")

    def write_half() -> None:
        with store.writer("answers/a") as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert store.get("answers/a") == b"old"
    assert store.list("answers") == {"answers/a": 3}


def test_unfinished_local_writes_are_not_listed(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), {})
    with store.writer("answers/a") as stream:
        stream.write(b"half")
        stream.flush()
        assert len(list((tmp_path / "answers").iterdir())) == 1
        assert store.list("answers") == {}
    assert store.list("answers") == {"answers/a": 4}


@pytest.mark.parametrize("uri", ["s3://", "file://"])
def test_a_scheme_alone_is_no_place_for_objects(uri: str) -> None:
    with pytest.raises(ConfigError, match=f"{uri}: a bucket or folder is needed"):
        ObjectStore(uri, {})


def test_a_stream_that_cannot_be_written_names_its_uri(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), {})
    with pytest.raises(OSError, match=f"{tmp_path}/a: cannot be written: .*No space left"), store.writer("a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file/a: cannot be written"), ObjectStore(str(tmp_path / "file"), {}).writer("a"):
        pass


def test_a_put_that_is_denied_names_its_uri(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("a file where a folder is needed")
    with pytest.raises(OSError, match="answers/a: cannot be written"):
        ObjectStore(str(tmp_path), {}).put("answers/a", b"x")
