"""What `bench_context_parallel` measured, as text, beside what was published; and what it would come to with more ranks, as a model.

Knows rows of the record alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
MODELLED_RANKS = (2, 4, 8, 16)
PUBLISHED = (  # arXiv 2411.01783: Llama 3 405B, hosts of 8 H100
    "published (405B, hosts of 8 H100): 128k prefill 42.0 s on 1 host, 10.95 s on 4; 1M on 16 hosts in 77 s, 93 % efficient;",
    "decode at 128k 46 ms a token on 1 host, 60 to 71 ms on 2 to 4",
)


def modelled(prefills: Sequence[Row]) -> list[dict[str, Any]]:
    """A model, no measurement: prefill attention of one layer with N ranks from the times measured with fewer.

    Attention divides by N; each of the N - 1 hops moves 1/N of the keys, at the measured rate, and hides behind the attention of a step as
    far as that lasts.
    """
    rows = []
    for row in prefills:
        measured = row["ranks"]
        whole_ms = row["attention_ms"] * measured
        keys_ms = row["exchange_ms"] / (measured - 1) * measured  # to move all keys once
        for ranks in MODELLED_RANKS:
            step_ms, hop_ms = whole_ms / ranks**2, keys_ms / ranks
            total_ms = whole_ms / ranks + (ranks - 1) * max(0.0, hop_ms - step_ms)
            rows.append(
                {
                    "model_of": row["shape"], "new_tokens": row["new_tokens"], "ranks": ranks, "ms": total_ms,
                    "efficiency": row["alone_ms"] / (ranks * total_ms),
                }
            )  # fmt: skip
    return rows


def printed(record: Mapping[str, Any]) -> str:
    """The result table."""
    table = record["table"]
    lines = ["", f"{record['ranks']} x {record['device']}, {record['date']}, {record['commit']}"]
    for section, columns in COLUMNS.items():
        rows = table.get(section, [])
        if rows:
            lines += ["", section + (" (a model, not measured)" if section == "by_ranks" else ""), _line(columns, {c: c for c in columns})]
            lines += [_line(columns, _flat(row)) for row in rows]
    return "\n".join([*lines, "", *PUBLISHED])


COLUMNS: dict[str, tuple[str, ...]] = {
    "rules": ("shape", "link"),
    "prefill": (
        "shape", "new_tokens", "alone_ms", "pass_kv_ms", "gather_kv_ms", "pass_q_ms", "gather_q_ms", "attention_ms", "exchange_ms",
        "exchange_hidden", "efficiency",
    ),
    "crossover": (
        "shape", "new_tokens", "cached_tokens", "pass_kv_ms", "gather_kv_ms", "pass_q_ms", "gather_q_ms", "chosen", "rule",
        "chosen_over_best",
    ),
    "streams": (
        "shape", "document_tokens", "streams", "alone_ms", "group_ms", "speed_up_eager", "alone_graph_ms", "group_graph_ms",
        "speed_up_graph",
    ),
    "model": (
        "model", "layers", "document_tokens", "streams", "alone.prefill_s", "group.prefill_s", "prefill_efficiency",
        "alone.first_token_s", "group.first_token_s", "alone.decode_ms", "group.decode_ms", "decode_speed_up", "same_first_tokens",
    ),
    "over_long": ("model", "layers", "document_tokens", "streams", "refused_by_one_gpu", "group.answered", "group.first_token_s"),
    "by_ranks": ("model_of", "new_tokens", "ranks", "ms", "efficiency"),
}  # fmt: skip


def _flat(row: Row) -> dict[str, Any]:
    flat = dict(row)
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
    return flat


def _line(columns: Sequence[str], row: Row) -> str:
    return " | ".join(_shown(row.get(column)) for column in columns)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
