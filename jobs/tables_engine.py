"""The README's engine table from the merged benchmark: python -m askmany.jobs.tables_engine README.md jobs/measurements/engine-h200.json

Replaces what stands between `<!-- engine -->` and `<!-- /engine -->`: the mean of each work, model and layout beside what was published of
the interleaved method, every loss by name (`split` and the interleaved modes apart), decode steps beside their floors, and all cells.
Without the file it says that nothing was measured. `--check` only compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from askmany.jobs.bench_merge import work_order
from askmany.jobs.bench_variants import shown
from askmany.jobs.markers import between, options_of, put
from askmany.jobs.step_floor import apart

NOT_MEASURED = "Not measured yet."
PUBLISHED = {
    ("grid", "codellama-7b"): "3.7x (A100), 5.9x (A6000)",
    ("grid", "qwen2.5-7b"): "1.32x",
    ("grid", "qwen2.5-1.5b"): "1.28x",
    ("long answers", "codellama-7b"): "1.9x",
    ("LooGLE-shaped", "qwen2.5-7b"): "0.79x",
    ("QuALITY-shaped", "qwen2.5-7b"): "1.81x",
}  # of arXiv 2611.15130, over the serving engine that it was built into
PRODUCT = "split"
PUBLISHED_WORST = "worst cell 0.93x"
PUBLISHED_CONTINUOUS = "1.22x"  # of mixed lengths: interleaved continuous over interleaved run-to-completion
AGAINST = {"run-to-completion": "interleaved, run-to-completion"}  # as contenders are called, and here

Row = Mapping[str, Any]


def markdown(record: Mapping[str, Any] | None) -> str:
    """What stands between the markers."""
    if record is None or not record["table"]:
        return NOT_MEASURED
    rows, floors = apart(record["table"])
    parts = [_head(record)]
    if rows:
        parts += [_means(record["means"]), *filter(None, [_losses(rows)])]
    if floors:
        parts.append(_floors(floors))
    if record["between"]:
        parts.append(_between(record["between"]))
    if record["fits"]:
        parts.append(_fits(record["fits"]))
    return "\n\n".join([*parts, _details(rows)] if rows else parts)


def write(readme: Path, record: Mapping[str, Any] | None) -> None:
    readme.write_text(between(readme.read_text(), "engine", markdown(record)))


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    record = json.loads(options.measurements.read_text()) if options.measurements.exists() else None
    return put(options, "engine", markdown(record))


def _head(record: Mapping[str, Any]) -> str:
    """The machine, the versions, and the commits that were measured."""
    environments = [source["environment"] for source in record["sources"].values()]
    versions = dict.fromkeys(", ".join(f"{n} {v}" for n, v in found["versions"].items() if v) for found in environments)
    commits = dict.fromkeys(f"{found['commit'][:12] or 'unknown'} ({found['date']})" for found in environments)
    return f"{record['gpu']}; {'; '.join(versions)}; commit {', '.join(commits)}."


def _table(names: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    names = list(names)
    return "\n".join([_line(names), "|---" * len(names) + "|", *map(_line, lines)])


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def _means(means: Iterable[Row]) -> str:
    names = ("work", "model shape", "layout", "cells", "times the best stock (geometric mean)", "95 %", "worst cell", "published")
    ordered = sorted(means, key=lambda row: (work_order(row["work"]), row["model"], row["layout"], row["setup_label"]))
    return _table(names, (_mean(row) for row in ordered))


def _mean(row: Row) -> Iterable[str]:
    worst = row["worst"]
    published = PUBLISHED_WORST if row["work"] == "worst" else PUBLISHED.get((row["work"], row["model"]), "-")
    slowest = f"{worst['ratio']:.2f}x ({_sizes(worst)})"
    return row["work"], row["model"], shown(row), str(row["cells"]), f"{row['ratio']:.2f}x", _interval(row), slowest, published


def _losses(rows: Sequence[Row]) -> str:
    """Cells whose ratio is under 1, by name: those of the product, then those of the modes that it is held against."""
    own = [row for row in rows if row["layout"] == PRODUCT]
    others = [row for row in rows if row["layout"] != PRODUCT]
    lists = [_lost(f"`{PRODUCT}`", own)] if own else []
    if any(row["ratio"] < 1 for row in others):
        lists.append(_lost("Interleaved modes", others))
    return "\n\n".join(lists)


def _lost(whose: str, rows: Sequence[Row]) -> str:
    """Those whose whole interval is under 1 are marked."""
    lost = sorted((row for row in rows if row["ratio"] < 1), key=lambda row: row["ratio"])
    if not lost:
        return f"{whose}: no cell of {len(rows)} is slower than the best stock backend."
    names = (
        f"- {row['work']}, {row['model']}, {shown(row)}, {_sizes(row)}: {row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f})"
        f"{', the whole interval' if row['high'] < 1 else ''}"
        for row in lost
    )
    return "\n".join([f"{whose}: slower than the best stock backend in {len(lost)} of {len(rows)} cells:", "", *names])


def _between(rows: Iterable[Row]) -> str:
    names = ("work", "model shape", "layout", "against", "sizes", "ratio", "95 %", "published")
    lines = ((r["work"], r["model"], shown(r), _against(r), _sizes(r), f"{r['ratio']:.2f}x", _interval(r), _continuous(r)) for r in rows)
    return "This engine's layouts and setups against each other:\n\n" + _table(names, lines)


def _against(row: Row) -> str:
    return AGAINST.get(row["against"], str(row["against"]))


def _continuous(row: Row) -> str:
    same = row["layout"] == "interleaved" and row["work"] == "mixed lengths" and row["against"] in AGAINST
    return PUBLISHED_CONTINUOUS if same else "-"


def _floors(rows: Sequence[Row]) -> str:
    """Rows of `bench_floor`, whose ratio is the better the less it is."""
    names = ("model shape", "layout", "document", "rows", "ms a step", "floor ms", "step over floor", "of all runs", "GPU idle")
    lines = (
        (
            r["model"], shown(r), f"{r['document_tokens']:,}", str(r["questions"]), f"{r['ours_s'] * 1e3:.2f}",
            f"{r['stock_s'] * 1e3:.2f}", f"{r['ratio']:.2f}", f"{r['low']:.2f} to {r['high']:.2f}",
            "-" if r["idle_ratio"] is None else f"{r['idle_ratio']:.1%}",
        )
        for r in rows
    )  # fmt: skip
    peaks = sorted({f"{r['bytes_per_s'] / 1e12:.3g} TB/s and {r['flop_per_s'] / 1e12:.3g} TFLOP/s" for r in rows})
    words = (
        f"A decode step against its floor (of each operation bytes or FLOPs, whichever take longer, at {', '.join(peaks)}), host included"
    )
    return f"{words}:\n\n{_table(names, lines)}"


def _fits(fits: Iterable[Row]) -> str:
    names = (
        "work",
        "model shape",
        "layout",
        "document",
        "new tokens",
        "a step: ms",
        "+ ms a request",
        "+ us a stream",
        "+ ns a pair",
        "R2",
        "best P",
    )
    lines = (
        (
            f["work"], f["model"], shown(f), f"{f['document_tokens']:,}", str(f["new_tokens"]), f"{f['start_s'] * 1e3:.2f}",
            _part(f["document_s"], 1e3), _part(f["each_s"], 1e6), _part(f["pairs_s"], 1e9), f"{f['r2']:.3f}",
            "the more the better" if f["best_streams"] is None else f"{f['best_streams']:.0f}",
        )
        for f in fits
    )  # fmt: skip
    words = (
        "The throughput model of `jobs/bench_model.py` fitted to seconds over P (one document: what it costs a step is in the first figure)"
    )
    return f"{words}:\n\n{_table(names, lines)}"


def _part(seconds: float, scale: float) -> str:
    return f"{seconds * scale:.2f}" if seconds else "-"


def _details(rows: Iterable[Row]) -> str:
    names = (
        "work", "model shape", "layout", "documents", "tokens", "questions", "new", "ours s", "stock s", "best stock", "of", "pairs",
        "ratio", "95 %",
    )  # fmt: skip
    lines = (
        (
            r["work"], r["model"], shown(r), str(r["documents"]), f"{r['document_tokens']:,}", str(r["questions"]), str(r["new_tokens"]),
            f"{r['ours_s']:.3f}", f"{r['stock_s']:.3f}", _backend(r["best_stock"]),
            ", ".join(map(_backend, sorted(r["stock_all_s"]))), str(len(r["ratios"])), f"{r['ratio']:.2f}x", _interval(r),
        )
        for r in rows
    )  # fmt: skip
    return f"<details><summary>All cells</summary>\n\n{_table(names, lines)}\n\n</details>"


def _backend(contender: str) -> str:
    return contender.removeprefix("stock-")


def _interval(row: Row) -> str:
    """Nothing where a single timing gives none."""
    return "-" if row["low"] == row["high"] else f"{row['low']:.2f} to {row['high']:.2f}"


def _sizes(row: Row) -> str:
    documents = f"{row['documents']} x " if row["documents"] > 1 else ""
    return f"{documents}{row['document_tokens']:,} tokens, {row['questions']} questions, {row['new_tokens']} new"


if __name__ == "__main__":
    raise SystemExit(main())
