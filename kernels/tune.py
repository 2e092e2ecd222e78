"""Times the tile candidates once per GPU and remembers the winner on disk.

The file is a cache: one that cannot be read is measured anew and replaced. A GPU, a version of torch or Triton, or a head shape that the
file does not know is measured and added.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton

from askmany.kernels.plan import Chunking
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import NodeEntry, StepLimits, StreamEntry
from askmany.kernels.tiles import TYPICAL_TOKENS, AttentionShape, Tiles, candidates

PRIVATE = 96  # tokens of each stream in the step that is timed
SHORTEST, LONGEST = 512, 16384  # documents between which the best tiles change
ROTATED_BYTES = 512 << 20  # caches that no L2 cache holds; two layers at least, eight at most

Measure = Callable[[AttentionShape, int, int, Tiles, torch.device, int], float]


def default_cache_file() -> Path:
    """`tiles.json` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "askmany" / "tiles.json"


def tuned_tiles(
    shape: AttentionShape,
    node_rows: int,
    rows_per_stream: int,
    device: torch.device,
    cache_file: Path | None = None,
    measure: Measure | None = None,
    node_tokens: int | None = None,
) -> Tiles:
    """The fastest tiles for this GPU and for nodes of about `node_tokens` tokens (to a power of two; default: not known), from `cache_file`
    or timed now (some seconds, mostly compilation)."""
    cache_file = cache_file or default_cache_file()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    tokens = min(max(SHORTEST, 1 << (max(node_tokens or TYPICAL_TOKENS, 1) - 1).bit_length()), LONGEST)
    choices = candidates(shape, node_rows, rows_per_stream, capability, tokens)
    key = _key(shape, node_rows, rows_per_stream, device, choices, tokens)
    known = _read(cache_file)
    if key in known:
        return Tiles(**known[key]["tiles"])
    timed = [(t, (measure or time_step)(shape, node_rows, rows_per_stream, t, device, tokens)) for t in choices]
    best, microseconds = min(timed, key=lambda pair: pair[1])
    _write(cache_file, _read(cache_file) | {key: {"tiles": asdict(best), "us": round(microseconds, 1)}})
    return best


def time_step(shape: AttentionShape, node_rows: int, rows_per_stream: int, tiles: Tiles, device: torch.device, tokens: int) -> float:
    """Microseconds a layer of one document of `tokens` tokens that `node_rows` tokens read, with private keys, in a captured graph; caches
    rotate."""
    streams = -(-node_rows // rows_per_stream)
    pages = [-(-count // shape.page_size) for count in (tokens, *[PRIVATE] * streams)]
    starts = [sum(pages[:i]) for i in range(len(pages) + 1)]
    ranges = [range(a, b) for a, b in pairwise(starts)]
    limits = StepLimits(streams * rows_per_stream, streams, 1, starts[-1])
    attention = StreamAttention(
        shape, limits, device, rows_per_stream=rows_per_stream, chunking=Chunking(threshold_bytes=-1), tiles=tiles, settled_nodes=True
    )
    runs = [StreamEntry(i * rows_per_stream, rows_per_stream, PRIVATE, ranges[i + 1], [0]) for i in range(streams)]
    attention.tables.load([NodeEntry(tokens, ranges[0])], runs)
    attention.plan.build()
    size = (starts[-1] * shape.page_size, shape.kv_heads, shape.head_dim)
    layers = min(max(2, ROTATED_BYTES // (size[0] * shape.token_bytes)), 8)
    caches = [[torch.randn(size, device=device, dtype=shape.dtype) for _ in range(2)] for _ in range(layers)]
    q = torch.randn(limits.rows, shape.q_heads, shape.head_dim, device=device).to(shape.dtype)
    out = torch.empty_like(q)

    def step() -> None:
        for k_cache, v_cache in caches:
            attention.run(q, k_cache, v_cache, shape.head_dim**-0.5, out)

    return _time_graph(step) / layers


def _time_graph(step: Callable[[], None], replays: int = 10) -> float:
    """Median microseconds of a replay of `step`, captured."""
    step()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def _key(shape: AttentionShape, node_rows: int, rows_per_stream: int, device: torch.device, choices: list[Tiles], tokens: int) -> str:
    """A choice among other tiles than before is another choice."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    digest = hashlib.sha256(repr(choices).encode()).hexdigest()[:8]
    heads = f"{shape.q_heads}/{shape.kv_heads}x{shape.head_dim} {str(shape.dtype).removeprefix('torch.')} page {shape.page_size}"
    asked = f"{heads}, rows {node_rows}, {rows_per_stream} a stream, documents of {tokens}, of {digest}"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}: {asked}"


def _read(cache_file: Path) -> dict[str, Any]:
    try:
        known = json.loads(cache_file.read_text())
        return {key: entry for key, entry in known.items() if Tiles(**entry["tiles"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write(cache_file: Path, known: dict[str, Any]) -> None:
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    fresh = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
    fresh.write_text(json.dumps(known, indent=1, sort_keys=True))
    fresh.replace(cache_file)
