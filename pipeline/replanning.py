"""A new plan over an output that holds records already: what is unchanged is kept or carried over, only what is new is asked.

A record is unchanged when its document's prompt and its question's cell are (see `cells`), whatever group it lay in. A shard all of whose
records are wanted stays as it is, and so does its group. From any other object the wanted records make a group of their own, with that
object as its source; what no object holds makes ordinary groups. Knows no store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from askmany.engine.fit import Ask
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.cells import Cell, Sets, set_name
from askmany.pipeline.plan import (
    DOCUMENTS,
    PLAIN_DOCUMENTS,
    Plan,
    asked_columns,
    columns_of,
    estimate,
    from_table,
    group_name,
    grouped,
    make_plan,
    plan_columns,
)

Cells = frozenset[Cell]
Part = tuple[int, Cells]  # a document's row in the survey, and what is asked of it
NOTHING: Cells = frozenset()


@dataclass(frozen=True, slots=True)
class Source:
    """An object with records: its name, the plan rows (schema `PLANNED`) that say which, and the group whose shard it is, in place if
    `settled`; None for kept results of a group that was not finished."""

    name: str
    rows: pa.Table
    group: str | None
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Documents that are a group, with what is asked of each; its name if it had one; where its records come from, None where they lie."""

    parts: list[Part]
    group: str | None
    source: str | None


@dataclass(frozen=True, slots=True)
class Replanned:
    """The new plan, and the sources that are no shards of it: `former`."""

    plan: Plan
    former: tuple[Source, ...]


class Wanted:
    """What a run asks now: `documents` (schema `SURVEYED`) and the shared questions with their sizes."""

    def __init__(self, documents: pa.Table, asks: Mapping[Cell, Ask]) -> None:
        self.documents = documents
        self.sets: dict[str, tuple[Cell, ...]] = {}
        self._asks = dict(asks)
        self._shared = frozenset(asks)
        self._prompts = documents.column("prompt").to_numpy()
        self._chunks = documents.column("chunks").to_numpy()
        columns = ("own_questions", "own_identities", "own_tokens", "own_answer_tokens")
        self._own_columns = [_lists(documents.column(name)) for name in columns]
        self._settled = _lists(documents.column("settled"))
        self._usual: dict[Cells, dict[str, Any]] = {}
        self.left = lru_cache(_left)  # a million documents ask one of a few sets, and share what comes of them
        self.union = lru_cache(_union)

    def give_away(self) -> dict[str, pa.ChunkedArray]:
        """What a plan takes of the documents, of which nothing is kept here: the last thing to ask for."""
        columns = columns_of(self.documents)
        self.documents = self.documents.schema.empty_table()
        self._prompts, self._chunks = self._prompts[:0].copy(), self._chunks[:0].copy()
        return columns

    @property
    def all_shared(self) -> Sets:
        """The set of all shared questions, by name."""
        return {set_name(self._asks): tuple(self._asks)}

    def cells(self, at: int) -> Cells:
        """All that is asked of a document."""
        own = self._own(at)
        return self._shared.union(cell for cell, _ in own) if own else self._shared

    def surviving(self, prompt: int, cells: Cells, at: int | None, covered: Sequence[Cells]) -> Cells:
        """Which of the records (`cells`) about a prompt that a plan row promises are wanted from it; its document stands at `at` now."""
        if at is None or self._prompts[at] != prompt:
            return NOTHING
        return self.left(cells, self.cells(at), covered[at])

    def rows(self, parts: Sequence[Part]) -> pa.Table:
        """Plan rows (schema `DOCUMENTS`) of documents, each asked some of its questions."""
        taken = self.documents.select(DOCUMENTS.names).take(pa.array([at for at, _ in parts], pa.int64()))
        values = [self._asking(at, cells) for at, cells in parts]
        for name in _OVERRIDDEN:
            column = pa.array([value[name] for value in values], PLAIN_DOCUMENTS.field(name).type)
            taken = taken.set_column(DOCUMENTS.get_field_index(name), DOCUMENTS.field(name), column.cast(DOCUMENTS.field(name).type))
        return taken.cast(DOCUMENTS).combine_chunks()

    def _asking(self, at: int, cells: Cells) -> dict[str, Any]:
        """The columns of one row that depend on what is asked; one object for all documents of one chunk without anything of their own."""
        if self._chunks[at] > 1 or at in self._settled or at in self._own_columns[0]:
            return self._counted(at, cells)
        if cells not in self._usual:
            self._usual[cells] = self._counted(at, cells)
        return self._usual[cells]

    def _counted(self, at: int, cells: Cells) -> dict[str, Any]:
        shared = tuple(cell for cell in self._asks if cell in cells)
        own = [(cell, ask) for cell, ask in self._own(at) if cell in cells]
        chunks, settled = int(self._chunks[at]), Counter(self._settled.get(at, ()))
        live = [(ask, chunks - settled[cell[0]]) for cell, ask in [*((cell, self._asks[cell]) for cell in shared), *own]]
        name = set_name(shared)
        self.sets[name] = shared
        return {
            "questions": len(live),
            "question_tokens": sum(ask.question_tokens * count for ask, count in live),
            "answer_tokens": sum(ask.answer_tokens * count for ask, count in live),
            "answerable": sum(count for _, count in live),
            "shared": name,
            "own_questions": [cell[0] for cell, _ in own] or None,
            "own_identities": [cell[1] for cell, _ in own] or None,
        }

    def _own(self, at: int) -> list[tuple[Cell, Ask]]:
        if at not in self._own_columns[0]:
            return []
        values = zip(*(column[at] for column in self._own_columns), strict=True)
        return [((question_id, identity), Ask(tokens, answer)) for question_id, identity, tokens, answer in values]


