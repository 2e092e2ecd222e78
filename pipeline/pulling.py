"""The direct dispatcher's loop: an idle worker pulls the next group that it can hold. About forty lines, and no Ray in them.

Groups come largest first (see `balance`), so plain pulling ends within a small group of the best there is. A worker gets a second group
ahead of time, so that its engine stays fed, as long as that group is less than an even share of what is left; a lost worker's groups are
handed out again at once. Time and workers are the caller's: the same loop runs real actors and the simulator's virtual ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

ABOUT = 0.8  # measured speeds of one kind of worker differ by less

Worker = TypeVar("Worker", bound=Hashable)
Task = TypeVar("Task")
Result = TypeVar("Result")
WorkerIn = TypeVar("WorkerIn", bound=Hashable, contravariant=True)
TaskIn = TypeVar("TaskIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class WorkerLostError(Exception):
    """A worker ended while it held a group; the group is to be handed out again."""


class Workers(Protocol[WorkerIn, TaskIn, ResultOut]):
    """What the loop needs of a pool. `collect` raises WorkerLostError; the pool replaces such a worker under the same name.

    `wait` may return nothing, when a worker came up instead. `await_worker` blocks until one more worker is up; False when all are.
    """

    def start(self, worker: WorkerIn, task: TaskIn) -> Hashable: ...

    def wait(self, handles: Sequence[Hashable]) -> Sequence[Hashable]: ...

    def collect(self, handle: Hashable) -> ResultOut: ...

    def fits(self, worker: WorkerIn, task: TaskIn) -> bool: ...

    def cost(self, task: TaskIn) -> float: ...

    def speed(self, worker: WorkerIn) -> float: ...

    def await_worker(self) -> bool: ...


@dataclass(slots=True)
class Pull(Generic[Worker, Task, Result]):
    """One dispatch of `tasks` to `workers`. `stop` is asked before each hand-out: once true, what is in flight ends and nothing follows."""

    pool: Workers[Worker, Task, Result]
    workers: Sequence[Worker]
    ahead: int = 2
    stop: Callable[[], bool] = lambda: False
    _left: float = field(default=0.0, init=False)
    _speed: float = field(default=0.0, init=False)
    _fastest: float = field(default=0.0, init=False)

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Results as they come. ValueError for a task that no worker can hold."""
        waiting = deque(tasks)
        self._left = sum(map(self.pool.cost, waiting))
        held: dict[Worker, int] = dict.fromkeys(self.workers, 0)
        flying: dict[Hashable, tuple[Worker, Task]] = {}
        while waiting or flying:
            if self.stop():
                waiting.clear()
            for worker, task in self._hand_out(waiting, held):
                flying[self.pool.start(worker, task)] = worker, task
            if not flying:
                if waiting and not self.pool.await_worker():
                    raise ValueError(f"no worker can hold {waiting[0]}")
                continue
            for handle in self.pool.wait(list(flying)):
                worker, task = flying.pop(handle)
                held[worker] -= 1
                try:
                    yield self.pool.collect(handle)
                except WorkerLostError:
                    waiting.appendleft(task)
                    self._left += self.pool.cost(task)

    def _hand_out(self, waiting: deque[Task], held: dict[Worker, int]) -> Iterator[tuple[Worker, Task]]:
        """Pairs to start now: first every worker without a group, then those with the fewest. Workers count in their given order."""
        speeds = [self.pool.speed(worker) for worker in self.workers]
        self._speed, self._fastest = sum(speeds), max(speeds)
        for depth in range(1, self.ahead + 1):
            for worker in [worker for worker, count in held.items() if count < depth]:
                index = self._choose(worker, waiting, must=depth == 1)
                if index is not None:
                    task = waiting[index]
                    del waiting[index]
                    self._left -= self.pool.cost(task)
                    held[worker] += 1
                    yield worker, task

    def _choose(self, worker: Worker, waiting: deque[Task], must: bool) -> int | None:
        """Where the costliest waiting group is that the worker can hold and end before an even share of what is left would end.

        Without one, an idle worker (`must`) takes the cheapest it can hold, the fastest kind the costliest; a fed one takes none.
        """
        speed = self.pool.speed(worker)
        share = float("inf") if must and speed >= ABOUT * self._fastest else self._left / self._speed * speed
        last = None
        for index, task in enumerate(waiting):
            if self.pool.fits(worker, task):
                if self.pool.cost(task) <= share:
                    return index
                if not must:
                    return None
                last = index
        return last
