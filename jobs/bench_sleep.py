"""Engines that only sleep, two fast for every two slow, and the record that they leave: for measuring balance on real Ray without a GPU."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from askmany.engine.engine import Engine
from askmany.engine.fake import fake_engine
from askmany.engine.request import Document
from askmany.pipeline.balance import CostModel
from askmany.pipeline.config import RunConfig

SLOW = 0.45
NOISE = 0.3
FOLDER = "slept"


@dataclass(frozen=True, slots=True)
class Stretch:
    """One document on one worker: seconds of work at speed 1, and when it was (seconds since 1970)."""

    worker: int
    speed: float
    work_s: float
    begin: float
    end: float


class SleepingEngine:
    """The fake engine, asleep for as long as a document would take: its estimated cost, times lognormal noise, over this worker's speed."""

    def __init__(self, inner: Engine, folder: Path, s_per_cost: float) -> None:
        self._inner = inner
        self._s_per_cost = s_per_cost
        folder.mkdir(parents=True, exist_ok=True)
        self.worker = _take_number(folder)
        self.speed = 1.0 if self.worker % 2 == 0 else SLOW
        self._log = folder / f"{self.worker}.jsonl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, document: Document) -> None:
        work_s = self._s_per_cost * _cost(document) * noise(document.key)
        begin = time.time()
        time.sleep(work_s / self.speed)
        with self._log.open("a") as file:
            file.write(json.dumps(asdict(Stretch(self.worker, self.speed, work_s, begin, time.time()))) + "\n")
        self._inner.submit(document)


def sleeping_engine(config: RunConfig) -> SleepingEngine:
    """Built in a worker; `ASKMANY_SLEEP_S` is the work of 400 documents of median length in seconds at speed 1."""
    s_per_cost = float(os.environ["ASKMANY_SLEEP_S"]) / 400 / 400
    return SleepingEngine(fake_engine(config.engine, kv_tokens=1 << 20), Path(config.output.uri) / FOLDER, s_per_cost)


def stretches(output: Path) -> list[Stretch]:
    """What all engines of a run have left."""
    return [Stretch(**json.loads(line)) for file in sorted((output / FOLDER).glob("*.jsonl")) for line in file.read_text().splitlines()]


def _take_number(folder: Path) -> int:
    """The lowest number that no worker of this run has taken."""
    number = 0
    while True:
        try:
            (folder / f"{number}.taken").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def _cost(document: Document) -> float:
    import numpy as np

    question_tokens = sum(len(question.token_ids) for question in document.questions)
    answer_tokens = sum(question.sampling.max_new_tokens for question in document.questions)
    tokens = document.prefix_tokens + question_tokens
    return float(CostModel().estimate(np.array([float(tokens)]), np.array([float(answer_tokens)]))[0])


def noise(key: str) -> float:
    """Lognormal(`NOISE`), the same for a document on whatever worker."""
    digest = hashlib.sha256(key.encode()).digest()
    uniform = (int.from_bytes(digest[:8]) + 0.5) / 2**64
    return math.exp(NOISE * statistics.NormalDist().inv_cdf(uniform))
