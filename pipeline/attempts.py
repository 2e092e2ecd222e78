"""Who killed the worker? Marks in the output prefix that survive a process, and the rule that finds a poison document by them.

Before a group is begun a mark is put; a group that was begun and not committed has ended its worker. Its second try runs in parts, each
marked before it begins, its results kept when it ends; a part that ends its worker again is tried document by document. A document that
was in flight at `limit` deaths of a worker is given up; every other one is answered. With n documents, a document charged with d deaths
is tried in parts of n ** ((limit - 1 - d) / (limit - 1)), so the last part holds it alone and `limit` worker processes are the most that
one poison document costs.

Marks belong to one launch of the driver (its epoch): a driver that was killed with its workers charges nobody.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

FOLDER = "attempts"
KEPT = ".parquet"


class MarkStore(Protocol):
    """What marks need of an object store."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes: ...

    def list(self, folder: str) -> dict[str, int]: ...

    def delete(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class History:
    """The tries of a group that ended a worker: for each, the doc_ids in flight at its end, None for the whole group."""

    in_flight: tuple[frozenset[str] | None, ...] = ()

    @property
    def next_attempt(self) -> int:
        return len(self.in_flight) + 1

    def deaths(self, doc_ids: Iterable[str]) -> dict[str, int]:
        """How many worker processes ended while each document was in them."""
        return {doc_id: sum(flying is None or doc_id in flying for flying in self.in_flight) for doc_id in doc_ids}


class Marks:
    """The marks of one group in one launch, in the folder where the kept results of its parts lie too."""

    def __init__(self, store: MarkStore, launch: str, group: str) -> None:
        self._store = store
        self._launch = launch
        self._folder = f"{FOLDER}/{group}"

    def look(self) -> tuple[History, list[str]]:
        """What earlier tries of this launch left, oldest first, and the names of kept results of any launch. One listing."""
        last: dict[int, str] = {}
        kept: list[str] = []
        for name in sorted(self._store.list(self._folder)):
            mark = name.rpartition("/")[2]
            launch, _, rest = mark.partition(".")
            if mark.endswith(KEPT):
                kept.append(name)
            elif launch == self._launch:
                last[int(rest.partition("-")[0])] = name
        return History(tuple(self._in_flight(last[attempt]) for attempt in sorted(last))), kept

    def begin(self, attempt: int) -> None:
        """The whole group is about to be tried."""
        self._store.put(self._name(f"{attempt:04d}"), b"")

    def begin_part(self, attempt: int, part: int, doc_ids: Sequence[str]) -> None:
        """These documents are about to be tried, and no others."""
        self._store.put(self._name(f"{attempt:04d}-{part:06d}"), json.dumps(list(doc_ids)).encode())

    def kept_name(self, attempt: int, part: int) -> str:
        """Where the results of a part are kept until the group is committed."""
        return self._name(f"{attempt:04d}-{part:06d}{KEPT}")

    def clear(self) -> None:
        """Remove all marks and kept results: the group is committed."""
        for name in self._store.list(self._folder):
            self._store.delete(name)

    def forgive(self, attempt: int) -> None:
        """Take this try's marks back: it ends without anybody's fault."""
        for name in self._store.list(self._folder):
            mark = name.rpartition("/")[2]
            if mark.startswith(f"{self._launch}.{attempt:04d}") and not mark.endswith(KEPT):
                self._store.delete(name)

    def _name(self, mark: str) -> str:
        return f"{self._folder}/{self._launch}.{mark}"

    def _in_flight(self, name: str) -> frozenset[str] | None:
        if "-" not in name.rpartition(".")[2]:
            return None
        try:
            return frozenset(json.loads(self._store.get(name)))
        except (OSError, ValueError):
            return None


def cut_suspects(doc_ids: Sequence[str], deaths: Mapping[str, int], limit: int) -> tuple[list[list[str]], list[str]]:
    """Parts to try one after another, the most suspect first, and the documents to give up (`limit` deaths or more).

    With no death at all there is one part, the whole.
    """
    given_up = [doc_id for doc_id in doc_ids if deaths[doc_id] >= limit]
    parts: list[list[str]] = []
    for count in sorted({deaths[doc_id] for doc_id in doc_ids if deaths[doc_id] < limit}, reverse=True):
        suspects = [doc_id for doc_id in doc_ids if deaths[doc_id] == count]
        size = part_size(len(doc_ids), count, limit)
        parts += [suspects[start : start + size] for start in range(0, len(suspects), size)]
    return parts, given_up


def part_size(documents: int, deaths: int, limit: int) -> int:
    """How many documents with this many deaths may be tried together."""
    if deaths == 0 or limit <= 1:
        return documents
    return max(1, round(math.pow(documents, (limit - 1 - deaths) / (limit - 1))))


def unfinished(doc_ids: Iterable[str], done: Collection[str]) -> list[str]:
    """Those that no kept part answers, in order."""
    return [doc_id for doc_id in doc_ids if doc_id not in done]
