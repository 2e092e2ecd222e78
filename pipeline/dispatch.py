"""Groups to workers through Ray Data's actor pool, acknowledgements back.

One block of plan rows a group, in the plan's order; one acknowledgement row a group. Answers do not pass here: workers commit them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from askmany.engine.request import StreamResult
from askmany.pipeline.config import RunConfig
from askmany.pipeline.plan import PLANNED, Group, Plan
from askmany.pipeline.runtime import resource
from askmany.pipeline.worker import Ack, GroupWorker, Job

CALLS_AT_ONCE = 2  # one group is read while another is in the engine, and the next is there when that one ends
BLOCK = pa.schema([pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in PLANNED])


@dataclass(frozen=True, slots=True)
class Pool:
    """How many workers, and what each one takes of the cluster."""

    count: int
    cpus: float
    gpus: float


def size_pool(config: RunConfig) -> Pool:
    """The `auto` values resolved: a worker for each GPU of the cluster, or one with all of its CPUs."""
    workers = config.workers
    cuda = config.engine.device == "cuda" or (config.engine.device == "auto" and resource("GPU") > 0 and config.engine.backend != "fake")
    gpus = (1.0 if cuda else 0.0) if workers.gpus == "auto" else workers.gpus
    count = workers.count if workers.count != "auto" else max(1, int(resource("GPU") / gpus)) if gpus else 1
    cpus = workers.cpus if workers.cpus != "auto" else 1.0 if gpus else float(max(1, resource("CPU") // count))
    return Pool(count, cpus, gpus)


class Tally:
    """A small Ray actor that adds up what workers report between acknowledgements, for the progress display alone."""

    def __init__(self) -> None:
        self._answers = 0
        self._tokens = 0

    def add(self, answers: int, tokens: int) -> None:
        self._answers += answers
        self._tokens += tokens

    def read(self) -> tuple[int, int]:
        return self._answers, self._tokens


class EngineActor:
    """A `GroupWorker` as Ray Data wants it: built once in its process, called with the plan rows of one group."""

    def __init__(self, job: Job, tally: Any) -> None:
        self._tally = tally
        self._worker = GroupWorker(job, die, self._report)

    def __call__(self, block: pa.Table) -> pa.Table:
        group = block.column("group")[0].as_py()
        return ack_table(self._worker.process(group, block))

    def _report(self, result: StreamResult) -> None:
        if self._tally is not None:
            self._tally.add.remote(1, len(result.answer_token_ids))


def die(error: BaseException) -> None:
    """End this process so that Ray starts another; a polite exit would lose the groups in flight."""
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def ack_table(ack: Ack) -> pa.Table:
    return pa.table({"ack": [json.dumps(asdict(ack))]})


def group_block(plan: Plan, group: Group) -> pa.Table:
    """The rows of one group as a block that stands alone."""
    return plan.rows(group).cast(BLOCK).combine_chunks()


def dispatch(job: Job, plan: Plan, groups: Sequence[Group], pool: Pool, tally: Any = None) -> Iterator[Ack]:
    """Hand out groups in order, yield acknowledgements as they come. A worker that dies is started again and its groups are redone."""
    import ray.data

    blocks = [group_block(plan, group) for group in groups]
    strategy = ray.data.ActorPoolStrategy(
        min_size=1,
        max_size=pool.count,
        max_concurrent_calls_per_actor=CALLS_AT_ONCE,
        enable_true_multi_threading=True,
    )
    acks = ray.data.from_arrow(blocks).map_batches(
        EngineActor,
        fn_constructor_args=(job, tally),
        batch_size=None,
        batch_format="pyarrow",
        compute=strategy,
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
    )
    batches: Iterator[Any] = iter(acks.iter_batches(batch_size=None, batch_format="pyarrow"))
    for batch in batches:
        for text in batch.column("ack").to_pylist():
            yield Ack(**json.loads(text))
