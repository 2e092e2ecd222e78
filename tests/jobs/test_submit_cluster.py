"""`askmany submit` and plain `ray job submit` against a real head on this machine, from a copy of the source that is installed nowhere.

The long test labels real text in a bucket with a real model on two workers, while the client's connection, the client, the driver and a
worker are lost one after another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from askmany.engine.models import ResolvedModel
from askmany.pipeline.commit import current_answers, list_shards, read_manifest
from askmany.pipeline.heartbeat import RunStatus, read_status
from askmany.pipeline.job_api import JobServer, JobState
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.submission import exit_code
from tests.helpers.cut_proxy import cut_proxy
from tests.helpers.ray_head import RayHead
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.s3_fixture import Bucket
from tests.helpers.source import FOLDERS, ROOT
from tests.helpers.word_model import words

pytestmark = pytest.mark.timeout(600)
VERSION = "0.1.0+copy"


@dataclass
class Client:
    """A command that runs; what it says is in `log`."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float = 240) -> int:
        return self.process.wait(limit_s)


@dataclass
class Clone:
    """A copy of the source of its own version, and how to run its commands against a head."""

    root: Path
    head: RayHead

    def start(self, *words: str, **environment: str) -> Client:
        """`askmany ...` from the copy."""
        env = {**self.head.environment, "PYTHONPATH": str(self.root), **environment}
        log = self.root.parent / f"client-{time.monotonic_ns()}.log"
        with open(log, "wb") as stream:
            command = [sys.executable, "-m", "askmany.jobs.cli", *words]
            return Client(subprocess.Popen(command, cwd=self.root, env=env, stdout=stream, stderr=stream), log)

    def run(self, *words: str, **environment: str) -> tuple[int, str]:
        client = self.start(*words, **environment)
        return client.wait(), client.text

    def job(self, name: str) -> JobState:
        state = JobServer(self.head.url, self.head.token).state(name)
        assert state is not None
        return state


@pytest.fixture(scope="module")
def clone(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    root = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "LICENSE", ".gitignore", "askmany", *FOLDERS):
        subprocess.run(["cp", "-R", "-P", str(ROOT / name), str(root / name)], check=True)
    init = root / "askmany" / "__init__.py"
    text = init.read_text()
    changed = text.replace('__version__ = "0.1.0"', f'__version__ = "{VERSION}"')
    assert changed != text
    init.write_text(changed)
    return Clone(root, head)


def wait_for(condition: Callable[[], bool], client: Client | None = None, limit_s: float = 180.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        if client is not None and client.process.poll() is not None:
            raise AssertionError(f"ended with {client.process.returncode}: {client.text}")
        time.sleep(0.1)


def status_of(store: ObjectStore) -> RunStatus | None:
    try:
        return read_status(store)
    except Exception:
        return None


def kill_child(head: RayHead, pid: int) -> None:
    """SIGKILL to a process that came of this head, and no other."""
    process = psutil.Process(pid)
    assert head.pid in [parent.pid for parent in process.parents()]
    process.kill()


def workers_of(head: RayHead) -> list[int]:
    """Processes that hold an engine."""
    found = []
    for child in psutil.Process(head.pid).children(recursive=True):
        try:
            if "EngineActor" in " ".join(child.cmdline()):
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


def labelling(bucket: Bucket, documents: int) -> dict[str, Any]:
    """Pieces of the demo's articles in the bucket, two labels asked of each."""
    lines = (ROOT / "jobs/demo/documents.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"].split() for line in lines]
    pieces = [" ".join(text[at : at + 60]) for text in texts for at in range(0, len(text) - 60, 60)][:documents]
    assert len(pieces) == documents
    rows = "".join(json.dumps({"doc_id": f"p{n:03d}", "text": text}) + "\n" for n, text in enumerate(pieces))
    ObjectStore(bucket.uri("in"), bucket.plain).put("pieces.jsonl", rows.encode())
    questions = [
        {"id": "list", "question": "Does the text hold a list?", "type": "bool"},
        {"id": "topic", "question": "Is it about {{ options }}?", "type": "choice", "options": ["nature", "people", "things"]},
    ]
    return {
        "model": "smollm2",
        "input": {"uri": bucket.uri("in/*.jsonl"), "storage_options": bucket.plain},
        "questions": questions,
        "output": {"uri": bucket.uri("out"), "storage_options": bucket.plain, "shard_documents": 1},
        "engine": {"device": "cpu", "kv_tokens": 256},
        "workers": {"count": 2, "cpus": 0.5},
        "metrics": {"heartbeat_s": 0.5},
    }


