"""How often a group was begun: a mark in the output prefix before each try, so that a group that kills its worker is not tried for ever.

Marks belong to one launch of the driver: a run that was interrupted and resumed starts counting anew.
"""

from __future__ import annotations

from askmany.pipeline.storage import ObjectStore

FOLDER = "attempts"


def begin(store: ObjectStore, launch: str, group: str, limit: int) -> int | None:
    """Mark the next try of a group and return its number, from 1; None when `limit` tries were begun and none was committed."""
    for attempt in range(1, limit + 1):
        name = f"{FOLDER}/{launch}/{group}-{attempt}"
        if not store.exists(name):
            store.put(name, b"")
            return attempt
    return None
