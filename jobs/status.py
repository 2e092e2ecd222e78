"""`askmany status OUT`: where a run stands, from the output alone, with no cluster up. With --verify, every shard is read and checked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.pipeline.commit import MANIFEST, Manifest, list_shards, read_manifest, verify
from askmany.pipeline.heartbeat import RunStatus, read_status
from askmany.pipeline.lock import RunLock, newest_lease
from askmany.pipeline.progress import duration
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.summary import statuses

EXIT_SILENT = 4


def main(store: ObjectStore, console: Console, as_json: bool = False, check: bool = False) -> int:
    """Print the state. Exit code 0; 4 when a run that should be alive is silent (it can be resumed); 1 when a shard is harmed."""
    status = read_status(store)
    manifest = read_manifest(store) if store.exists(MANIFEST) else None
    silent = status.is_silent(time.time())
    harmed = dict(_harmed(store, manifest)) if check else {}
    if as_json:
        values = {**asdict(status), "silent": silent, "complete": bool(manifest and manifest.complete), "harmed": harmed}
        console.print_json(json.dumps(values))
    else:
        for line in _lines(store, status, manifest, silent, harmed):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 1 if harmed else EXIT_SILENT if silent else 0


def _lines(store: ObjectStore, status: RunStatus, manifest: Manifest | None, silent: bool, harmed: dict[str, str]) -> Iterator[str]:
    now = time.time()
    state = f"silent for {duration(now - status.updated_at)}, last known {status.state}" if silent else status.state
    yield f"{store.uri}: {state} (run {status.run_id}, process {status.pid} on {status.host})"
    share = status.done / status.planned if status.planned else 1.0
    documents = f"{status.documents_done:,} of {status.documents:,} documents"
    yield f"{status.done:,} of {status.planned:,} records ({min(share, 1.0):.1%}), {documents}"
    if status.statuses:
        yield f"statuses: {statuses(status.statuses)}"
    yield f"{status.workers:,} workers, {status.restarts:,} groups done at a later try, {status.io_retries:,} I/O retries"
    if status.eta_s is not None and not silent:
        yield f"about {duration(status.eta_s)} left"
    if status.message:
        yield status.message
    lease = newest_lease(store)
    if lease is not None and RunLock(store).is_held(lease):
        yield f"locked by {lease.holder()} for another {duration(max(lease.expires_at - now, 0))}"
    elif silent or (manifest is not None and not manifest.complete):
        yield f"not locked: `askmany resume {store.uri}` goes on with it"
    for name, what in harmed.items():
        yield f"{store.uri_of(name)}: {what}"


def _harmed(store: ObjectStore, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    names = manifest.shards if manifest is not None else list_shards(store)
    for name in sorted(names):
        what = verify(store, name)
        if what:
            yield name, what


def report(store: ObjectStore, to: str | None, console: Console) -> int:
    """Write report.html anew, into the output or to a local file. ConfigError when there is no run."""
    from askmany.pipeline.report import REPORT, render
    from askmany.pipeline.reporting import gather

    page = render(gather(store)).encode("utf-8")
    if to is None:
        store.put(REPORT, page)
    else:
        try:
            with open(to, "wb") as file:
                file.write(page)
        except OSError as error:
            raise ConfigError(f"--to {to}: cannot be written: {error}") from error
    console.print(to or store.uri_of(REPORT), highlight=False, markup=False, soft_wrap=True)
    return 0
