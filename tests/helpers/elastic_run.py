"""A run on several nodes of one machine, with GPUs that are only claimed: `python -m tests.helpers.elastic_run FOLDER DISPATCH`.

Two kinds of node, whose engines are slowed down by what kind of GPU they are told they have. In the middle of the run a slow node crashes,
another slow one joins, and then a fast one more than there were at first. The last line of stdout is what happened, as JSON. A process of
its own, because Ray joins one cluster a process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when ray is imported: every socket on the loopback
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray spells it so; every node alike, those that are there before the run included)

from askmany.engine.fake import fake_engine
from askmany.pipeline.commit import list_shards
from askmany.pipeline.config import RunConfig
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.run import run
from askmany.pipeline.storage import ObjectStore
from tests.helpers.child_run import Trouble, TroubledEngine
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.word_model import words

DOCUMENTS, QUESTIONS = 600, 4
ALL_HERE, UNHURRIED = "all-here", 4  # until a file of this name is there, engines take so many times longer
STEP_S = {"A100": 0.3, "RTX-A6000": 0.9}
FAST, SLOW = STEP_S


class PacedEngine(TroubledEngine):
    """Waits before each step, longer until all nodes are there, so that there is work left for those that join."""

    def __init__(self, inner: Any, pause_s: float, all_here: Path) -> None:
        super().__init__(inner, Trouble())
        self._pause_s, self._all_here = pause_s, all_here

    def step(self) -> list[Any]:
        time.sleep(self._pause_s * (1 if self._all_here.exists() else UNHURRIED))
        return super().step()


def slow_by_kind(config: RunConfig) -> Any:
    """An engine that takes its time, by the kind of GPU that Ray says this process has."""
    from askmany.pipeline.engine_actor import accelerator

    engine = fake_engine(config.engine, kv_tokens=1 << 10)
    return PacedEngine(engine, STEP_S[accelerator()], Path(config.output.uri).parent / ALL_HERE)


def main(folder: Path, dispatch: str) -> None:
    import ray
    from ray.cluster_utils import Cluster

    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20, "_system_config": health}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(kind: str) -> Any:
        return cluster.add_node(num_cpus=1, num_gpus=1, labels={"ray.io/accelerator-type": kind}, object_store_memory=80 << 20)

    add(FAST)
    slow = add(SLOW)
    ray.init(address=cluster.address, log_to_driver=False)
    store = ObjectStore(str(folder / "out"), {})
    told: dict[str, Any] = {}

    def work() -> None:
        result = run(values(folder, dispatch), build_engine=slow_by_kind)
        told.update(exit_code=result.exit_code, statuses=dict(result.statuses), documents=result.documents)

    runner = threading.Thread(target=work)
    runner.start()

    def await_shards(count: int) -> None:
        while runner.is_alive() and len(list_shards(store)) < count:
            time.sleep(0.1)

    while runner.is_alive() and kinds_at_work(store) != set(STEP_S):
        time.sleep(0.1)
    told["crashed_at"] = time.time()
    cluster.remove_node(slow, allow_graceful=False)
    await_shards(len(list_shards(store)) + 2)
    told["joined_at"] = time.time()
    for kind in (SLOW, FAST):
        add(kind)
    while runner.is_alive() and len(workers_of(store)) < 4:
        time.sleep(0.1)
    (folder / ALL_HERE).touch()
    told["all_here_at"] = time.time()
    runner.join()
    told["groups"] = [
        {key: line[key] for key in ("worker", "accelerator", "records", "seconds", "at")}
        for line in read_ledger(store)
        if line.get("kind") == "group"
    ]
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(told), flush=True)


def kinds_at_work(store: ObjectStore) -> set[str]:
    """The kinds of GPU that have committed a group, by the ledger."""
    return {line["accelerator"] for line in read_ledger(store) if line.get("kind") == "group"}


def workers_of(store: ObjectStore) -> set[str]:
    """The workers that have committed a group, lost ones included."""
    return {line["worker"] for line in read_ledger(store) if line.get("kind") == "group"}


def values(folder: Path, dispatch: str) -> dict[str, Any]:
    """A run that wants more workers than there are, of either kind, and names no node."""
    write_jsonl(folder / "d.jsonl", [{"doc_id": f"d{n:04d}", "text": words(4 + n % 23, n)} for n in range(DOCUMENTS)])
    questions = [{"id": f"q{n}", "question": f"w{n} w{n + 1}", "max_new_tokens": 4} for n in range(QUESTIONS)]
    labels = {"ray.io/accelerator-type": f"in({FAST},{SLOW})"}
    workers = {"count": 3, "gpus": 1, "cpus": 0.5, "labels": labels, "dispatch": dispatch}
    return run_values(folder, questions=questions, output={"shard_documents": 6}, workers=workers, metrics={"heartbeat_s": 0.3})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
