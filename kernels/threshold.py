"""From how many saved bytes on a document is worth a pass of its own, measured once per GPU and head shape and remembered on disk.

Reading a document once for all its streams saves bytes and costs a merge; below some saving the L2 cache already gives what sharing could.
Times both ways at steps of growing savings, as long as the budget lasts, and takes the threshold under which all of them together would
have taken least. The file is a cache: one that cannot be read is measured anew and replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import triton

from askmany.kernels.measure import fastest
from askmany.kernels.plan import Chunking
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape
from askmany.kernels.tune import default_cache_file

BUDGET_S = 2.0
PRIVATE_TOKENS = 96
NEVER_BYTES = 1 << 40
STREAMS = 16  # one count: kernels are compiled for it once
DOCUMENTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens


@dataclass(frozen=True, slots=True)
class Timed:
    """A step's microseconds a layer with the document shared and with every stream reading it alone."""

    saved_bytes: int
    shared_us: float
    alone_us: float


Measure = Callable[[AttentionShape, int, int, torch.device], tuple[float, float]]  # streams, tokens -> (shared, alone) microseconds


def saved_bytes(shape: AttentionShape, streams: int, tokens: int) -> int:
    """What sharing a document of `tokens` among `streams` saves a layer."""
    return (streams - 1) * tokens * shape.token_bytes


def best_threshold(timed: Sequence[Timed]) -> int:
    """The threshold under which the timed steps together take least: a step is shared if it saves more. Of equals, the lowest."""
    candidates = [-1, *sorted(point.saved_bytes for point in timed)]
    return min(candidates, key=lambda bytes_: (sum(t.shared_us if t.saved_bytes > bytes_ else t.alone_us for t in timed), bytes_))


def tuned_threshold(
    shape: AttentionShape,
    device: torch.device,
    cache_file: Path | None = None,
    measure: Measure | None = None,
    clock: Callable[[], float] = perf_counter,
) -> int:
    """`Chunking.threshold_bytes` for this GPU and shape, from `cache_file` or measured now for about BUDGET_S seconds, compilation
    apart."""
    cache_file = cache_file or default_cache_file().with_name("thresholds.json")
    key = _key(shape, device)
    known = _read(cache_file)
    if key in known:
        return known[key]
    timing = measure or time_both
    timing(shape, STREAMS, DOCUMENTS[0], device)  # compiles
    started_s = clock()
    timed: list[Timed] = []
    for tokens in DOCUMENTS:
        if timed and clock() - started_s > BUDGET_S:
            break
        timed.append(Timed(saved_bytes(shape, STREAMS, tokens), *timing(shape, STREAMS, tokens, device)))
    found = best_threshold(timed)
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    fresh = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
    fresh.write_text(json.dumps(_read(cache_file) | {key: found}, indent=1, sort_keys=True))
    fresh.replace(cache_file)
    return found


def time_both(shape: AttentionShape, streams: int, tokens: int, device: torch.device) -> tuple[float, float]:
    """Microseconds of a layer with the document shared, and with every stream on its own; in captured graphs."""
    pages = -(-tokens // shape.page_size) + streams * -(-PRIVATE_TOKENS // shape.page_size)
    limits = StepLimits(streams, streams, 1, pages)
    candidates = {
        name: StreamAttention(shape, limits, device, chunking=Chunking(threshold_bytes=threshold))
        for name, threshold in (("shared", -1), ("alone", NEVER_BYTES))
    }
    _, times = fastest(candidates, tokens, streams, PRIVATE_TOKENS)
    return times["shared"], times["alone"]


def _key(shape: AttentionShape, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    heads = f"{shape.q_heads}/{shape.kv_heads}x{shape.head_dim} {str(shape.dtype).removeprefix('torch.')} page {shape.page_size}"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}: {heads}"


def _read(cache_file: Path) -> dict[str, int]:
    try:
        known = json.loads(cache_file.read_text())
        return {str(key): int(value) for key, value in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
