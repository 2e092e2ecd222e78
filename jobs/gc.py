"""`askmany gc OUT`: remove what no answer needs: shards of older plans, marks and kept parts of finished groups, unfinished writes, probes.

Nothing is removed while a run holds the output. What the manifest names, and whatever a resumed run could use, stays. Records that an edit
of questions or documents put out of the answers are removed for good.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.pipeline.announcing import FOLDER as ANNOUNCED
from askmany.pipeline.attempts import FOLDER as ATTEMPTS
from askmany.pipeline.attempts import KEPT
from askmany.pipeline.carrying import FORMER, FORMER_PLAN, place
from askmany.pipeline.commit import ANSWERS, MANIFEST, read_manifest, shard_name
from askmany.pipeline.lock import FOLDER as LOCK
from askmany.pipeline.lock import RunLock, newest_lease
from askmany.pipeline.preflight import PROBE
from askmany.pipeline.resume import read_plan
from askmany.pipeline.storage import UNFINISHED, ObjectStore
from askmany.pipeline.summary import size


def main(store: ObjectStore, console: Console, dry_run: bool = False) -> int:
    """Remove, or with `dry_run` list, what is not needed. ConfigError when a run holds the output, or there is none."""
    lease = newest_lease(store)
    if lease is not None and RunLock(store).is_held(lease):
        raise ConfigError(f"{store.uri}: {lease.holder()} is running there; nothing is removed meanwhile")
    objects = store.find("")
    unneeded = {name: objects[name] for name in _unneeded(store, objects)}
    for name in unneeded:
        if not dry_run:
            store.delete(name)
        console.print(store.uri_of(name), highlight=False, markup=False, soft_wrap=True)
    verb = "could be removed" if dry_run else "removed"
    console.print(f"{len(unneeded):,} objects {verb}, {size(sum(unneeded.values()))}", highlight=False, markup=False)
    return 0


def _unneeded(store: ObjectStore, objects: dict[str, int]) -> Iterator[str]:
    manifest = read_manifest(store) if MANIFEST in objects else None
    plan = read_plan(store)
    if plan is None:
        raise ConfigError(f"{store.uri}: no plan there; is it the output of a run?")
    planned = {shard_name(group.name): group for group in plan[0].groups}
    named = set(manifest.shards) if manifest is not None else set()
    complete = manifest is not None and manifest.complete and named == set(planned)
    sources = {group.source for name, group in planned.items() if name not in objects}
    needed = {place(source, objects) for source in sources if source is not None}
    newest = newest_lease(store)
    for name in objects:
        folder, _, base = name.rpartition("/")
        if base.startswith((UNFINISHED, PROBE)):
            yield name
        elif name in needed:
            continue
        elif folder == ANSWERS and base.endswith(".parquet"):
            if name not in named and (complete or name not in planned):
                yield name
        elif name.startswith(f"{ATTEMPTS}/"):
            group = name.split("/")[1]
            if complete or shard_name(group) not in planned or not name.endswith(KEPT):
                yield name
        elif folder == ANNOUNCED:
            if complete or shard_name(base.removesuffix(".json")) not in planned:
                yield name
        elif folder == FORMER or (name == FORMER_PLAN and not needed) or (folder == LOCK and newest is not None and name < newest.name):
            yield name
