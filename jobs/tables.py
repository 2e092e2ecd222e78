"""The README's kernel table from a measurement file: python -m askmany.jobs.tables README.md jobs/measurements/kernels-h200.json

Replaces what stands between `<!-- kernels -->` and `<!-- /kernels -->` and prints which marks hold. `--check` changes nothing and fails
when the README differs from the measurements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from askmany.jobs.markers import options_of, put

STOCK = ("fa3_decode", "flashinfer_decode")
COLUMNS = {
    "floor_us": "floor",
    "stream_attention": "stream_attention",
    "fa3_split": "FA3 pass + ours",
    "stream_mask": "stream_mask",
    "flashinfer_cascade": "FlashInfer cascade",
    "flashinfer_decode": "FlashInfer decode",
    "fa3_decode": "FA3 decode",
}
SHOWN_STREAMS, SHOWN_PRIVATE = (16, 64, 256), 96

Row = dict[str, Any]
Key = tuple[int, int, int, int, int]  # query heads, KV heads, document tokens, streams, private tokens


@dataclass(frozen=True, slots=True)
class Mark:
    """A claim, how far it holds and where it is worst. `cells` 0: nothing measured that could tell."""

    claim: str
    cells: int
    holding: int
    worst: str

    def __str__(self) -> str:
        state = "not measured" if not self.cells else f"holds in {self.holding} of {self.cells} cells, worst {self.worst}"
        return f"{self.claim}: {state}"


class Measurements:
    """Times of one file, by kernel and cell."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.rows: dict[tuple[str, Key], Row] = {(row["kernel"], key_of(row)): row for row in record["table"] if row["us"]}
        self.cells = sorted({key for _, key in self.rows})

    def us(self, kernel: str, key: Key) -> float | None:
        row = self.rows.get((kernel, key))
        return None if row is None else float(row["us"])

    def stock(self, key: Key) -> float | None:
        """The best stock decode of a cell."""
        times = [time for time in (self.us(kernel, key) for kernel in STOCK) if time]
        return min(times, default=None)


def key_of(row: Row) -> Key:
    """A document pass counts as one without private keys, though some were measured with one a stream, which takes the longer."""
    private = row["private_tokens"] if row["private_tokens"] > 1 else 0
    return (row["q_heads"], row["kv_heads"], row["document_tokens"], row["streams"], private)


def markdown(found: Measurements) -> str:
    """The table: microseconds of one layer's attention in one decode step, a line a cell."""
    versions = found.record["versions"]
    names = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines = [f"{found.record['gpu']}, {names}; commit {found.record['commit'][:12] or 'unknown'}, {found.record['date']}.", ""]
    lines += ["| heads | document | streams | " + " | ".join(COLUMNS.values()) + " | over best stock |"]
    lines += ["|---" * (len(COLUMNS) + 4) + "|"]
    for key in found.cells:
        if key[3] in SHOWN_STREAMS and key[4] == SHOWN_PRIVATE and found.us("stream_attention", key):
            lines.append(_line(found, key))
    return "\n".join(lines)


