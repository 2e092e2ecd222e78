"""`askmany evaluate CONFIG.yaml`: an evaluation on a schedule, once. What a scheduler starts each night, and whose exit code it goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from askmany.pipeline.config_file import load_config
from askmany.pipeline.eval_schedule import Schedule, Since, evaluate
from askmany.pipeline.lock import IfRunning


@dataclass(frozen=True, slots=True)
class Options:
    """See the command's help."""

    date: str | None = None
    since: Since = "all"
    gold: str | None = None
    webhook: str | None = None
    smallest_drop: float = 0.0
    if_running: IfRunning = "fail"


def is_schedule(task: str) -> bool:
    """Whether what was named is a configuration and no task."""
    return Path(task).suffix in (".yaml", ".yml")


def main(config: str, overrides: Sequence[str], how: Options, console: Console) -> int:
    """Evaluate; the exit code is the evaluation's: 0 green, 5 worse than the last green one, otherwise a run's."""
    schedule = Schedule(load_config(config, overrides), how.date, how.since, how.gold, how.webhook, how.smallest_drop, how.if_running)
    return evaluate(schedule, console).exit_code