_OVERRIDDEN = ("questions", "question_tokens", "answer_tokens", "answerable", "shared", "own_questions", "own_identities")


def replan(wanted: Wanted, sources: Sequence[Source], sets: Sets, speed: float, costs: CostModel, limits: GroupLimits) -> Replanned:
    """The plan that asks what is `wanted` and no source holds. Of several sources of one record the first gives it."""
    if not sources:
        return Replanned(plan_columns(wanted.give_away(), speed, costs, limits, wanted.all_shared), ())
    covered: list[Cells] = [NOTHING] * wanted.documents.num_rows
    shared = {name: frozenset(cells) for name, cells in sets.items()}
    pieces: list[Piece] = []
    former = []
    for source, ats in zip(sources, _places(wanted.documents, sources), strict=True):
        parts: list[Part] = []
        whole = True
        for _, prompt, name, own, identities, at in zip(*asked_columns(source.rows), ats, strict=True):
            promised = shared[name].union(zip(own, identities, strict=True)) if own else shared[name]
            cells = wanted.surviving(prompt, promised, at, covered)
            whole = whole and len(cells) == len(promised)
            if cells and at is not None:
                covered[at] = wanted.union(covered[at], cells)
                parts.append((at, cells))
        if not (whole and source.settled):
            former.append(source)
        if parts:
            pieces.append(Piece(parts, source.group if whole else None, None if whole and source.settled else source.name))
    fresh = make_plan(wanted.rows(list(_missing(wanted, covered))), speed, costs, limits)
    return Replanned(_joined(wanted, pieces, fresh, costs), tuple(former))


def _missing(wanted: Wanted, covered: Sequence[Cells]) -> Iterator[Part]:
    for at, cells in enumerate(covered):
        asked = wanted.cells(at)
        if left := wanted.left(asked, asked, cells):
            yield at, left


def _joined(wanted: Wanted, pieces: Sequence[Piece], fresh: Plan, costs: CostModel) -> Plan:
    """One plan: what is there first, then what is new. A document is counted in its last row."""
    held = wanted.rows([part for piece in pieces for part in piece.parts])
    sizes = [len(piece.parts) for piece in pieces]
    ends = list(accumulate(sizes))
    names = [piece.group or group_name(held.slice(end - size, size)) for piece, size, end in zip(pieces, sizes, ends, strict=True)]
    documents = pa.concat_tables([held, fresh.table.select(DOCUMENTS.names)]).unify_dictionaries()
    names += [group.name for group in fresh.groups]
    sizes += [group.stop - group.start for group in fresh.groups]
    given = [piece.source for piece in pieces] + [None] * len(fresh.groups)
    table = grouped(documents.combine_chunks(), estimate(documents, costs), names, np.array(sizes, dtype=np.int64), given)
    codes = pc.index_in(table.column("doc_id"), value_set=wanted.documents.column("doc_id").combine_chunks()).to_numpy()
    home = np.zeros(len(codes), dtype=bool)
    home[len(codes) - 1 - np.unique(codes[::-1], return_index=True)[1]] = True
    table = table.set_column(table.schema.get_field_index("home"), table.schema.field("home"), pa.array(home))
    return from_table(table, wanted.sets)


def _places(documents: pa.Table, sources: Sequence[Source]) -> list[list[int | None]]:
    """For each source, where each of its documents stands in the survey; None where it is gone."""
    ids = [source.rows.column("doc_id") for source in sources]
    if not ids:
        return []
    known = documents.column("doc_id").combine_chunks()
    found = pc.index_in(pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string()), value_set=known)
    places: list[int | None] = found.to_pylist()
    stops = list(accumulate(len(column) for column in ids))
    return [places[stop - len(column) : stop] for column, stop in zip(ids, stops, strict=True)]


def _lists(column: pa.ChunkedArray) -> dict[int, Sequence[Any]]:
    """The lists that are there, by row."""
    if column.null_count == len(column):
        return {}
    rows = np.flatnonzero(column.is_valid().to_numpy()).tolist()
    return dict(zip(rows, column.drop_null().to_pylist(), strict=True))


def _left(cells: Cells, wanted: Cells, covered: Cells) -> Cells:
    return (cells & wanted) - covered


def _union(one: Cells, other: Cells) -> Cells:
    return one | other
