import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.pipeline.pulling import Pull, WorkerLostError


@dataclass
class Pool:
    """Workers that end their groups in a random order and sometimes die with all that they hold."""

    costs: list[float]
    speeds: list[float]
    room: list[float]
    random: random.Random
    deaths: int = 0
    flying: dict[int, tuple[int, int]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    started: int = 0
    most: int = 0

    def start(self, worker: int, task: int) -> int:
        assert self.fits(worker, task)
        self.started += 1
        self.flying[self.started] = worker, task
        self.most = max(self.most, sum(w == worker for w, _ in self.flying.values()))
        return self.started

    def wait(self, handles: Sequence[object]) -> list[int]:
        assert set(handles) == set(self.flying)
        one = self.random.choice(sorted(self.flying))
        if self.deaths and self.random.random() < 0.3:
            self.deaths -= 1
            gone = [handle for handle, (worker, _) in self.flying.items() if worker == self.flying[one][0]]
            self.lost |= set(gone)
            return gone
        return [one]

    def collect(self, handle: int) -> int:
        _, task = self.flying.pop(handle)
        if handle in self.lost:
            raise WorkerLostError
        return task

    def fits(self, worker: int, task: int) -> bool:
        return self.costs[task] <= self.room[worker]

    def cost(self, task: int) -> float:
        return self.costs[task]

    def speed(self, worker: int) -> float:
        return self.speeds[worker]

    def await_worker(self) -> bool:
        return False


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 60), st.integers(0, 8), st.integers(1, 3))
def test_every_group_comes_back_once(seed: int, workers: int, groups: int, deaths: int, ahead: int) -> None:
    generator = random.Random(seed)
    costs = sorted((generator.lognormvariate(0, 1) for _ in range(groups)), reverse=True)
    room = [generator.choice([0.5, 1.0, 1e9]) for _ in range(workers - 1)] + [1e9]
    pool = Pool(costs, [generator.choice([1.0, 0.45]) for _ in range(workers)], room, generator, deaths)
    found = list(Pull(pool, range(workers), ahead).run(range(groups)))
    assert sorted(found) == list(range(groups))
    assert pool.most <= ahead
    assert pool.flying == {}


def test_a_group_that_nobody_can_hold_is_an_error() -> None:
    pool = Pool([5.0, 1.0], [1.0], [2.0], random.Random(0))
    with pytest.raises(ValueError, match="no worker can hold"):
        list(Pull(pool, range(1)).run(range(2)))


def test_after_stop_what_flies_ends_and_nothing_follows() -> None:
    pool = Pool([1.0] * 20, [1.0, 1.0], [9.0, 9.0], random.Random(0))
    pull = Pull(pool, range(2), ahead=1, stop=lambda: pool.started >= 6)
    assert len(list(pull.run(range(20)))) == pool.started == 6


def test_a_slow_worker_leaves_what_it_would_end_too_late() -> None:
    pool = Pool([100.0, 40.0, 5.0, 5.0, 5.0], [0.1, 1.0], [1e9, 1e9], random.Random(0))
    list(Pull(pool, range(2), ahead=1, stop=lambda: pool.started >= 2).run(range(5)))
    first: dict[int, int] = {}
    again = Pool([100.0, 40.0, 5.0, 5.0, 5.0], [0.1, 1.0], [1e9, 1e9], random.Random(0))
    original = again.start

    def start(worker: int, task: int) -> int:
        first.setdefault(worker, task)
        return original(worker, task)

    again.start = start  # type: ignore[method-assign]
    list(Pull(again, range(2), ahead=1).run(range(5)))
    assert first[0] == 2
    assert first[1] == 0
