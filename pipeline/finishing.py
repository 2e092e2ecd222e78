"""The end of a launch, however it came: seal, run.json, other formats, report, and what the terminal says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from askmany.pipeline.acks import Ack
from askmany.pipeline.announcing import FOLDER as ANNOUNCED
from askmany.pipeline.attempts import FOLDER as ATTEMPTS
from askmany.pipeline.carrying import put_aside
from askmany.pipeline.commit import Manifest, Shard, seal
from askmany.pipeline.export import write_jsonl
from askmany.pipeline.heartbeat import State as RunState
from askmany.pipeline.lock import RunLock
from askmany.pipeline.opening import OpenedRun
from askmany.pipeline.planning import PlannedRun
from askmany.pipeline.recording import Recorder
from askmany.pipeline.report import REPORT, render
from askmany.pipeline.reporting import gather
from askmany.pipeline.result import RunResult, State, make_result, run_values
from askmany.pipeline.run_file import read_run, write_run
from askmany.pipeline.summary import print_summary

_ENDS: Mapping[State, RunState] = {"complete": "finished", "interrupted": "interrupted"}


@dataclass(slots=True)
class Launch:
    """One launch of a run: what it holds and what it has done so far. `began` is when dispatching did, None when there was nothing to."""

    opened: OpenedRun
    lock: RunLock
    console: Console
    retry_errors: bool = False
    began: float | None = None
    recorder: Recorder | None = None
    acks: dict[str, Shard] = field(default_factory=dict)
    records: int = 0
    message: str = ""
    choices: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def note_choice(self, ack: Ack) -> None:
        """What `streams: auto` came to on a kind of worker, told once a kind: in the ledger now, in run.json in the end."""
        if ack.choice is not None and ack.accelerator not in self.choices:
            self.choices[ack.accelerator] = ack.choice
            if self.recorder is not None:
                self.recorder.event("streams chosen", {"accelerator": ack.accelerator, **ack.choice})

    def warn_of_distrusted(self, planned: PlannedRun) -> None:
        """Objects that bear a shard's name and are none of this run: said aloud, since they are redone."""
        for name in planned.distrusted:
            text = f"warning: {self.opened.store.uri_of(name)} is not a whole shard of this run; its group is done again"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def finish(launch: Launch, planned: PlannedRun, acks: Mapping[str, Shard], state: State) -> RunResult:
    """Seal and tell. Raises LockLostError, with nothing written, when another run holds the output now."""
    opened, config = launch.opened, launch.opened.config
    launch.lock.renew()
    recorder = launch.recorder or Recorder(opened.store, config, opened.fingerprint, launch.lock.epoch, planned)
    for name in planned.distrusted:
        recorder.event("redone", {"object": name})
    recorder.flush()
    plan = planned.plan
    manifest = seal(opened.store, opened.fingerprint, plan.records_by_group, {**planned.done, **acks}, plan.documents_by_group)
    if state == "complete" and not manifest.complete:
        state = "incomplete"
    result = _write(launch, planned, manifest, state)
    if manifest.complete:
        put_aside(opened.store, plan, plan.records_by_group)
        for folder in (ATTEMPTS, ANNOUNCED):
            opened.store.remove_folder(folder)
    if opened.config.output.format != "parquet":
        write_jsonl(opened.store, manifest, opened.config.output.sort)
    recorder.settle(manifest, _ENDS.get(state, "failed"), launch.message)
    opened.store.put(REPORT, render(gather(opened.store)).encode("utf-8"))
    print_summary(launch.console, result, manifest, opened.config, launch.message)
    return result


def _write(launch: Launch, planned: PlannedRun, manifest: Manifest, state: State) -> RunResult:
    """run.json, with this launch among its launches."""
    opened = launch.opened
    seconds = 0.0 if launch.began is None else time.time() - launch.began
    result = make_result(opened, planned, manifest, state, seconds, launch.records)
    this: list[dict[str, Any]] = []
    if launch.began is not None:
        this = [{"began": round(launch.began, 3), "seconds": result.seconds, "records": launch.records, "state": state}]
        if launch.choices:
            this[0]["choices"] = launch.choices
    write_run(opened.store, run_values(opened, result, [*launches(opened), *this]))
    return result


def launches(opened: OpenedRun) -> list[dict[str, Any]]:
    """The launches that run.json already tells of."""
    before = read_run(opened.store) or {}
    return list(before.get("launches", ()))
