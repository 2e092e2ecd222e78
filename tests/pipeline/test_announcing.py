"""What is announced before it is put: a resumed run opens no finished shard, and believes no promise that was not kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from askmany.pipeline import resume
from askmany.pipeline.announcing import announcer, name_of, read_announced
from askmany.pipeline.building import build_preparer
from askmany.pipeline.commit import shard_name, write_shard
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.worker import GroupWorker, Job
from tests.pipeline.test_worker import Bench, bench, docs


def committed(made: Bench, monkeypatch: pytest.MonkeyPatch) -> tuple[resume.Committed, list[str]]:
    """What a resumed run finds done, and the shards that it opened for that."""
    opened: list[str] = []
    plain = resume.read_footer

    def read_footer(store: ObjectStore, name: str) -> Any:
        opened.append(name)
        return plain(store, name)

    monkeypatch.setattr(resume, "read_footer", read_footer)
    return resume.committed(made.opened.store, made.plan, made.opened.fingerprint), opened


def test_a_finished_shard_that_no_ledger_tells_of_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(tmp_path, docs(5))
    ack = made.process()
    found, opened = committed(made, monkeypatch)
    assert found.shards == {made.group: ack.shard}
    assert (found.distrusted, opened) == ((), [])


def test_a_promise_without_its_object_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(tmp_path, docs(5))
    made.process()
    made.opened.store.delete(shard_name(made.group))
    assert read_announced(made.opened.store, made.group) is not None
    found, opened = committed(made, monkeypatch)
    assert (found.shards, found.distrusted, opened) == ({}, (), [])


@pytest.mark.parametrize("harm", ["object", "size", "text", "gone"])
def test_what_was_announced_otherwise_must_prove_itself(harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of another size than announced, or an announcement that cannot be read: the shard is opened as ever."""
    made = bench(tmp_path, docs(5))
    ack, store, name = made.process(), made.opened.store, shard_name(made.group)
    told = json.loads(store.get(name_of(made.group)))
    if harm == "object":
        store.put(name, store.get(name)[:-30])
    elif harm == "size":
        store.put(name_of(made.group), json.dumps(told | {"bytes": told["bytes"] + 1}).encode())
    elif harm == "text":
        store.put(name_of(made.group), b"[1]")
    else:
        store.delete(name_of(made.group))
    found, opened = committed(made, monkeypatch)
    assert opened == [name]
    assert (found.shards, found.distrusted) == (({}, (name,)) if harm == "object" else ({made.group: ack.shard}, ()))


def test_nothing_vouches_for_an_object_that_is_to_be_replaced(tmp_path: Path) -> None:
    """A redone group announces nothing: the new shard might never come, and the old object be of the same size."""
    made = bench(tmp_path, docs(5))
    job = Job(
        made.opened.config, made.opened.fingerprint, 2, made.worker._job.build_engine, build_preparer, standing=frozenset({made.group})
    )
    GroupWorker(job, made.deaths.append).process(made.group, made.plan.rows(made.plan.groups[0]))
    assert made.opened.store.exists(shard_name(made.group))
    assert read_announced(made.opened.store, made.group) is None


def test_the_announcement_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(tmp_path, docs(3))
    store, put = made.opened.store, []
    made.process()
    monkeypatch.setattr(type(store), "put", lambda self, name, data: put.append(name))
    footer = replace(read_announced(store, made.group).footer, attempt=2)  # type: ignore[union-attr]
    table = pq.read_table(store.open(shard_name(made.group)))
    shard = write_shard(store, table, footer, announcer(store))
    assert put == [name_of(made.group), shard_name(made.group)]
    assert shard.footer == footer