def test_a_labelling_run_outlives_its_connection_client_driver_and_worker(
    tmp_path: Path, clone: Clone, bucket: Bucket, smollm2: ResolvedModel
) -> None:
    head, store, documents = clone.head, ObjectStore(bucket.uri("out"), bucket.plain), 16
    config = tmp_path / "label.yaml"
    config.write_text(yaml.safe_dump(labelling(bucket, documents)))
    submit = ("submit", str(config), "--run-id", "label")
    shown = ("status", bucket.uri("out"), *options_of(bucket.plain))

    def shards() -> int:
        return len(list_shards(store))

    def driver() -> int | None:
        """The live driver's process."""
        status = status_of(store)
        return status.pid if status is not None and status.state == "running" and psutil.pid_exists(status.pid) else None

    # The connection, then the client: the job does not notice, and the client knows it again.
    with cut_proxy(int(head.url.rpartition(":")[2])) as proxy:
        client = clone.start(*submit, "--address", f"http://127.0.0.1:{proxy.port}")
        wait_for(lambda: driver() is not None, client)
        proxy.cut()
        time.sleep(0.5)
        proxy.down = False
        before = proxy.accepted
        wait_for(lambda: proxy.accepted > before and shards() > 0, client)
        client.process.kill()
        client.wait()
        assert "the job goes on" in client.text
    code, text = clone.run(*shown)
    assert (code, clone.job("label-1").ended, ": running" in text) == (0, False, True), text

    # The driver, under another client that joins and may try again; then a worker of the second driver.
    client = clone.start(*submit, "--retries", "1")
    wait_for(lambda: "joined label-1, which is running" in client.text, client)
    at, first = shards(), driver()
    assert first is not None
    wait_for(lambda: shards() > at, client)
    kill_child(head, first)
    wait_for(lambda: driver() not in (None, first) and bool(workers_of(head)), client)
    at = shards()
    wait_for(lambda: shards() > at, client)
    assert shards() < documents
    kill_child(head, workers_of(head)[0])
    assert client.wait() == 0, client.text
    story = ("label-1: failed, driver ended by signal 9", "submitted label-2", "driver exit code 0")
    assert [line for line in story if line not in client.text] == [], client.text
    ends = [(job.status, exit_code(job)) for job in map(clone.job, ("label-1", "label-2"))]
    assert ends == [("FAILED", 128 + 9), ("SUCCEEDED", 0)]

    code, text = clone.run(*shown)
    assert (code, ": finished" in text) == (0, True), text
    manifest = read_manifest(store)
    assert (manifest.complete, manifest.statuses) == (True, {"ok": 2 * documents})
    keys = [(row["doc_id"], row["question_id"]) for table in current_answers(store) for row in table.to_pylist()]
    assert len(keys) == len(set(keys)) == 2 * documents
    assert json.loads(store.get("run.json"))["versions"]["askmany"] == VERSION
    code, text = clone.run(*submit)
    assert (code, "label-2 has succeeded" in text) == (0, True), text


def test_a_lost_driver_is_told_and_the_next_submit_goes_on(tmp_path: Path, clone: Clone) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": f"d{n:03d}", "text": words(9, n)} for n in range(200)])
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run_values(tmp_path, workers={"cpus": 0.5}, metrics={"heartbeat_s": 0.2})))
    store = ObjectStore(str(tmp_path / "out"), {})
    client = clone.start("submit", str(config), "--run-id", "lost", "--retries", "0")
    wait_for(lambda: bool((now := status_of(store)) and now.state == "running"), client)
    status = status_of(store)
    assert status is not None
    kill_child(clone.head, status.pid)
    assert client.wait() == 128 + 9, client.text
    wait_for(lambda: bool((now := status_of(store)) and now.is_silent(time.time())))
    code, text = clone.run("status", str(tmp_path / "out"))
    assert (code, "silent for" in text) == (4, True), text
    code, text = clone.run("submit", str(config), "--run-id", "lost", "--retries", "0")
    assert (code, "submitted lost-2" in text) == (0, True), text
    code, text = clone.run("status", str(tmp_path / "out"))
    assert (code, "200 of 200 records" in text) == (0, True), text


def options_of(options: Mapping[str, Any]) -> list[str]:
    """Storage options as the command line takes them."""
    return [word for key, value in options.items() for word in ("--option", f"{key}={json.dumps(value)}")]


def test_plain_ray_job_submit_runs_a_checkout_and_hides_the_exit_code(tmp_path: Path, clone: Clone) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": f"d{n}", "text": words(4, n)} for n in range(6)])
    (clone.root / "run.yaml").write_text(yaml.safe_dump(run_values(tmp_path, workers={"cpus": 0.5})))
    environment = {**os.environ, **clone.head.environment}

    def ray_job_submit(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--submission-id", name, "--working-dir", ".", "--"]
        entry = ["python", "-m", "askmany.jobs.run", "run.yaml", *words]
        return subprocess.run([*command, *entry], cwd=clone.root, env=environment, capture_output=True, text=True, timeout=200)

    done = ray_job_submit("plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out/run.json").read_text())["versions"]["askmany"] == VERSION
    assert read_manifest(ObjectStore(str(tmp_path / "out"), {})).complete
    done = ray_job_submit("plain-bad", "--set", "model=/no/such/model")
    assert done.returncode == 1
    assert clone.job("plain-bad").exit_code == 2


def test_tokens_are_asked_for_by_name_and_bad_configurations_keep_their_code(tmp_path: Path, clone: Clone) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": "d", "text": "w1"}])
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run_values(tmp_path)))
    home = {"RAY_AUTH_TOKEN_PATH": "", "HOME": str(tmp_path), "RAY_AUTH_MODE": ""}
    code, text = clone.run("submit", str(config), **home)
    assert (code, "asks for a token and there is none" in text) == (2, True), text
    code, text = clone.run("submit", str(config), **home, RAY_AUTH_TOKEN="another")
    assert (code, "refuses the token that was found" in text) == (2, True), text
    code, text = clone.run("submit", str(config), "--set", "model=/no/such/model", **home, RAY_AUTH_TOKEN=clone.head.token)
    assert (code, "driver exit code 2" in text, "try left" in text) == (2, True, False), text
