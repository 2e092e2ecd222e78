"""`askmany doctor CONFIG`: can this machine and a worker use the places that a run needs? Each operation, its time, and who asked."""

from __future__ import annotations

from rich.console import Console

from askmany.pipeline.config import RunConfig
from askmany.pipeline.preflight import Check, check_input, check_on_a_worker, check_output, here, require
from askmany.pipeline.runtime import cluster


def main(config: RunConfig, console: Console, worker: bool = True) -> int:
    """Try everything, print a line each. Raises PreflightError for the first failure."""
    source, output = config.input, config.output
    checks = [*check_input(source.uris, source.storage_options, here()), *check_output(output.uri, output.storage_options, here())]
    _print(console, checks)
    require(checks)
    if worker:
        with cluster(config.workers):
            checks = check_on_a_worker(source.uris, source.storage_options, output.uri, output.storage_options)
        _print(console, checks)
        require(checks)
    console.print("all places can be used", highlight=False)
    return 0


def _print(console: Console, checks: list[Check]) -> None:
    for check in checks:
        said = "ok" if check.ok else f"FAILED: {check.error}"
        line = f"{check.place}, {check.identity}: {check.operation} {check.uri}: {said} ({check.seconds:.2f} s)"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
