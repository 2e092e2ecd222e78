"""A real S3 server behind a proxy that misbehaves: nothing lost, nothing doubled, nothing believed that is not whole."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.fake import fake_engine
from askmany.pipeline.announcing import name_of
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.building import build_preparer
from askmany.pipeline.commit import list_shards, read_answers, seal, verify
from askmany.pipeline.lock import RunLock, RunLockedError
from askmany.pipeline.opening import open_run
from askmany.pipeline.plan import Plan, make_plan
from askmany.pipeline.preflight import PreflightError, check_input, check_output, require
from askmany.pipeline.resume import committed
from askmany.pipeline.retry import Retrier, RetryPolicy
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.worker import GroupWorker, Job
from tests.helpers.child_run import run_child
from tests.helpers.fault_proxy import Faults
from tests.helpers.runs import run_config, run_values, survey, write_jsonl
from tests.helpers.s3_fixture import Bucket
from tests.helpers.word_model import words

pytestmark = pytest.mark.timeout(240)


def test_a_store_on_s3_does_what_a_folder_does(bucket: Bucket) -> None:
    store = ObjectStore(bucket.uri(), bucket.options)
    assert store.list("answers") == {}
    store.put("answers/a é", b"one")
    store.put("answers/a é", b"two")
    assert store.get("answers/a é") == b"two"
    assert store.create("lock/1", b"x")
    assert not store.create("lock/1", b"y")
    assert store.get("lock/1") == b"x"
    assert store.list("answers") == {"answers/a é": 3}
    assert store.find("") == {"answers/a é": 3, "lock/1": 1}
    assert store.exists("lock/1")
    store.delete("lock/1")
    store.delete("lock/1")
    assert not store.exists("lock/1")
    with pytest.raises(FileNotFoundError):
        store.get("lock/1")
    with store.writer("big") as stream:
        stream.write(b"1234")
    assert store.open("big").read() == b"1234"
    store.remove_folder("answers")
    assert store.find("") == {"big": 4}


def test_of_many_drivers_at_once_one_takes_the_lock(bucket: Bucket) -> None:
    won: list[int] = []
    refused: list[str] = []
    gate = threading.Barrier(6)

    def take() -> None:
        lock = RunLock(ObjectStore(bucket.uri(), bucket.options))
        gate.wait()
        try:
            won.append(lock.acquire("fail"))
        except RunLockedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (won, len(refused)) == ([1], 5)


@pytest.mark.parametrize(("operation", "word"), [("list", "list"), ("put", "write"), ("get", "read"), ("delete", "delete")])
def test_what_is_denied_is_named_before_any_engine(tmp_path: Path, bucket: Bucket, operation: str, word: str) -> None:
    began = time.monotonic()
    bucket.state.reset(Faults(deny=frozenset({operation}), keys="_probe" if operation == "get" else ""))
    with pytest.raises(PreflightError, match=rf"{bucket.uri()}.*: {word} failed from .* as key test….*(AccessDenied|Forbidden)"):
        require(check_output(bucket.uri(), bucket.options, "here"))
    assert time.monotonic() - began < 20


def test_a_wrong_secret_and_a_dead_endpoint_are_named(bucket: Bucket) -> None:
    wrong = {**bucket.options, "secret": "not the secret"}
    with pytest.raises(PreflightError) as caught:
        require(check_output(bucket.uri(), wrong, "here"))
    assert "not the secret" not in str(caught.value)
    assert bucket.options["secret"] not in str(caught.value)
    dead = {**bucket.options, "endpoint_url": "http://127.0.0.1:9"}
    began = time.monotonic()
    checks = check_output(bucket.uri(), dead, "here", limit_s=3)
    assert time.monotonic() - began < 10
    assert not checks[0].ok
    with pytest.raises(PreflightError, match="list failed"):
        require(check_input([bucket.uri("*.jsonl")], bucket.options, "here"))


@pytest.mark.parametrize("operation", ["list", "put"])
def test_a_run_that_may_not_list_or_put_ends_with_2_in_time(tmp_path: Path, bucket: Bucket, operation: str) -> None:
    bucket.state.reset(Faults(deny=frozenset({operation})))
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "d", "text": "w1"}])
    result = run_child(tmp_path, run_values(tmp_path, output={"uri": bucket.uri(), "storage_options": bucket.options}))
    assert result["exit_code"] == 2
    assert result["seconds"] < 60
    assert bucket.uri() in result["error"]
    assert {"list": "list", "put": "write"}[operation] in result["error"]
    assert "testsecret" not in json.dumps(result)


def _work(folder: Path, bucket: Bucket, policy: RetryPolicy) -> tuple[Plan, GroupWorker, ObjectStore, str]:
    """A plan of ten groups and a worker that writes into the bucket."""
    write_jsonl(folder / "d.jsonl", [{"doc_id": f"d{n:02d}", "text": words(5, n)} for n in range(40)])
    bucket.state.reset(Faults())
    config = run_config(folder, questions=["w1", "w2"], output={"uri": bucket.uri(), "storage_options": bucket.options})
    opened = open_run(config)
    plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits(max_documents=4, smallest_cost=1e9))
    worker = GroupWorker(Job(opened.config, opened.fingerprint, 1, lambda c: fake_engine(c.engine), build_preparer), lambda error: None)
    worker._store.retrier.policy = policy
    return plan, worker, ObjectStore(bucket.uri(), bucket.options), opened.fingerprint


@pytest.mark.parametrize("faults", [Faults(busy_puts=0.3, seed=5), Faults(hide_new_s=2.0, keys="answers")])
def test_busy_puts_and_late_listings_lose_and_double_nothing(tmp_path: Path, bucket: Bucket, faults: Faults) -> None:
    plan, worker, store, fingerprint = _work(tmp_path, bucket, RetryPolicy(attempts=9, first_s=0.01, longest_s=0.1))
    bucket.state.reset(faults)
    shards: dict[str, Any] = {}
    retries = 0
    for group in plan.groups:
        ack = worker.process(group.name, plan.rows(group))
        shards[group.name] = ack.shard
        retries += sum(ack.retries.values())
    worker.close()
    assert retries == bucket.state.refused["put"]
    manifest = seal(store, fingerprint, {group.name: group.records for group in plan.groups}, shards)
    assert manifest.complete
    assert (retries > 0) == (faults.busy_puts > 0)
    bucket.state.reset(Faults())
    keys = [(r["doc_id"], r["question_id"]) for table in read_answers(store, manifest) for r in table.to_pylist()]
    assert len(keys) == len(set(keys)) == 80


def test_a_multipart_upload_whose_last_part_fails_is_never_seen(tmp_path: Path, bucket: Bucket) -> None:
    store = ObjectStore(bucket.uri(), bucket.options, Retrier(RetryPolicy(attempts=2, first_s=0.01)))
    bucket.state.reset(Faults(fail_parts_from=2))
    body = b"x" * (101 << 20)
    with pytest.raises(OSError, match=r"answers/g\.parquet: cannot be written"):
        store.put("answers/g.parquet", body)
    assert bucket.state.refused["put"] >= 1
    assert list_shards(store) == {}
    bucket.state.reset(Faults())
    store.put("answers/g.parquet", body)
    assert list_shards(store) == {"answers/g.parquet": len(body)}
    assert verify(store, "answers/g.parquet") == "not a whole shard"


def test_finished_shards_are_not_opened_again(tmp_path: Path, bucket: Bucket) -> None:
    """Those that the ledger tells of, or that were announced; one more, of which neither is known, is looked at once."""
    plan, worker, store, fingerprint = _work(tmp_path, bucket, RetryPolicy())
    from askmany.pipeline.ledger import Ledger

    ledger = Ledger(store, 1)
    for group in plan.groups[:-1]:
        ledger.write("group", worker.process(group.name, plan.rows(group)).line())
    last = plan.groups[-1].name
    worker.process(last, plan.rows(plan.groups[-1]))
    ledger.flush()
    worker.close()
    for looked in (set(), {f"{last}.parquet"}):
        bucket.state.reset(Faults())
        assert set(committed(store, plan, fingerprint).shards) == {group.name for group in plan.groups}
        got = {key.rpartition("/")[2] for (operation, key), _ in bucket.state.keys.items() if operation == "get"}
        assert {name for name in got if ".parquet" in name} == looked
        store.delete(name_of(last))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["ray_data", "direct"])
def test_a_whole_run_on_a_busy_bucket(tmp_path: Path, bucket: Bucket, ray_address: str, dispatch: str) -> None:
    """Input and output on the bucket; 30 % of puts are answered 503."""
    import s3fs

    rows = "".join(json.dumps({"doc_id": f"d{n}", "text": words(4 + n % 9, n)}) + "\n" for n in range(60))
    s3fs.S3FileSystem(**bucket.plain, skip_instance_cache=True).pipe_file(f"{bucket.name}/in/d.jsonl", rows.encode())
    bucket.state.reset(Faults(busy_puts=0.3, seed=1, keys="/out/"))
    workers = {"count": 2, "cpus": 0.25, "address": ray_address, "dispatch": dispatch}
    places = {
        "input": {"uri": bucket.uri("in/*.jsonl"), "storage_options": bucket.options},
        "output": {"uri": bucket.uri(), "storage_options": bucket.options, "shard_documents": 10},
    }
    result = run_child(tmp_path, run_values(tmp_path, questions=["w1", "w2"], workers=workers, **places))
    assert result["exit_code"] == 0, result
    assert result["statuses"] == {"ok": 120}
    bucket.state.reset(Faults())
    store = ObjectStore(bucket.uri(), bucket.plain)
    told = [store.get(name) for name in store.find("") if name.endswith((".json", ".jsonl", ".html"))]
    assert not any(b"testsecret" in text or b"testkey" in text for text in told)
    assert json.loads(store.get("_STATUS.json"))["io_retries"] > 0
