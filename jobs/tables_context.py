"""The README's part on context parallelism: python -m askmany.jobs.tables_context README.md jobs/measurements/context-parallel-h200x2.json

Replaces what stands between `<!-- context -->` and `<!-- /context -->`: whole models over all ranks against one GPU, attention alone, which
way round is faster and what was chosen, decode steps, and a model of more ranks that says that it is one. Without the file it says that
nothing was measured. `--check` only compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from askmany.jobs.bench_context_table import PUBLISHED
from askmany.jobs.markers import options_of, put
from askmany.kernels.ring_choice import FITTED

NOT_MEASURED = "Not measured yet."
WITHIN = 1.05  # a choice is good when it takes at most so many times as long as the fastest way

Row = Mapping[str, Any]


def markdown(record: Mapping[str, Any] | None) -> str:
    """What stands between the markers."""
    if record is None or not any(record["table"].get(section) for section in SECTIONS):
        return NOT_MEASURED
    parts = [_head(record)]
    parts += [part(rows) for section, part in SECTIONS.items() if (rows := record["table"].get(section))]
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    record = json.loads(options.measurements.read_text()) if options.measurements.exists() else None
    return put(options, "context", markdown(record))


def _head(record: Mapping[str, Any]) -> str:
    rows = [row for section in SECTIONS for row in record["table"].get(section, [])]
    commits = dict.fromkeys(row.get("commit", "")[:12] or "unknown" for row in rows if "model_of" not in row)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    return f"{record['ranks']} x {record['device']}; {versions}; commit {', '.join(commits)} ({record['date']})."


def _models(rows: Sequence[Row]) -> str:
    names = ("model shape", "layers", "tokens", "a step", "streams", "prefill s: 1 GPU", "all", "efficiency", "first token s: 1 GPU", "all",
             "ms a token: 1 GPU", "all", "speed-up")  # fmt: skip
    table = _table(names, (_model(row) for row in rows))
    return f"Whole models, through the engine; one GPU is this engine with kernels and graphs. {_published()}\n\n{table}"


def _model(row: Row) -> Iterable[str]:
    one, many = row.get("alone", {}), row["group"]
    yield from (row["model"], str(row["layers"]), _count(row["document_tokens"]), _count(row["step_tokens"]), str(row["streams"]))
    yield from (_figure(one.get("prefill_s")), _figure(many["prefill_s"]), _percent(row.get("prefill_efficiency")))
    yield from (_figure(one.get("first_token_s")), _figure(many["first_token_s"]))
    yield from (_figure(one.get("decode_ms")), _figure(many["decode_ms"]), _times(row.get("decode_speed_up")))


def _over_long(rows: Sequence[Row]) -> str:
    told = [
        f"{_count(row['document_tokens'])} tokens of {row['model']} ({row['layers']} layers), "
        f"{'refused by' if row['refused_by_one_gpu'] else 'taken by'} one GPU's pool: {row['group']['answered']} of {row['streams']} "
        f"questions answered by the group"
        for row in rows
    ]
    return f"A document that one GPU's pool does not hold: {'; '.join(told)}."


def _prefills(rows: Sequence[Row]) -> str:
    names = ("shape", "tokens", "1 GPU ms", *(f"{_word(way)} ms" for way in FITTED), "efficiency", "exchange ms", "of it hidden")
    lines = (
        (row["shape"], _count(row["new_tokens"]), _figure(row["alone_ms"]), *(_figure(row[f"{way}_ms"]) for way in FITTED),
         _percent(row["efficiency"]), _figure(row["exchange_ms"]), _percent(row.get("exchange_hidden")))
        for row in rows
    )  # fmt: skip
    return f"Prefill attention of one layer:\n\n{_table(names, lines)}"


def _crossover(rows: Sequence[Row]) -> str:
    judged = [row["chosen_over_best"] for row in rows if row["chosen_over_best"] is not None]
    good = sum(ratio <= WITHIN for ratio in judged)
    worst = f", worst {max(judged):.3f} times the fastest" if judged else ""
    names = ("shape", "tokens", "of them new", *(f"{_word(way)} ms" for way in FITTED), "chosen", "over the fastest")
    lines = (
        (row["shape"], _count(row["new_tokens"] + row["cached_tokens"]), _share(row), *(_figure(row[f"{way}_ms"]) for way in FITTED),
         _word(row["chosen"]), _figure(row["chosen_over_best"], 4))
        for row in rows
    )  # fmt: skip
    claim = f"Which way round: the choice is within 5 % of the fastest way in {good} of {len(rows)} cells{worst}."
    return f"{claim}\n\n<details><summary>All cells</summary>\n\n{_table(names, lines)}\n\n</details>"


def _streams(rows: Sequence[Row]) -> str:
    names = ("shape", "document", "streams", "1 GPU ms", "all ms", "speed-up", "in graphs: 1 GPU ms", "all ms", "speed-up")
    lines = (
        (row["shape"], _count(row["document_tokens"]), str(row["streams"]), _figure(row["alone_ms"]), _figure(row["group_ms"]),
         _times(row["speed_up_eager"]), _figure(row["alone_graph_ms"]), _figure(row["group_graph_ms"]), _times(row["speed_up_graph"]))
        for row in rows
    )  # fmt: skip
    return f"A decode step's attention of one layer:\n\n{_table(names, lines)}"


def _by_ranks(rows: Sequence[Row]) -> str:
    lines = (
        (row["model_of"], _count(row["new_tokens"]), str(row["ranks"]), _figure(row["ms"]), _percent(row["efficiency"])) for row in rows
    )
    table = _table(("shape", "tokens", "ranks", "ms", "efficiency"), lines)
    return f"A model, not a measurement: prefill attention of one layer with more ranks, from the times above.\n\n{table}"


SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "model": _models, "over_long": _over_long, "prefill": _prefills, "crossover": _crossover, "streams": _streams, "by_ranks": _by_ranks,
}  # fmt: skip


def _published() -> str:
    words = " ".join(PUBLISHED)
    return f"{words[0].upper()}{words[1:]} (arXiv 2411.01783)."


def _share(row: Row) -> str:
    return f"{100 * row['new_tokens'] / (row['new_tokens'] + row['cached_tokens']):.3g} %"


def _word(way: str) -> str:
    return way.replace("_", "-").replace("kv", "KV").replace("-q", "-Q")


def _count(tokens: int) -> str:
    return f"{tokens:,}"


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _table(names: Sequence[str], lines: Iterable[Iterable[str]]) -> str:
    return "\n".join([_line(names), "|---" * len(names) + "|", *map(_line, lines)])


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


if __name__ == "__main__":
    raise SystemExit(main())