def marks(found: Measurements) -> list[Mark]:
    """Every claim about these kernels, judged on every cell that can tell."""
    full = [key for key in found.cells if key[4] > 0]
    parts = [key for key in found.cells if key[4] == 0]
    small = [key for key in full if key[3] * key[0] // key[1] <= 64 and key[4] == SHOWN_PRIVATE]
    return [
        _judge("document of 100 to 200 MB, at most 64 rows: 1.35x the floor", _in_megabytes(small, 100, 200), _over_floor(found), 1.35),
        _judge("document above 200 MB, at most 64 rows: 1.15x the floor", _in_megabytes(small, 200, 1e9), _over_floor(found), 1.15),
        _judge("compute-bound, floor of 100 us: 450 TFLOP/s (as us over us at 450)", _compute_bound(found, parts), _at_450(found), 1.0),
        _judge("document pass no slower than FA3's", parts, _ratio(found, "stream_document_pass", "fa3_document_pass"), 1.0),
        _judge(
            "document pass 1.3x faster where FA3's takes under 20 us",
            [key for key in parts if (found.us("fa3_document_pass", key) or 99.0) < 20],
            _ratio(found, "stream_document_pass", "fa3_document_pass"),
            1 / 1.3,
        ),
        _judge(
            "28/4 heads, 16 streams: 6 us over the document pass",
            [k for k in full if k[:2] == (28, 4) and k[3:] == (16, 96)],
            _extra(found),
            6.0,
        ),
        _judge("no slower than the best stock decode", full, _over_stock(found, "stream_attention"), 1.0),
        _judge("stream_mask 3x faster than SGLang's masked extend", full, _ratio(found, "stream_mask", "sglang_extend_mask"), 1 / 3),
    ]


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    found = Measurements(json.loads(options.measurements.read_text()))
    for mark in marks(found):
        print(mark)
    return put(options, "kernels", markdown(found))


def _line(found: Measurements, key: Key) -> str:
    heads, stock, ours = f"{key[0]}/{key[1]}", found.stock(key), found.us("stream_attention", key)
    floor = next(row["floor_us"] for (_, other), row in found.rows.items() if other == key)
    times = [floor if name == "floor_us" else found.us(name, key) for name in COLUMNS]
    gain = f"{stock / ours:.1f}x" if stock and ours else "-"
    return f"| {heads} | {key[2]:,} | {key[3]} | " + " | ".join("-" if t is None else f"{t:,.1f}" for t in times) + f" | {gain} |"


def _judge(claim: str, cells: Iterable[Key], figure: Callable[[Key], float | None], bound: float) -> Mark:
    """`figure` must not exceed `bound`; cells without a figure do not count."""
    figures = [(value, key) for key in cells if (value := figure(key)) is not None]
    worst = max(figures, default=None)
    shown = (
        ""
        if worst is None
        else f"{worst[0]:.2f} (bound {bound:.2f}) at {worst[1][0]}/{worst[1][1]} heads, {worst[1][2]} tokens, {worst[1][3]} streams"
    )
    return Mark(claim, len(figures), sum(value <= bound for value, _ in figures), shown)


def _in_megabytes(cells: list[Key], low: float, high: float) -> list[Key]:
    """Cells by their document's K and V in one layer, bf16, head dim 128."""
    return [key for key in cells if low <= key[1] * key[2] * 512 / 1e6 < high]


def _compute_bound(found: Measurements, cells: list[Key]) -> list[Key]:
    rows = [(key, found.rows.get(("stream_document_pass", key))) for key in cells]
    return [key for key, row in rows if row and row["flops"] / 790e6 >= 100 and row["flops"] / 790e6 >= row["bytes"] / 4.3e6]


def _at_450(found: Measurements) -> Callable[[Key], float | None]:
    def figure(key: Key) -> float | None:
        row = found.rows.get(("stream_document_pass", key))
        return None if row is None else float(row["us"] / (row["flops"] / 450e6))

    return figure


def _over_floor(found: Measurements) -> Callable[[Key], float | None]:
    def figure(key: Key) -> float | None:
        row = found.rows.get(("stream_attention", key))
        return None if row is None else float(row["us"] / row["floor_us"])

    return figure


def _ratio(found: Measurements, ours: str, theirs: str) -> Callable[[Key], float | None]:
    def figure(key: Key) -> float | None:
        a, b = found.us(ours, key), found.us(theirs, key)
        return a / b if a and b else None

    return figure


def _over_stock(found: Measurements, ours: str) -> Callable[[Key], float | None]:
    def figure(key: Key) -> float | None:
        a, b = found.us(ours, key), found.stock(key)
        return a / b if a and b else None

    return figure


def _extra(found: Measurements) -> Callable[[Key], float | None]:
    def figure(key: Key) -> float | None:
        a, b = found.us("stream_attention", key), found.us("stream_document_pass", (*key[:4], 0))
        return a - b if a and b else None

    return figure


if __name__ == "__main__":
    raise SystemExit(main())
