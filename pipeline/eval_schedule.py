"""A scheduled evaluation: one run configuration asked again and again over a bucket that moves, each time told against the last green one.

`output.uri` is the evaluation's root. Below it lie `runs/<key>` (each an ordinary output), `history/` and `trend.html`; the key is the date
and the model's revision. A lock on the root lets one evaluation work at a time. With `since` = last-success, answers about files that have
not changed are taken from the run that gave them, as long as model, prompt and questions are the same.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from datetime import date as day
from typing import Any, Literal

from rich.console import Console

import askmany
from askmany.engine.errors import AskmanyError, ConfigError
from askmany.pipeline.config import RunConfig
from askmany.pipeline.eval_history import COMPLETE, Entry, newest, read_history, write_entry
from askmany.pipeline.eval_scoring import RUNS, Answered, Gold, gather, measure, run_store
from askmany.pipeline.eval_selection import Files, Selection, dumped, loaded, select
from askmany.pipeline.hold import Hold, held
from askmany.pipeline.lock import IfRunning
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.result import EXIT_CONFIG, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, EXIT_REGRESSED, RunResult
from askmany.pipeline.run import LEASE_S, run
from askmany.pipeline.score_items import read_gold, refuse_nothing
from askmany.pipeline.scoring import ScoreOptions, score
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.trend import TREND, render_trend
from askmany.pipeline.webhook import check_url, post

SELECTION, SCORES = "selection.json", "evaluation.json"
Since = Literal["all", "last-success"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to evaluate and how to tell of it. `date` is today (UTC) when not given; `webhook` hears of every evaluation that is not green,
    and of the first green one after such."""

    config: RunConfig
    date: str | None = None
    since: Since = "all"
    gold: str | None = None
    webhook: str | None = None
    smallest_drop: float = 0.0
    if_running: IfRunning = "fail"
    options: ScoreOptions = field(default_factory=ScoreOptions)


@dataclass(frozen=True, slots=True)
class Work:
    """One evaluation that has its key: the files it stands on, and which of them are still to be asked."""

    key: str
    date: str
    files: Files
    changed: tuple[str, ...]
    identity: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Desk:
    """What an evaluation works with while it holds the root; `history` are those before it."""

    schedule: Schedule
    root: ObjectStore
    hold: Hold
    gold: Gold
    history: Sequence[Entry]
    console: Console


def evaluate(schedule: Schedule, console: Console, answer: Callable[..., RunResult] = run) -> Entry:
    """Evaluate once; the entry's `exit_code` is the scheduler's. Raises ConfigError (RunLockedError when another evaluation is at work),
    and LockLostError when another one takes the root over: nothing is written from then on."""
    config = schedule.config
    if schedule.webhook:
        check_url(schedule.webhook)
    gold = read_gold(schedule.gold, config.input.storage_options) if schedule.gold else None
    root = ObjectStore(config.output.uri, config.output.storage_options)
    with held(root, LEASE_S, schedule.if_running) as hold:
        history = read_history(root)
        opened = open_run(config, own_output=False)
        work = choose_work(schedule, root, opened, history)
        before = next((entry for entry in history if entry.key == work.key and entry.verdict in COMPLETE), None)
        if before is not None:
            console.print(f"{work.key}: evaluated already, {before.verdict}; nothing has changed since", markup=False, highlight=False)
            return before
        desk = Desk(schedule, root, hold, gold, history, console)
        entry = _evaluate(desk, opened, work, answer)
        _tell(desk, entry)
        return entry


