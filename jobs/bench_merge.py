"""Several engine benchmarks' records as one: python -m askmany.jobs.bench_engine merge FILES --out jobs/measurements/engine-h200.json

A row (a cell under one layout, model and setup) that is measured again takes the place of the former one; rows of the output that no file
measures again stay. Of one commit, other passes of a row are pooled with it, and no row gives way to one with fewer pairs; where rows of
one commit are not pooled, why is said on stderr. What a call was made with (versions, commit, notes, seconds) stays with the rows under
`sources`. All rows come from one kind of GPU. `--readme` writes the README's table, `--plots` the plots, from the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from askmany.jobs.bench_cells import suites
from askmany.jobs.bench_model import fits
from askmany.jobs.bench_ratios import geometric_mean, means, summary
from askmany.jobs.bench_variants import label
from askmany.jobs.step_floor import apart

OF_CELL = ("work", "documents", "document_tokens", "questions", "question_tokens", "new_tokens", "spread", "cap", "cached")
GROUP = ("work", "model", "layout", "setup_label")
KEPT = ("model", "setup", "environment", "notes", "starts_s", "seeds", "passes", "first_pass", "close")  # of a record, with its rows

Row = dict[str, Any]
Record = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Merge, write, and make what is made from it."""
    parser = argparse.ArgumentParser(prog="bench_engine merge", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="none: only make anew what is made from --out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readme", type=Path, help="write its table")
    parser.add_argument("--plots", type=Path, help="folder for plots")
    options = parser.parse_args(arguments)
    held = json.loads(options.out.read_text()) if options.out.exists() else None
    try:
        made = merged(held, [(file.stem, json.loads(file.read_text())) for file in options.files])
    except ValueError as error:
        print(f"bench_engine merge: {error}")
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{options.out}: {len(made['table'])} rows of {len(made['sources'])} calls on {made['gpu']}")
    if options.readme:
        from askmany.jobs.tables_engine import write

        write(options.readme, made)
    if options.plots:
        from askmany.jobs.bench_plots import plot

        for file in plot(made, options.plots):
            print(file)
    return 0


def merged(held: Record | None, records: Iterable[tuple[str, Record]]) -> Record:
    """`held` (a former result) with the rows of `records`, each with its file's name. ValueError naming the file that does not fit."""
    table = {key_of(row): row for row in (held or {}).get("table", [])}
    between = {key_of(row): row for row in (held or {}).get("between", [])}
    sources = dict((held or {}).get("sources", {}))
    for name, record in records:
        _check(name, record)
        source = f"{name}-{hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]}"
        sources[source] = {"file": name} | {key: record.get(key) for key in KEPT} | {"model": _model(record)}
        for rows, into in ((_rows(name, record), table), (record.get("between", []), between)):
            for row in (_labelled(row, record, source) for row in rows):
                held_row = into.get(key_of(row))
                into[key_of(row)] = row if held_row is None else joined(held_row, row, sources)
    used = {source for row in (*table.values(), *between.values()) for source in _sources(row)}
    sources = {name: source for name, source in sources.items() if name in used}
    gpus = sorted({source["environment"]["gpu"] for source in sources.values()})
    if len(gpus) != 1:
        raise ValueError(f"rows of one table come from one kind of GPU, these from {', '.join(gpus) or 'none'}")
    rows = sorted(table.values(), key=_order)
    compared, _ = apart(rows)
    return {
        "gpu": gpus[0], "table": rows, "means": means(compared, GROUP), "between": sorted(between.values(), key=_order),
        "fits": fits(compared), "sources": sources,
    }  # fmt: skip


def key_of(row: Row) -> tuple[Any, ...]:
    """What makes two rows the same measurement."""
    return (*(row[name] for name in OF_CELL), row["model"], row["layout"], row["setup_label"], row.get("against", ""))


