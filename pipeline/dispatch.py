"""Groups to workers through Ray Data's actor pool or the direct dispatcher, acknowledgements back.

One block of plan rows a group, in the plan's order; one acknowledgement row a group. Answers do not pass here: workers commit them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from askmany.pipeline.acks import Ack
from askmany.pipeline.blocks import ROWS, pack
from askmany.pipeline.config import RunConfig
from askmany.pipeline.engine_actor import EngineActor
from askmany.pipeline.iteration import batches
from askmany.pipeline.plan import PLANNED, Group, Plan
from askmany.pipeline.runtime import resource
from askmany.pipeline.worker import Job

CALLS_AT_ONCE = 2  # one group is read while another is in the engine, and the next is there when that one ends
BLOCK = pa.schema([pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in PLANNED])


@dataclass(frozen=True, slots=True)
class Pool:
    """How many workers are wanted, and what each one takes of the cluster: resources of a node with these labels."""

    count: int
    cpus: float
    gpus: float
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes(self) -> dict[str, Any]:
        """As Ray is asked for it."""
        more = {"resources": dict(self.resources), "label_selector": dict(self.labels)}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, **{key: value for key, value in more.items() if value}}


def size_pool(config: RunConfig) -> Pool:
    """The `auto` values resolved: a worker for each GPU of the cluster, or one with all of its CPUs."""
    workers = config.workers
    cuda = config.engine.device == "cuda" or (config.engine.device == "auto" and resource("GPU") > 0 and config.engine.backend != "fake")
    gpus = (1.0 if cuda else 0.0) if workers.gpus == "auto" else workers.gpus
    count = workers.count if workers.count != "auto" else max(1, int(resource("GPU") / gpus)) if gpus else 1
    cpus = workers.cpus if workers.cpus != "auto" else 1.0 if gpus else float(max(1, resource("CPU") // count))
    return Pool(count, cpus, gpus, workers.resources, workers.labels)


def group_block(plan: Plan, group: Group) -> pa.Table:
    """The rows of one group as a block that stands alone."""
    return plan.rows(group).cast(BLOCK).combine_chunks()


def dispatch(
    job: Job, plan: Plan, groups: Sequence[Group], pool: Pool, control: Any = None, rates: Mapping[str, float] | None = None
) -> Generator[Ack, None, None]:
    """Hand out groups in order, yield acknowledgements as they come. A worker that dies is started again and its groups are redone.

    Long documents come last, when all workers' devices are free for context-parallel groups. `rates` are cost units a second of each kind
    of worker, where they are known beforehand.
    """
    long = [group for group in groups if job.long_above is not None and group.longest_tokens > job.long_above]
    names = {group.name for group in long}
    short = [group for group in groups if group.name not in names]
    if short:
        yield from _to_single_workers(job, plan, short, pool, control, rates or {})
    if long:
        from askmany.pipeline.context_groups import dispatch_to_groups

        yield from dispatch_to_groups(job, plan, long, pool, control)


def _to_single_workers(
    job: Job, plan: Plan, groups: Sequence[Group], pool: Pool, control: Any, rates: Mapping[str, float]
) -> Generator[Ack, None, None]:
    if job.config.workers.dispatch == "direct":
        from askmany.pipeline.direct import dispatch_direct

        return dispatch_direct(job, plan, groups, pool, control, rates)
    return dispatch_ray_data(job, plan, groups, pool, control)


def dispatch_ray_data(job: Job, plan: Plan, groups: Sequence[Group], pool: Pool, control: Any = None) -> Generator[Ack, None, None]:
    """Through Ray Data's actor pool: it restarts, scales and holds back; it knows no costs and no speeds."""
    import ray.data

    strategy = ray.data.ActorPoolStrategy(
        min_size=1,
        max_size=pool.count,
        max_concurrent_calls_per_actor=CALLS_AT_ONCE,
        enable_true_multi_threading=True,
    )
    rows: list[Any] = [ray.put(pack(group_block(plan, group))) for group in groups]  # one at a time: together they are a second plan
    acks = ray.data.from_arrow_refs(rows).map_batches(
        EngineActor,
        fn_constructor_args=(job, control),
        batch_size=ROWS,
        batch_format="pyarrow",
        compute=strategy,
        **pool.takes,
    )
    with closing(batches(acks)) as blocks:
        for block in blocks:
            yield from map(Ack.load, block.column("ack").to_pylist())
