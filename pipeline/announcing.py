"""A shard's footer and size, put beside the answers just before the shard itself: a driver that was killed before its ledger told of the
shard is told of it here, so that a resumed run never opens what is finished.

An announcement is a promise, and counts only while an object of exactly that size has the shard's name. It is made only where no object
has that name yet: an object that is there and not trusted must not be vouched for by what was to replace it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from askmany.pipeline.commit import Shard, ShardFooter
from askmany.pipeline.storage import ObjectStore

FOLDER = "announced"


def announcer(store: ObjectStore) -> Callable[[Shard], None]:
    """What a commit calls before its put."""

    def announce(shard: Shard) -> None:
        store.put(name_of(shard.footer.group), json.dumps({"footer": asdict(shard.footer), "bytes": shard.bytes}).encode())

    return announce


def read_announced(store: ObjectStore, group: str) -> Shard | None:
    """What was announced of a group's shard; None where nothing was, or it cannot be read."""
    try:
        values = json.loads(store.get(name_of(group)))
        return Shard(ShardFooter(**values["footer"]), int(values["bytes"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def name_of(group: str) -> str:
    return f"{FOLDER}/{group}.json"
