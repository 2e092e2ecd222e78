"""The direct dispatcher: Ray actors of our own behind the loop of `pulling`, for mixed kinds of GPUs and a short tail.

A worker that dies is replaced and its groups are handed out again at once, to whoever is free. Rooms (tokens that the KV pool holds) and
kinds are learnt from the workers themselves, speeds from what they acknowledge; until a worker has, it counts as its kind does, in this
launch or in earlier ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from askmany.engine.errors import EngineError
from askmany.pipeline.acks import Ack
from askmany.pipeline.engine_actor import EngineActor
from askmany.pipeline.plan import Group, Plan
from askmany.pipeline.pulling import Pull, WorkerLostError
from askmany.pipeline.worker import Job

if TYPE_CHECKING:
    from askmany.pipeline.dispatch import Pool

HOPELESS = 3  # replacements of one worker in a row, with nothing acknowledged by anybody, that end the run
MEMORY = 0.3  # weight of the newest group in a worker's learnt speed


@dataclass(slots=True)
class ActorPool:
    """The actors of one launch, by number. `rooms` and `kinds` hold what is known of them, `rates` cost units a second, `known_rates` those
    that earlier launches measured on a kind."""

    job: Job
    plan: Plan
    size: Pool
    control: Any
    known_rates: Mapping[str, float] = field(default_factory=dict)
    actors: dict[int, Any] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    _asked: dict[Any, int] = field(default_factory=dict)  # the pending question for a worker's room and kind
    _flights: dict[Any, tuple[int, Any, Group]] = field(default_factory=dict)
    _ended: dict[int, float] = field(default_factory=dict)  # when a worker's last group came back
    _losses: int = 0

    def __post_init__(self) -> None:
        for worker in range(self.size.count):
            self._start_actor(worker)

    def start(self, worker: int, task: Group) -> Any:
        from askmany.pipeline.dispatch import group_block

        actor = self.actors[worker]
        ref = actor.process.remote(group_block(self.plan, task))
        self._flights[ref] = worker, actor, task
        return ref

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        import ray

        ready, _ = ray.wait([*handles, *self._asked], num_returns=1)
        self._learn_rooms(ready)
        return [ref for ref in ready if ref in self._flights]

    def collect(self, handle: Any) -> Ack:
        import ray

        worker, actor, group = self._flights.pop(handle)
        try:
            ack = Ack.load(ray.get(handle))
        except ray.exceptions.RayActorError as error:
            self._replace(worker, actor, error)
            raise WorkerLostError from error
        self._losses = 0
        now = time.monotonic()
        seconds = min(ack.seconds, now - self._ended.get(worker, -math.inf))  # it holds two groups: what one took is not what it waited
        self._ended[worker] = now
        rate = group.cost / max(seconds, 1e-3)
        self.rates[worker] = rate if worker not in self.rates else (1 - MEMORY) * self.rates[worker] + MEMORY * rate
        return ack

    def fits(self, worker: int, task: Group) -> bool:
        """Whether the worker is up and its KV pool holds the longest document. What nobody could hold, anybody may refuse."""
        room = self.rooms.get(worker)
        if room is None:
            return False
        return task.longest_tokens < room or (not self._asked and task.longest_tokens >= max(self.rooms.values()))

    def cost(self, task: Group) -> float:
        return task.cost

    def speed(self, worker: int) -> float:
        """The worker's own rate, else that of its kind now, else that of its kind before, else that of whoever is known."""
        if worker in self.rates:
            return self.rates[worker]
        kind = self.kinds.get(worker, "")
        alike = [rate for other, rate in self.rates.items() if self.kinds.get(other, "") == kind]
        before = [self.known_rates[kind]] if kind in self.known_rates else []
        return _mean(alike or before or list(self.rates.values()) or list(self.known_rates.values()) or [1.0])

    def await_worker(self) -> bool:
        import ray

        if not self._asked:
            return False
        self._learn_rooms(ray.wait(list(self._asked), num_returns=1)[0])
        return True

    def close(self) -> None:
        import ray

        for actor in self.actors.values():
            ray.kill(actor)

    def _start_actor(self, worker: int) -> None:
        import ray

        actor = ray.remote(EngineActor).options(max_concurrency=4, max_restarts=0, **self.size.takes).remote(self.job, self.control)
        self.actors[worker] = actor
        self.rooms.pop(worker, None)
        self._asked[self.actors[worker].room_and_kind.remote()] = worker

    def _learn_rooms(self, ready: Sequence[Any]) -> None:
        import ray

        for ref in ready:
            worker = self._asked.pop(ref, None)
            if worker is None:
                continue
            actor = self.actors[worker]
            try:
                self.rooms[worker], self.kinds[worker] = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                self._replace(worker, actor, error)

    def _replace(self, worker: int, actor: Any, error: Exception) -> None:
        """A new actor under the same number, unless the lost one was replaced already."""
        if self.actors[worker] is not actor:
            return
        self._losses += 1
        if self._losses > HOPELESS * self.size.count + self.job.config.workers.max_attempts:
            raise EngineError(f"workers end as soon as they start, {self._losses} in a row: {error}") from error
        self._asked = {ref: asked for ref, asked in self._asked.items() if asked != worker}
        self._start_actor(worker)


def dispatch_direct(
    job: Job, plan: Plan, groups: Sequence[Group], size: Pool, control: Any = None, rates: Mapping[str, float] | None = None
) -> Generator[Ack, None, None]:
    """Hand out groups by pulling, yield acknowledgements as they come. `rates`: cost units a second that a kind of worker is known for."""
    pool = ActorPool(job, plan, size, control, rates or {})
    try:
        yield from Pull(pool, range(size.count)).run(groups)
    finally:
        pool.close()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