def joined(held: Row, row: Row, sources: dict[str, Any]) -> Row:
    """What becomes of a row that is measured again. An unknown commit is no one's."""
    if row["commit"] != held["commit"] or not row["commit"]:
        return row
    if row["source"] in _sources(held):
        return held
    reason = _apart(held, row, sources)
    if not reason:
        return _pooled(held, row)
    fewer = len(row["ratios"]) < len(held["ratios"])
    cell = ", ".join(str(row[name]) for name in ("work", "model", "layout", "document_tokens", "documents", "questions", "new_tokens"))
    said = f"{len(row['ratios'])} pairs of {row['source']} {'do not replace' if fewer else 'replace'} {len(held['ratios'])}"
    print(f"{cell}: {said} of {held['source']}, the same commit; not pooled: {reason}", file=sys.stderr)
    return held if fewer else row


def _apart(held: Row, row: Row, sources: dict[str, Any]) -> str:
    """Why two rows of one key and commit are no measurement in common; empty where they are one."""
    if not ("pairs" in held and "pairs" in row):
        return "a row does not name its passes"
    if shared := {number for number, _ in held["pairs"]} & {number for number, _ in row["pairs"]}:
        return f"both have pass {', '.join(map(str, sorted(shared)))}"
    if row.get("best_stock") != held.get("best_stock"):
        return f"best stock {row.get('best_stock')} and {held.get('best_stock')}"
    former, latter = (sources[own["source"]]["environment"]["versions"] for own in (held, row))
    return "" if former == latter and row["setup"] == held["setup"] else "other versions or another setup"


def _pooled(held: Row, row: Row) -> Row:
    """Both rows' pairs as one row, which names the sources of both. Seconds are the geometric mean over pairs, as each row's are."""
    found = sorted(zip(held["pairs"] + row["pairs"], held["ratios"] + row["ratios"], strict=True))
    both = summary([ratio for _, ratio in found]) | {"pairs": [pair for pair, _ in found], "pooled_with": _sources(held)}
    counts = len(held["ratios"]), len(row["ratios"])

    def mean(former: float, latter: float) -> float:
        return geometric_mean([former] * counts[0] + [latter] * counts[1])

    both |= {name: mean(held[name], row[name]) for name in ("ours_s", "stock_s") if name in row}
    if "stock_all_s" in row:
        former, latter = held["stock_all_s"], row["stock_all_s"]
        both["stock_all_s"] = former | latter | {name: mean(former[name], latter[name]) for name in former.keys() & latter.keys()}
    return row | both


def _sources(row: Row) -> list[str]:
    """The calls that a row was measured in."""
    return [*row.get("pooled_with", ()), row["source"]]


def work_order(work: str) -> int:
    """Where the suites have it; works of no suite come last."""
    known = list(dict.fromkeys(cell.work for cells in suites().values() for cell in cells))
    return known.index(work) if work in known else len(known)


def _check(name: str, record: Record) -> None:
    missing = {"table", "seconds", "cells", "environment"} - record.keys()
    if missing:
        raise ValueError(f"{name} is no record of `bench_engine gpu`: it lacks {', '.join(sorted(missing))}")
    if record.get("scouting"):
        raise ValueError(f"{name} is a scouting pass: one seed, no ratios")


def _model(record: Record) -> str:
    return str(record.get("model") or record["shape"])


def _labelled(row: Row, record: Record, source: str) -> Row:
    """The row with what tells it from rows of other calls."""
    known = {"model": _model(record), "setup": record.get("setup") or {}} | row
    return known | {"setup_label": label(known), "source": source, "commit": record["environment"]["commit"]}


def _rows(name: str, record: Record) -> list[Row]:
    """Rows with the ratio of each seed and pass; where a record has none, from its seconds, which lie in one order."""
    found = []
    for row in record["table"]:
        if "ratios" not in row:
            index = str(record["cells"].index({key: row[key] for key in OF_CELL}))
            theirs, ours = (record["seconds"][contender][index] for contender in (row["best_stock"], row["layout"]))
            if len(theirs) != len(ours):
                raise ValueError(f"{name}: {len(theirs)} and {len(ours)} timings of cell {index} cannot be paired")
            row = row | {"ratios": [a / b for a, b in zip(theirs, ours, strict=True)]}
        found.append(row)
    return found


def _order(row: Row) -> tuple[Any, ...]:
    sizes = (row["document_tokens"], row["documents"], row["questions"], row["new_tokens"])
    return (work_order(row["work"]), row["model"], *sizes, row["layout"], row["setup_label"])
