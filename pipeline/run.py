"""A run from its configuration to its answers: `run(config) -> RunResult`.

Open, look, lock, plan, dispatch, seal. Everything that can be refused is refused before an engine is built. Importing this module loads
neither torch nor Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from askmany.pipeline import building
from askmany.pipeline.config import RunConfig
from askmany.pipeline.config_file import load_config, parse_config
from askmany.pipeline.dispatch import Pool, dispatch, size_pool
from askmany.pipeline.expecting import expect
from askmany.pipeline.fingerprint import basis
from askmany.pipeline.finishing import Launch, finish, launches
from askmany.pipeline.hold import held
from askmany.pipeline.interrupt import draining_first, interrupts_as_exceptions
from askmany.pipeline.lock import IfRunning
from askmany.pipeline.long_documents import long_above
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.planning import How, PlannedRun, plan_run, take_up
from askmany.pipeline.preflight import check_on_a_worker, check_output, here, require
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.recording import TooManyErrors, recording
from askmany.pipeline.result import RunResult, State, make_result, run_values
from askmany.pipeline.run_file import read_run, write_run
from askmany.pipeline.runtime import cluster
from askmany.pipeline.storage import is_local
from askmany.pipeline.summary import print_plan
from askmany.pipeline.watching import Watcher, watch
from askmany.pipeline.worker import EngineFactory, GroupEngineFactory, Job

LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class Builders:
    """What builds the heavy parts, called in worker processes and importable there."""

    engine: EngineFactory = building.build_engine
    group_engine: GroupEngineFactory = building.build_group_engine
    preparer: Callable[[RunConfig], Preparer] = building.build_preparer


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    dry_run: bool = False,
    console: Console | None = None,
    build_engine: EngineFactory = building.build_engine,
    build_preparer: Callable[[RunConfig], Preparer] = building.build_preparer,
    build_group_engine: GroupEngineFactory = building.build_group_engine,
    if_running: IfRunning = "fail",
    retry_errors: bool = False,
) -> RunResult:
    """Answer every question of every document and leave the answers in the output.

    `config`: a RunConfig, a mapping of the same shape, or the path of a YAML file. With `dry_run` only the plan is made and shown; nothing
    is written. The builders are called in worker processes and must be importable there. `if_running` says what to do when another run
    holds the output; with `retry_errors`, documents whose records are errors are tried again. Raises ConfigError before an engine is
    built, LockLostError when another run takes the output over; a Ctrl-C or SIGTERM once work has begun ends in a result whose state is
    `interrupted`.
    """
    console = console or Console(stderr=True, quiet=True)
    builders = Builders(build_engine, build_group_engine, build_preparer)
    config = as_config(config)
    if not dry_run and not is_local(config.output.uri):
        require(check_output(config.output.uri, config.output.storage_options, here()))
    opened = open_run(config, build_preparer, own_output=not dry_run)
    if dry_run:
        return show_plan(opened, builders, console)
    if is_local(opened.store.uri):
        require(check_output(opened.store.uri, opened.config.output.storage_options, here()))
    with held(opened.store, LEASE_S, if_running) as hold:
        opened = as_it_stands(opened, config, build_preparer)
        launch = Launch(opened, hold.lock, console, retry_errors)
        how = How(hold.lock.epoch, retry_errors)
        planned = take_up(opened, how)
        if planned is not None and not planned.todo:
            print_plan(console, opened, planned)
            return finish(launch, planned, {}, "complete")
        with interrupts_as_exceptions(), cluster(opened.config.workers):
            pool = size_pool(opened.config)
            _look_from_a_worker(opened)
            if planned is None:
                with console.status("reading and tokenising documents"):
                    planned = plan_run(opened, float(pool.count), build_preparer, how)
            print_plan(console, opened, planned)
            launch.warn_of_distrusted(planned)
            return answer(launch, planned, pool, builders) if planned.todo else finish(launch, planned, {}, "complete")


def as_it_stands(opened: OpenedRun, config: RunConfig, build_preparer: Callable[[RunConfig], Preparer]) -> OpenedRun:
    """The run as its output tells of it once the lock is held: another may have begun it meanwhile, and with it set its date."""
    before = read_run(opened.store)
    return opened if before is None or basis(before.get("identity") or {}) == basis(opened.identity) else open_run(config, build_preparer)


def show_plan(opened: OpenedRun, builders: Builders, console: Console) -> RunResult:
    """What `run` would do; nothing is written."""
    planned = take_up(opened, How(None))
    if planned is None:
        with interrupts_as_exceptions(), cluster(opened.config.workers), console.status("reading and tokenising documents"):
            planned = plan_run(opened, float(size_pool(opened.config).count), builders.preparer, How(None))
    print_plan(console, opened, planned)
    return make_result(opened, planned, None, "planned")


def answer(launch: Launch, planned: PlannedRun, pool: Pool, builders: Builders) -> RunResult:
    """Dispatch what is left to do; whatever happens, what is committed by then is sealed and readable."""
    opened, epoch = launch.opened, launch.lock.epoch
    apart = long_above(opened.config, opened.preparer)
    job = Job(
        opened.config,
        opened.fingerprint,
        epoch,
        building.informed(builders.engine, expect(planned.plan, planned.todo, apart)),
        builders.preparer,
        launch.retry_errors,
        apart,
        builders.group_engine,
        planned.plan.sets,
        planned.standing,
    )
    write_run(opened.store, run_values(opened, make_result(opened, planned, None, "running"), launches(opened)))
    launch.began = time.time()
    state: State = "failed"
    with recording(opened.store, opened.config, opened.fingerprint, epoch, planned) as recorder:
        launch.recorder = recorder
        recorder.event("launched", {"workers": pool.count, "groups": len(planned.todo), "done": len(planned.done)})
        try:
            with watch(launch.console, planned, recorder) as watcher:
                state = _collect(launch, planned, pool, job, watcher)
        except TooManyErrors as error:
            state, launch.message = "stopped", str(error)
        except KeyboardInterrupt:
            state = "interrupted"
        finally:
            result = finish(launch, planned, launch.acks, state)
    return result


def _collect(launch: Launch, planned: PlannedRun, pool: Pool, job: Job, watcher: Watcher) -> State:
    """Acknowledgements until there are none left; `interrupted` when a worker was told to drain."""

    def drain() -> None:
        import ray

        assert launch.recorder is not None
        launch.recorder.draining()
        window_s = job.config.workers.stop_window_s
        try:
            kept = ray.get(watcher.control.drain.remote(window_s), timeout=window_s + 1)
        except ray.exceptions.RayError:  # the control actor is slow or gone: what workers could not keep is answered again
            kept = False
        launch.recorder.event("drained", {"all_workers": kept})

    state: State = "complete"
    with draining_first(drain), closing(dispatch(job, planned.plan, planned.todo, pool, watcher.control, planned.rates)) as acks:
        for ack in acks:
            if ack.shard is None:
                state = "interrupted"
            else:
                launch.acks[ack.group] = ack.shard
                launch.records += ack.shard.footer.rows
            launch.note_choice(ack)
            watcher.book(ack)
    return state


def _look_from_a_worker(opened: OpenedRun) -> None:
    """Before an engine is taken: can a worker use the places that this process can? Local places are the same for a local cluster."""
    output = opened.config.output
    if not is_local(output.uri):
        require(check_on_a_worker((), {}, output.uri, output.storage_options))


def as_config(config: RunConfig | Mapping[str, Any] | str | Path) -> RunConfig:
    """A configuration out of whatever names one."""
    if isinstance(config, RunConfig):
        return config
    return parse_config(config) if isinstance(config, Mapping) else load_config(config)
