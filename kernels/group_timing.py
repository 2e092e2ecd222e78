"""How long a piece of a group's work takes: calls back to back on the device's clock, all ranks starting together.

A single short call between two waits for the device would be timed by the waits. Knows nothing of what runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from askmany.kernels.rank_group import RankGroup

ROUNDS = 3
ROUND_S = 0.02  # a round has as many calls as this takes
MOST_CALLS = 50


def group_s(run: Callable[[], object], group: RankGroup, device: torch.device, rounds: int = ROUNDS, round_s: float = ROUND_S) -> float:
    """Median seconds of a call over `rounds` rounds, of the rank that took longest. Collective; the same number on every rank."""
    _round(run, group, device, 1)  # warms up: libraries make their handles, memory is reserved
    once_s = group.agree([_round(run, group, device, 1)])[0]
    calls = max(1, min(MOST_CALLS, math.ceil(round_s / max(once_s, 1e-9))))
    return group.agree([statistics.median(_round(run, group, device, calls) for _ in range(rounds))])[0]


def _round(run: Callable[[], object], group: RankGroup, device: torch.device, calls: int) -> float:
    """Seconds of one call among `calls`."""
    group.agree([0.0])
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - started) / calls
    torch.cuda.synchronize(device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(stop)) * 1e-3 / calls
