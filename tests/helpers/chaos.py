"""One seeded run that is killed at random moments and resumed until it is done: what the chaos tests repeat.

The driver or a worker gets SIGKILL when a drawn number of shards is there (none, some, or all of them, which is the moment between the
last data file and the manifest). Whatever was killed, the same command is given again, with another number of workers.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from askmany.pipeline.commit import read_manifest
from askmany.pipeline.storage import ObjectStore
from tests.helpers.child_run import Trouble, kill, result_of, run_here, start
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.word_model import words

Key = tuple[str, str, int]


@dataclass(frozen=True)
class Size:
    """How much one run does: `shard` documents at most share a shard."""

    documents: int = 300
    questions: int = 6
    shard: int = 10
    pause_s: float = 0.02


def make_input(folder: Path, size: Size) -> dict[str, Any]:
    """Documents and a configuration (without workers) in `folder`."""
    write_jsonl(folder / "d.jsonl", [{"doc_id": f"d{n:05d}", "text": words(4 + n % 37, n)} for n in range(size.documents)])
    questions = [{"id": f"q{n}", "question": f"w{n} w{n + 1}", "max_new_tokens": 2 + n % 3} for n in range(size.questions)]
    return run_values(folder, questions=questions, output={"shard_documents": size.shard}, metrics={"heartbeat_s": 0.5})


def with_workers(config: Mapping[str, Any], address: str, count: int, dispatch: str, output: Path) -> dict[str, Any]:
    workers = {"count": count, "cpus": 0.25, "address": address, "dispatch": dispatch}
    return {**config, "workers": workers, "output": {**config["output"], "uri": str(output)}}


def answers(output: Path) -> dict[Key, tuple[Any, ...]]:
    """Every record that the manifest's shards hold, by key. AssertionError for a key that is there twice."""
    store = ObjectStore(str(output), {})
    found: dict[Key, tuple[Any, ...]] = {}
    for name in read_manifest(store).shards:
        for row in pq.read_table(output / name).to_pylist():
            key = row["doc_id"], row["question_id"], row["chunk"]
            assert key not in found, f"{key} twice"
            found[key] = row["status"], row["answer"], row["answer_token_ids"], row["finish_reason"], row["logprob"]
    return found


def shards(output: Path) -> int:
    return len(list(output.glob("answers/*.parquet")))


def endure(folder: Path, config: Mapping[str, Any], size: Size, address: str, seed: int) -> tuple[Path, list[str]]:
    """Run, kill, resume; the output and what happened, a word each."""
    draw = random.Random(seed)
    output = folder / f"out-{seed}"
    story: list[str] = []
    for victim in draw.sample(["driver", "worker", "driver"], k=draw.choice([1, 2])):
        values, trouble = _drawn(folder, config, size, address, draw, output, story)
        process = start(folder, values, trouble, if_running="wait")
        total = -(-size.documents // size.shard)
        _wait_for(process, output, draw.choice([0, draw.randrange(total), total - 2, total]), draw.random() * 0.3)
        if victim == "driver" or not _kill_a_worker(Path(trouble.log), draw):
            kill(process)
            story.append(f"driver killed at {shards(output)} shards")
        else:
            story.append(f"worker killed at {shards(output)} shards")
            story.append(str(result_of(process)["state"]))
    values, trouble = _drawn(folder, config, size, address, draw, output, story)
    result = run_here(values, trouble, if_running="wait")  # whoever goes on need not be a process of its own
    assert result["exit_code"] == 0, result
    return output, story


def _drawn(
    folder: Path, config: Mapping[str, Any], size: Size, address: str, draw: random.Random, output: Path, story: list[str]
) -> tuple[dict[str, Any], Trouble]:
    """The next launch: how many workers, which dispatcher, and where they note what they take in."""
    count, dispatch = draw.choice([1, 2, 3, 4]) if story else 3, draw.choice(["ray_data", "direct"])
    log = folder / f"log-{draw.randrange(1 << 40):x}"
    log.mkdir()
    story.append(f"{dispatch} with {count}")
    return with_workers(config, address, count, dispatch, output), Trouble(log=str(log), pause_s=size.pause_s)


def _wait_for(process: subprocess.Popen[str], output: Path, count: int, then_s: float, limit_s: float = 90.0) -> None:
    """Until so many shards are there and the run has begun, and a moment more; or until the run is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        if (output / "plan.parquet").exists() and shards(output) >= count:
            time.sleep(then_s)
            return
        time.sleep(0.005)


def _kill_a_worker(log: Path, draw: random.Random) -> bool:
    """SIGKILL to one of the worker processes that have taken documents in; False when there is none."""
    pids = sorted({int(path.name.rpartition("-")[2]) for path in log.iterdir()})
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if not alive:
        return False
    os.kill(draw.choice(alive), signal.SIGKILL)
    return True
