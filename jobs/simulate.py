"""Balance on paper: the real plan and the real dispatch loop on virtual workers with virtual clocks.

    python -m askmany.jobs.simulate --workers 64 --documents 100000

Lengths are lognormal, half the workers run at 0.45 of the speed of the others, real costs differ from estimates by lognormal(0.3). For
each way of dispatching it prints the makespan over the lower bound (all work spread evenly over all speeds). Knows no Ray: Ray Data's
rule (the actor with the fewest groups in flight gets the next) is written out here.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import numpy as np
import typer

from askmany.pipeline.balance import CostModel, Floats, GroupLimits, guided_groups
from askmany.pipeline.pulling import Pull

UNITS_PER_S = 20_000.0  # cost units that the fast kind of worker does in a second
GROUP_OVERHEAD_S = 0.05
RAY_DATA_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. `slow` is the speed of every second worker; `noise` the sigma of log(real cost / estimated cost)."""

    workers: int = 64
    documents: int = 100_000
    slow: float = 0.45
    noise: float = 0.3
    seed: int = 0
    log_mean: float = 9.0
    log_sigma: float = 1.1
    context_tokens: int = 1 << 17
    answer_tokens: int = 32 * 32

    @property
    def speeds(self) -> list[float]:
        return [1.0 if index % 2 == 0 else self.slow for index in range(self.workers)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of dispatching: makespan over the lower bound, groups, and how long planning and dispatching took here."""

    way: str
    ratio: float
    makespan_s: float
    groups: int
    planning_s: float
    dispatching_s: float


@dataclass(slots=True)
class VirtualPool:
    """Workers that do their groups one after another in virtual time. By group: `seconds` of the fast kind, and what the plan expected."""

    speeds: Sequence[float]
    seconds: Sequence[float]
    estimates: Sequence[float]
    now: float = 0.0
    _free_at: list[float] = field(default_factory=list)
    _ends: list[tuple[float, int]] = field(default_factory=list)
    _started: int = 0

    def __post_init__(self) -> None:
        self._free_at = [0.0] * len(self.speeds)

    def start(self, worker: int, task: int) -> int:
        begin = max(self.now, self._free_at[worker])
        self._free_at[worker] = begin + self.seconds[task] / self.speeds[worker] + GROUP_OVERHEAD_S
        self._started += 1
        heapq.heappush(self._ends, (self._free_at[worker], self._started))
        return self._started

    def wait(self, handles: Sequence[object]) -> list[int]:
        """The next group to end; time jumps there."""
        self.now, handle = heapq.heappop(self._ends)
        return [handle]

    def collect(self, handle: object) -> float:
        return self.now

    def fits(self, worker: int, task: int) -> bool:
        return True

    def cost(self, task: int) -> float:
        return self.estimates[task]

    def speed(self, worker: int) -> float:
        return self.speeds[worker]

    def await_worker(self) -> bool:
        return False


def direct(pool: VirtualPool, groups: int) -> float:
    """The makespan under the direct dispatcher."""
    pulled: Pull[int, int, float] = Pull(pool, range(len(pool.speeds)))
    return max(pulled.run(range(groups)), default=0.0)


def ray_data(pool: VirtualPool, groups: int) -> float:
    """The makespan under Ray Data's rule: at most four groups in flight an actor, the next one to whom has the fewest."""
    waiting = deque(range(groups))
    held = [0] * len(pool.speeds)
    owner: dict[int, int] = {}
    while waiting or owner:
        order = [(count, worker) for worker, count in enumerate(held) if count < RAY_DATA_IN_FLIGHT]
        heapq.heapify(order)
        while waiting and order:
            count, worker = heapq.heappop(order)
            owner[pool.start(worker, waiting.popleft())] = worker
            held[worker] = count + 1
            if held[worker] < RAY_DATA_IN_FLIGHT:
                heapq.heappush(order, (held[worker], worker))
        for handle in pool.wait(()):
            held[owner.pop(handle)] -= 1
    return pool.now


WAYS: dict[str, Callable[[VirtualPool, int], float]] = {"direct": direct, "ray data": ray_data}


def sample(scenario: Scenario) -> tuple[Floats, Floats]:
    """Estimated and real costs of the documents, costliest first, in cost units."""
    generator = np.random.default_rng(scenario.seed)
    tokens = np.minimum(generator.lognormal(scenario.log_mean, scenario.log_sigma, scenario.documents), scenario.context_tokens)
    estimated = np.sort(CostModel().estimate(tokens, np.full(scenario.documents, float(scenario.answer_tokens))))[::-1]
    return estimated, estimated * generator.lognormal(-(scenario.noise**2) / 2, scenario.noise, scenario.documents)


def simulate(scenario: Scenario, limits: GroupLimits | None = None) -> list[Outcome]:
    """Every way of dispatching on the same plan; documents in input order, eight a group, for comparison."""
    estimated, real = sample(scenario)
    speed = sum(scenario.speeds)
    bound = max(real.sum() / UNITS_PER_S / speed, real.max() / UNITS_PER_S)
    started = time.perf_counter()
    groups = guided_groups(estimated.tolist(), [32] * len(estimated), speed, limits or GroupLimits())
    planning_s = time.perf_counter() - started
    guided = [_sums(costs, groups) for costs in (real, estimated)]
    shuffled = np.random.default_rng(scenario.seed + 1).permutation(real)
    eights = [(start, min(start + 8, len(shuffled))) for start in range(0, len(shuffled), 8)]
    plain = [_sums(shuffled, eights)] * 2
    cases = [(way, run, guided) for way, run in WAYS.items()] + [("ray data, input order", ray_data, plain)]
    return [_time(way, run, VirtualPool(scenario.speeds, true, expected), bound, planning_s) for way, run, (true, expected) in cases]


def _sums(costs: Floats, groups: Sequence[tuple[int, int]]) -> list[float]:
    """Seconds of each group on the fast kind."""
    total = np.concatenate([[0.0], np.cumsum(costs)])
    return [float(total[stop] - total[start]) / UNITS_PER_S for start, stop in groups]


def _time(way: str, run: Callable[[VirtualPool, int], float], pool: VirtualPool, bound: float, planning_s: float) -> Outcome:
    started = time.perf_counter()
    makespan = run(pool, len(pool.seconds))
    return Outcome(way, makespan / bound, makespan, len(pool.seconds), planning_s, time.perf_counter() - started)


def main(
    workers: Annotated[int, typer.Option(min=1, help="virtual workers")] = 64,
    documents: Annotated[int, typer.Option(min=1, help="virtual documents")] = 100_000,
    slow: Annotated[float, typer.Option(min=0.01, max=1.0, help="speed of every second worker")] = 0.45,
    noise: Annotated[float, typer.Option(min=0.0, help="sigma of log(real cost / estimated cost)")] = 0.3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Simulate the balance of a run and print a table, the last line as JSON."""
    outcomes = simulate(Scenario(workers, documents, slow, noise, seed))
    print(f"{'dispatch':<24}{'over bound':>12}{'makespan':>14}{'groups':>10}{'plan':>10}{'dispatch':>10}")
    for one in outcomes:
        timings = f"{one.planning_s:>9.2f}s{one.dispatching_s:>9.2f}s"
        print(f"{one.way:<24}{one.ratio:>12.4f}{one.makespan_s:>12.0f} s{one.groups:>10,}{timings}")
    print(json.dumps([asdict(one) for one in outcomes]))


if __name__ == "__main__":
    typer.run(main)