def choose_work(schedule: Schedule, root: ObjectStore, opened: OpenedRun, history: Sequence[Entry]) -> Work:
    """The key of this evaluation and what is to be asked. A key whose work is the same is taken up again; another gets a number."""
    date = checked_date(schedule.date)
    identity = _comparable(opened.identity, schedule.config)
    last = newest(history, COMPLETE) if schedule.since == "last-success" else None
    known = _read_work(root, last.key, last.date) if last else None
    chosen = select(opened.files, known.files if known is not None and known.identity == identity else {})
    for name in _keys(date, opened.model.revision):
        there = _read_work(root, name, date)
        if there is None:
            changed = tuple(file.uri for file in chosen.changed)
            return Work(name, date, chosen.after(name), changed, identity)
        if there.identity == identity and not _moved(select(opened.files, there.files)):
            return there
    raise AssertionError("there is always another key")


def _moved(selection: Selection) -> bool:
    return bool(selection.changed or selection.gone)


def _keys(date: str, revision: str) -> Iterator[str]:
    key = f"{date}-{revision[:12]}"
    yield key
    number = 1
    while True:
        number += 1
        yield f"{key}-{number}"


def _comparable(identity: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """What answers must agree in to be carried over: all but a date that nobody chose, and which documents are read out of a file."""
    kept = {key: value for key, value in identity.items() if key != "date" or config.date is not None}
    return {**kept, "input": {**identity["input"], "limit": config.input.limit, "format": config.input.format}}


def _read_work(root: ObjectStore, key: str, date: str) -> Work | None:
    try:
        values = json.loads(root.get(f"{RUNS}/{key}/{SELECTION}"))
        return Work(key, date, loaded(values["files"]), tuple(values["changed"]), values["identity"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{root.uri_of(f'{RUNS}/{key}/{SELECTION}')}: no selection of files: {error}") from error


def _write_work(root: ObjectStore, work: Work) -> None:
    values = {"files": dumped(work.files), "changed": list(work.changed), "identity": work.identity}
    root.put(f"{RUNS}/{work.key}/{SELECTION}", json.dumps(values, indent=1, ensure_ascii=False).encode("utf-8"))


def _evaluate(desk: Desk, opened: OpenedRun, work: Work, answer: Callable[..., RunResult]) -> Entry:
    """Ask what is to be asked, score, and write down what came of it, failures as well."""
    kept = len(work.files) - len(work.changed)
    desk.console.print(f"{work.key}: {len(work.changed)} files to ask, {kept} as they were", markup=False, highlight=False)
    entry = Entry(
        key=work.key,
        date=work.date,
        model=opened.model.name,
        revision=opened.model.revision,
        askmany=askmany.__version__,
        verdict="failed",
        exit_code=EXIT_OK,
        began=time.time(),
        seconds=0.0,
    )
    desk.hold.check()
    _write_work(desk.root, work)
    try:
        result = _ask(desk.schedule.config, desk.root, work, desk.console, answer)
        if result is not None:
            entry = replace(entry, exit_code=result.exit_code, asked_documents=result.documents, note=result.state)
        if result is None or result.state == "complete":
            entry = _scored(desk, entry, work)
    except (AskmanyError, KeyboardInterrupt) as error:
        entry = replace(entry, exit_code=_code_of(error), note=str(error)[:500] or "interrupted")
        _tell(desk, _timed(entry))
        raise
    return _timed(entry)


def _code_of(error: BaseException) -> int:
    """What the command line makes of it."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_INTERNAL


def _timed(entry: Entry) -> Entry:
    return replace(entry, seconds=round(time.time() - entry.began, 3))


def _ask(config: RunConfig, root: ObjectStore, work: Work, console: Console, answer: Callable[..., RunResult]) -> RunResult | None:
    """Run over the changed files; None when there are none. The run's own lock may still be held by a driver that died a moment ago."""
    if not work.changed:
        return None
    store = run_store(root, config.output.storage_options, work.key)
    changed = config.model_copy(
        update={
            "input": config.input.model_copy(update={"only": work.changed}),
            "output": config.output.model_copy(update={"uri": store.uri}),
        }
    )
    return answer(changed, console=console, if_running="wait")


def _scored(desk: Desk, entry: Entry, work: Work) -> Entry:
    """The entry with its metrics and verdict; the whole report goes beside the run's answers.

    ConfigError when there is nothing to score though there should be, because of a gold file or because the last green evaluation had
    metrics: nothing can become worse then, which is not to be called green. A run that has failed by itself stays what it is.
    """
    schedule, root = desk.schedule, desk.root
    options = schedule.config.output.storage_options
    now = gather(root, options, work.files, desk.gold)
    green = newest(desk.history, ["green"])
    if entry.exit_code == EXIT_OK and (schedule.gold or (green and green.metrics)):
        refuse_nothing(now.items, work.key)
    metrics = measure(now, _answered(root, options, green, desk.gold), schedule.options, schedule.smallest_drop)
    report = {"key": work.key, "scores": score(now.items, schedule.options), "metrics": [asdict(metric) for metric in metrics]}
    desk.hold.check()
    root.put(f"{RUNS}/{work.key}/{SCORES}", json.dumps(report, indent=1, ensure_ascii=False).encode("utf-8"))
    exit_code = entry.exit_code or (EXIT_REGRESSED if any(metric.regressed for metric in metrics) else EXIT_OK)
    return replace(
        entry,
        verdict="green" if exit_code == EXIT_OK else "red",
        exit_code=exit_code,
        documents=len(now.contents),
        records=now.records,
        errors=now.errors,
        against=green.key if green else None,
        metrics=metrics,
    )


def _answered(root: ObjectStore, options: Mapping[str, Any], entry: Entry | None, gold: Gold) -> Answered | None:
    work = _read_work(root, entry.key, entry.date) if entry else None
    return gather(root, options, work.files, gold) if work else None


def _tell(desk: Desk, entry: Entry) -> None:
    """History, trend page, terminal, webhook. LockLostError, and nothing is told, when another evaluation has the root now."""
    schedule, root, console = desk.schedule, desk.root, desk.console
    history = [*(one for one in desk.history if one.key != entry.key), entry]
    desk.hold.check()
    write_entry(root, entry)
    root.put(TREND, render_trend(history, root.uri).encode("utf-8"))
    told = summary(entry)
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    console.print(f"trend: {root.uri_of(TREND)}", markup=False, highlight=False, soft_wrap=True)
    recovered = len(history) > 1 and history[-2].verdict != "green"
    if schedule.webhook and (entry.verdict != "green" or recovered):
        values = {**asdict(entry), "metrics": [asdict(metric) for metric in entry.regressed], "trend": root.uri_of(TREND)}
        failure = post(schedule.webhook, {"text": f"askmany {told}", **values})
        if failure:
            console.print(f"warning: {failure}", markup=False, highlight=False, soft_wrap=True)


def summary(entry: Entry) -> str:
    """An evaluation in a line."""
    counts = f"{entry.documents:,} documents ({entry.asked_documents:,} asked anew), {entry.records:,} records, {entry.errors:,} errors"
    worse = ", ".join(f"{metric.name} {100 * (metric.difference or 0):+.2f}" for metric in entry.regressed)
    told = f"; worse than {entry.against}: {worse}" if worse else ""
    why = f" ({entry.note})" if entry.verdict == "failed" and entry.note else ""
    return f"evaluation {entry.key}: {entry.verdict}{why}, exit code {entry.exit_code}; {counts}{told}"


def checked_date(date: str | None) -> str:
    """Today in UTC, or what was given. ConfigError for one that cannot name a folder."""
    if date is None:
        return datetime.now(UTC).date().isoformat()
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}([T.][A-Za-z0-9.-]{1,20})?", date):
        raise ConfigError(f"--date {date!r}: write it as 2026-01-31, or 2026-01-31T02 where a day has several")
    try:
        day.fromisoformat(date[:10])
    except ValueError as error:
        raise ConfigError(f"--date {date!r}: there is no such day: {error}") from error
    return date
