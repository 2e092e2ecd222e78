"""A run in a process of its own, so that a test can kill it: `python -m tests.helpers.child_run SPEC.json`.

SPEC holds `config` (a run's mapping), `engine` (how the fake engine of the workers shall fail) and optionally `pause_s`, a wait inside
every step so that there is time to kill. The last line of stdout is the result as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from askmany.engine.engine import Engine
from askmany.engine.fake import fake_engine
from askmany.engine.request import Document, StreamResult
from askmany.pipeline.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Trouble:
    """How an engine fails. `abort` and `hang` name documents; `once` is a file whose presence says that it has failed already;
    `log` is a folder where each process leaves a file for each document that it took in."""

    abort: tuple[str, ...] = ()
    hang: tuple[str, ...] = ()
    once: str = ""
    log: str = ""
    pause_s: float = 0.0


class TroubledEngine:
    """The fake engine, with trouble by doc_id."""

    def __init__(self, inner: Engine, trouble: Trouble) -> None:
        self._inner = inner
        self._trouble = trouble
        self._live: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, document: Document) -> None:
        doc_id = document.key.rpartition("/")[2]
        self._inner.submit(document)
        self._live.add(doc_id)
        if self._trouble.log:
            Path(self._trouble.log, f"{doc_id}-{os.getpid()}").touch()

    def step(self) -> list[StreamResult]:
        if self._trouble.pause_s:
            time.sleep(self._trouble.pause_s)
        if self._live & set(self._trouble.abort):
            os.abort()
        if self._live & set(self._trouble.hang) and not (self._trouble.once and os.path.exists(self._trouble.once)):
            if self._trouble.once:
                Path(self._trouble.once).touch()
            time.sleep(3600)
        return self._inner.step()


@dataclass(frozen=True)
class BuildTroubled:
    """Builds the troubled engine on a worker."""

    trouble: Trouble

    def __call__(self, config: RunConfig) -> Any:
        return TroubledEngine(fake_engine(config.engine, kv_tokens=1 << 16), self.trouble)


def start(folder: Path, config: Mapping[str, Any], trouble: Trouble | None = None, **how: Any) -> subprocess.Popen[str]:
    """Start a run; its output goes to `folder`/run.log. Ends with the process that started it only if that kills it."""
    spec = folder / f"spec-{random.randrange(1 << 40):x}.json"
    spec.write_text(json.dumps({"config": config, "trouble": asdict(trouble or Trouble()), "how": how}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.child_run", str(spec)]
    with open(folder / "run.log", "a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)


def result_of(process: subprocess.Popen[str], limit_s: float = 240.0) -> dict[str, Any]:
    """The result that the process printed; its `exit_code` is the one of the command line. AssertionError when it printed none."""
    out, _ = process.communicate(timeout=limit_s)
    lines = out.strip().splitlines()
    assert lines, f"the run ended with {process.returncode} and no result"
    values: dict[str, Any] = json.loads(lines[-1])
    return values


def run_child(
    folder: Path, config: Mapping[str, Any], trouble: Trouble | None = None, limit_s: float = 240.0, **how: Any
) -> dict[str, Any]:
    return result_of(start(folder, config, trouble, **how), limit_s)


def run_here(config: Mapping[str, Any], trouble: Trouble | None = None, **how: Any) -> dict[str, Any]:
    """The same in this process, whose Ray it uses: for a driver that nothing happens to."""
    from askmany.engine.errors import AskmanyError, ConfigError
    from askmany.pipeline.run import run

    began = time.monotonic()
    try:
        result = run(config, build_engine=BuildTroubled(trouble or Trouble()), **how)
        values = {"exit_code": result.exit_code, "state": result.state, "records": result.records, "statuses": dict(result.statuses)}
        values |= {"usage": dict(result.usage), "launch_records": result.launch_records}
    except AskmanyError as error:
        values = {"exit_code": 2 if isinstance(error, ConfigError) else 1, "error": str(error), "type": type(error).__name__}
    return {**values, "seconds": time.monotonic() - began}


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the driver alone; its workers end because Ray sees it gone."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


def watch(folder: Path) -> Any:
    """Keep what a person and a Prometheus server see: the terminal's text in `console.txt`, the last scrape in `scrape.txt`."""
    from urllib.request import urlopen

    from rich.console import Console

    from askmany.pipeline import recording

    serve = recording.serve

    def served(totals: Any, host: str, port: int) -> Any:
        stop = serve(totals, host, port)

        def scrape_and_stop() -> None:
            (folder / "scrape.txt").write_bytes(urlopen(f"http://{host}:{port}/metrics", timeout=30).read())
            stop()

        return scrape_and_stop

    recording.serve = served
    return Console(file=open(folder / "console.txt", "w", buffering=1), width=200)


def main(spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    trouble = Trouble(**{key: tuple(value) if isinstance(value, list) else value for key, value in spec["trouble"].items()})
    how = dict(spec["how"])
    if "watched" in how:
        how["console"] = watch(Path(how.pop("watched")))
    print(json.dumps(run_here(spec["config"], trouble, **how)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
