"""Context-parallel groups in Ray: N actors in one placement group that answer together what no single worker can hold.

Rank 0 is a worker like any other, with the group's engine in it; the other ranks follow it. A rank that is lost ends the group, and the
group is replaced as a worker is: its documents are tried again by the same rules.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from askmany.engine.errors import ConfigError
from askmany.pipeline.acks import Ack
from askmany.pipeline.config import RunConfig
from askmany.pipeline.direct import ActorPool
from askmany.pipeline.engine_actor import EXIT_BROKEN, EngineActor
from askmany.pipeline.engine_loop import Engine
from askmany.pipeline.plan import Group, Plan
from askmany.pipeline.pulling import Pull
from askmany.pipeline.worker import GroupEngineFactory, Job

if TYPE_CHECKING:
    from askmany.pipeline.dispatch import Pool

Place = tuple[str, int]


class LeaderActor(EngineActor):
    """Rank 0: an `EngineActor` whose engine is the group's."""

    def __init__(self, job: Job, control: Any, place: Place, ranks: int) -> None:
        assert job.build_group_engine is not None
        super().__init__(replace(job, build_engine=partial(_lead, job.build_group_engine, place, ranks)), control)


class FollowerActor:
    """Another rank. One of them hosts the meeting place."""

    def __init__(self) -> None:
        self._place: Any = None

    def host(self) -> Place:
        """Where the group meets."""
        import ray

        from askmany.engine.context_parallel_join import MeetingPlace

        self._place = MeetingPlace(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        address: Place = self._place.address
        return address

    def follow(self, build: GroupEngineFactory, config: RunConfig, place: Place, rank: int, ranks: int) -> None:
        """This process's life: it ends when the group does, however that comes about."""
        try:
            build(config, place, rank, ranks)
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            sys.stderr.flush()
        os._exit(EXIT_BROKEN)


def _lead(build: GroupEngineFactory, place: Place, ranks: int, config: RunConfig) -> Engine:
    engine = build(config, place, 0, ranks)
    assert engine is not None, "rank 0 has the engine"
    return engine


@dataclass(slots=True)
class GroupPool(ActorPool):
    """Like `ActorPool` with a group in the place of each actor. `size.count` groups of `ranks`, whose ranks each take `size`'s devices."""

    ranks: int = 2
    _followers: dict[int, list[Any]] = field(default_factory=dict)
    _bundles: dict[int, Any] = field(default_factory=dict)

    def close(self) -> None:
        for worker in list(self.actors):
            self._stop(worker)

    def _start_actor(self, worker: int) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._stop(worker)
        takes = {"CPU": self.size.cpus, "GPU": self.size.gpus}
        bundles = placement_group([{name: amount for name, amount in takes.items() if amount}] * self.ranks, strategy="PACK")
        self._bundles[worker] = bundles

        def options(rank: int) -> dict[str, Any]:
            where = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
            return {"num_cpus": self.size.cpus, "num_gpus": self.size.gpus, "max_restarts": 0, "scheduling_strategy": where}

        follower_class: Any = ray.remote(FollowerActor)
        leader_class: Any = ray.remote(LeaderActor)
        followers = [follower_class.options(**options(rank)).remote() for rank in range(1, self.ranks)]
        self._followers[worker] = followers
        place = followers[0].host.remote()
        for rank, follower in enumerate(followers, start=1):
            follower.follow.remote(self.job.build_group_engine, self.job.config, place, rank, self.ranks)
        leader = leader_class.options(max_concurrency=4, **options(0)).remote(self.job, self.control, place, self.ranks)
        self.actors[worker] = leader
        self.rooms.pop(worker, None)
        self._asked[leader.room_and_kind.remote()] = worker

    def _stop(self, worker: int) -> None:
        """End every rank of the group and give its place back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        leaders = [self.actors[worker]] if worker in self.actors else []
        for actor in [*leaders, *self._followers.pop(worker, [])]:
            ray.kill(actor)
        bundles = self._bundles.pop(worker, None)
        if bundles is not None:
            remove_placement_group(bundles)


def size_groups(pool: Pool, ranks: int) -> Pool:
    """As many groups as the single workers' devices allow. ConfigError when they do not make one group."""
    devices = pool.count * pool.gpus
    if pool.gpus and pool.count < ranks:
        raise ConfigError(f"workers.context_ranks {ranks}: the run has {pool.count} workers with {devices:g} GPUs together")
    count = pool.count // ranks if pool.gpus else 1
    cpus = pool.cpus if pool.gpus else pool.cpus * pool.count / ranks
    return replace(pool, count=count, cpus=cpus)


def dispatch_to_groups(job: Job, plan: Plan, groups: Sequence[Group], pool: Pool, control: Any = None) -> Generator[Ack, None, None]:
    """Hand out plan groups to context-parallel groups by pulling, yield acknowledgements as they come."""
    ranks = job.config.workers.context_ranks
    assert ranks is not None
    size = size_groups(pool, ranks)
    actors = GroupPool(job, plan, size, control, ranks=ranks)
    try:
        yield from Pull(actors, range(size.count)).run(groups)
    finally:
        actors.close()
