"""Attention over the ranks of a group, one layer at a time: right first, then how long, and what is hidden behind what.

For `bench_context_parallel`. Every function is collective and gives all ranks the slowest rank's times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.layout import PrivateItem, SplitBatch
from askmany.kernels.oracle import dense_attention, relative_error
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Rules
from askmany.kernels.ring_measure import CellWork

ROUNDS = 5
SAMPLED_ROWS = 3
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 6e-3}  # 16 bit: one rounding more a part than one GPU has


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and with what the measuring is done."""

    group: RankGroup
    blocks: BlockAttention
    device: torch.device
    dtype: torch.dtype
    repeats: int


def timed_ms(run: Callable[[], object], bench: Bench, alone: bool = False) -> float:
    """Median milliseconds of a call over `ROUNDS` rounds, the slowest rank's; `alone`: this rank measures by itself."""
    rounds = []
    for _ in range(ROUNDS + 1):
        if not alone:
            bench.group.agree([0.0])
        _wait(bench.device)
        started = time.perf_counter()
        for _ in range(bench.repeats):
            run()
        _wait(bench.device)
        rounds.append((time.perf_counter() - started) * 1e3 / bench.repeats)
    median = statistics.median(rounds[1:])
    return median if alone else bench.group.agree([median])[0]


def prefill_cell(rules: Rules, new: int, cached: int, bench: Bench) -> dict[str, Any]:
    """One sequence of `new` tokens over `cached`: error and milliseconds of each way, of attention and exchange by themselves, of one GPU.

    A way that is wrong has its error and no time.
    """
    work = CellWork(new, cached, rules, bench.blocks, bench.group, bench.device, bench.dtype)
    row: dict[str, Any] = {"new_tokens": new, "cached_tokens": cached, "ranks": bench.group.size}
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"pass_kv": work.pass_kv, "pass_q": work.pass_q, "gather_kv": work.gather_kv}
    for name, way in ways.items():
        error = bench.group.agree([_error(work, way()[0], bench)])[0]
        row[f"{name}_error"] = error
        row[f"{name}_ms"] = timed_ms(way, bench) if error < BOUNDS[bench.dtype] else None
    row["attention_ms"] = timed_ms(work.attend_all, bench)
    row["exchange_ms"] = timed_ms(work.exchange, bench)
    del work
    row["alone_ms"] = timed_ms(_alone(rules, new, cached, bench), bench)
    best = min((row[f"{name}_ms"] for name in ways if row[f"{name}_ms"] is not None), default=None)
    row["efficiency"] = row["alone_ms"] / (bench.group.size * best) if best else None
    if row["pass_kv_ms"] is not None:
        hidden = row["attention_ms"] + row["exchange_ms"] - row["pass_kv_ms"]
        row["exchange_hidden"] = max(0.0, min(1.0, hidden / row["exchange_ms"]))
    return row


def crossover_row(rules: Rules, row: dict[str, Any]) -> dict[str, Any]:
    """What the rules choose in a measured cell, and how much longer that takes than the better way (1.0: none)."""
    choice = rules.choose(row["new_tokens"], row["cached_tokens"])
    kv_ms = min(row["pass_kv_ms"] or math.inf, row["gather_kv_ms"] or math.inf)
    q_ms = row["pass_q_ms"] or math.inf
    chosen_ms = kv_ms if choice.way.endswith("kv") else q_ms
    best_ms = min(kv_ms, q_ms)
    over_best = chosen_ms / best_ms if math.isfinite(chosen_ms) else None
    return row | {"chosen": choice.way, "rule": choice.rule, "reason": choice.reason, "chosen_over_best": over_best}


def _error(work: CellWork, out: Tensor, bench: Bench) -> float:
    """Relative error of a few of this rank's rows against fp64; 0 for a rank without rows."""
    places = work.rows.counts()[bench.group.rank]
    if not places:
        work.everything()
        return 0.0
    sample = sorted({round(i * (places - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)})
    k, v = work.everything()
    mine = work.rows.rows(bench.group.rank)[sample]
    visible = torch.arange(len(k), device=k.device)[None, :] <= (mine + len(k) - work.new)[:, None].to(k.device)
    want, _ = dense_attention(work.q[sample], k, v, visible, work.scale)
    return relative_error(out[sample], want)


def _alone(rules: Rules, new: int, cached: int, bench: Bench) -> Callable[[], object]:
    """The same sequence on one GPU, by the same kernels."""
    heads = rules.heads
    attend = bench.blocks.prepare(SplitBatch((), (PrivateItem(0, new, torch.arange(cached + new)),)), new)
    if attend is None:
        raise ValueError("a cell has at least one new token")
    q = torch.randn(new, heads.q_heads, heads.head_dim, device=bench.device, dtype=bench.dtype)
    k, v = torch.randn(2, cached + new, heads.kv_heads, heads.head_dim, device=bench.device, dtype=bench.dtype)
    prepared = attend
    return lambda: prepared(q, k, v, heads.head_dim**-0.5)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
