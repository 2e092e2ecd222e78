"""A run from its configuration to its answers: `run(config) -> RunResult`.

Open, plan, dispatch, seal. Everything that can be refused is refused before an engine is built. Importing this module loads neither
torch nor Ray.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from askmany.pipeline import building
from askmany.pipeline.attempts import FOLDER as ATTEMPTS
from askmany.pipeline.commit import seal
from askmany.pipeline.config import RunConfig
from askmany.pipeline.config_file import load_config, parse_config
from askmany.pipeline.dispatch import Pool, dispatch, size_pool
from askmany.pipeline.export import write_jsonl
from askmany.pipeline.interrupt import interrupts_as_exceptions
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.planning import PlannedRun, plan_run, take_up
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.result import RunResult, State, make_result, run_values
from askmany.pipeline.run_file import read_run, write_run
from askmany.pipeline.runtime import cluster
from askmany.pipeline.summary import print_plan, print_summary
from askmany.pipeline.watching import watch
from askmany.pipeline.worker import Ack, EngineFactory, Job


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    dry_run: bool = False,
    console: Console | None = None,
    build_engine: EngineFactory = building.build_engine,
    build_preparer: Callable[[RunConfig], Preparer] = building.build_preparer,
) -> RunResult:
    """Answer every question of every document and leave the answers in the output.

    `config`: a RunConfig, a mapping of the same shape, or the path of a YAML file. With `dry_run` only the plan is made and shown; nothing
    is written. The builders are called in worker processes and must be importable there. Raises ConfigError before an engine is built;
    a Ctrl-C or SIGTERM once work has begun ends in a result whose state is `interrupted`.
    """
    console = console or Console(stderr=True, quiet=True)
    opened = open_run(as_config(config), build_preparer)
    planned = take_up(opened)
    if planned is not None and (dry_run or not planned.todo):
        print_plan(console, opened, planned)
        return make_result(opened, planned, None, "planned") if dry_run else finish(opened, planned, {}, "complete", console)
    with interrupts_as_exceptions(), cluster(opened.config.workers):
        pool = size_pool(opened.config)
        if planned is None:
            with console.status("reading and tokenising documents"):
                planned = plan_run(opened, float(pool.count), build_preparer, keep=not dry_run)
        print_plan(console, opened, planned)
        if dry_run:
            return make_result(opened, planned, None, "planned")
        job = Job(opened.config, opened.fingerprint, uuid.uuid4().hex[:12], build_engine, build_preparer)
        return answer(job, opened, planned, console, pool)


def answer(job: Job, opened: OpenedRun, planned: PlannedRun, console: Console, pool: Pool) -> RunResult:
    """Dispatch what is left to do; whatever happens, what is committed by then is sealed and readable."""
    write_run(opened.store, run_values(opened, make_result(opened, planned, None, "running"), launches(opened)))
    began = time.time()
    acks: dict[str, Ack] = {}
    state: State = "failed"
    try:
        with watch(console, planned) as watcher:
            for ack in dispatch(job, planned.plan, planned.todo, pool, watcher.tally):
                acks[ack.group] = ack
                watcher.book(ack)
        state = "complete"
    except KeyboardInterrupt:
        state = "interrupted"
    finally:
        result = finish(opened, planned, acks, state, console, began)
    return result


def finish(
    opened: OpenedRun, planned: PlannedRun, acks: Mapping[str, Ack], state: State, console: Console, began: float | None = None
) -> RunResult:
    """Seal, write run.json and the other formats, show the summary. `began` is when dispatching did, None when there was nothing to."""
    footers = {group: footer for group, footer in planned.done.items() if footer}
    footers |= {group: ack.footer(opened.fingerprint) for group, ack in acks.items()}
    manifest = seal(opened.store, opened.fingerprint, {group.name: group.records for group in planned.plan.groups}, footers)
    if state == "complete" and not manifest.complete:
        state = "incomplete"
    seconds = 0.0 if began is None else time.time() - began
    records = sum(ack.records for ack in acks.values())
    result = make_result(opened, planned, manifest, state, seconds, records)
    this = [] if began is None else [{"began": round(began, 3), "seconds": result.seconds, "records": records, "state": state}]
    write_run(opened.store, run_values(opened, result, [*launches(opened), *this]))
    opened.store.remove_folder(ATTEMPTS)
    if opened.config.output.format != "parquet":
        write_jsonl(opened.store, manifest)
    print_summary(console, result, manifest, opened.config)
    return result


def launches(opened: OpenedRun) -> list[dict[str, Any]]:
    """The launches that run.json already tells of."""
    before = read_run(opened.store) or {}
    return list(before.get("launches", ()))


def as_config(config: RunConfig | Mapping[str, Any] | str | Path) -> RunConfig:
    """A configuration out of whatever names one."""
    if isinstance(config, RunConfig):
        return config
    return parse_config(config) if isinstance(config, Mapping) else load_config(config)
