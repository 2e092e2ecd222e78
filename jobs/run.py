"""`askmany run`, also `python -m askmany.jobs.run CONFIG`: a run in the terminal, and errors as one line with their exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from askmany.engine.errors import AskmanyError, ConfigError
from askmany.pipeline.config_file import load_config
from askmany.pipeline.interrupt import interrupts_as_exceptions
from askmany.pipeline.lock import IfRunning
from askmany.pipeline.result import EXIT_CONFIG, EXIT_INTERNAL, EXIT_INTERRUPTED
from askmany.pipeline.run import run


def main(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    dry_run: bool = False,
    quiet: bool = False,
    if_running: IfRunning = "fail",
    retry_errors: bool = False,
) -> int:
    """Run a configuration and return the exit code."""
    console = Console(quiet=quiet)
    how: dict[str, Any] = {"dry_run": dry_run, "if_running": if_running, "retry_errors": retry_errors}
    return guarded(lambda: run(load_config(config, overrides), console=console, **how).exit_code)


def guarded(action: Callable[[], int]) -> int:
    """The action's exit code, or that of the error it ended in, which is one line on stderr. A path that leads through a file is bad
    input; every other failure of a disk or a store, such as one that is full, is none."""
    try:
        with interrupts_as_exceptions():
            return action()
    except (ConfigError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        return _fail(str(error), EXIT_CONFIG)
    except (AskmanyError, OSError) as error:
        return _fail(str(error), EXIT_INTERNAL)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing is lost, run the same command again", EXIT_INTERRUPTED)


def _fail(message: str, code: int) -> int:
    print(f"askmany: {' '.join(message.split())}", file=sys.stderr)
    return code


def overrides(
    sets: Sequence[str],
    *,
    model: str | None = None,
    output: str | None = None,
    limit: int | None = None,
    strict: bool = False,
    sort: bool = False,
) -> list[str]:
    """Command-line options as `section.key=value` overrides, `--set` ones last."""
    options = {"model": model, "output.uri": output, "input.limit": limit, "input.strict": strict or None}
    options["output.sort"] = sort or None
    return [*(f"{key}={_quoted(value)}" for key, value in options.items() if value is not None), *sets]


def _quoted(value: object) -> str:
    """As YAML that means the value itself, whatever characters a path holds."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value).lower()


if __name__ == "__main__":
    from askmany.jobs.cli import app

    app(["run", *sys.argv[1:]])
