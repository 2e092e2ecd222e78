"""Attention over the ranks of a group, one layer at a time: right first, then how long, and what is hidden behind what.

For `bench_context_parallel`. Every function is collective and gives all ranks the slowest rank's times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.group_timing import group_s
from askmany.kernels.layout import PrivateItem, SplitBatch
from askmany.kernels.oracle import dense_attention, relative_error
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import FITTED, Rules
from askmany.kernels.ring_measure import CellWork

SAMPLED_ROWS = 3
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 6e-3}  # 16 bit: one rounding more a part than one GPU has


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and with what the measuring is done."""

    group: RankGroup
    blocks: BlockAttention
    device: torch.device
    dtype: torch.dtype
    rounds: int


def timed_ms(run: Callable[[], object], bench: Bench) -> float:
    """Median milliseconds of a call, the slowest rank's."""
    return group_s(run, bench.group, bench.device, bench.rounds) * 1e3


def prefill_cell(rules: Rules, new: int, cached: int, bench: Bench, alone: bool = True) -> dict[str, Any]:
    """One sequence of `new` tokens over `cached`: error and milliseconds of each way; with `alone` also of attention and exchange by
    themselves, and of one GPU. A way that is wrong has its error and no time.
    """
    work = CellWork(new, cached, rules, bench.blocks, bench.group, bench.device, bench.dtype)
    row: dict[str, Any] = {"new_tokens": new, "cached_tokens": cached, "ranks": bench.group.size}
    judge = _judge(work, bench)
    for name, way in work.ways.items():
        error = bench.group.agree([judge(way()[0])])[0]
        row[f"{name}_error"] = error
        row[f"{name}_ms"] = timed_ms(way, bench) if error < BOUNDS[bench.dtype] else None
    if alone:
        row["attention_ms"] = timed_ms(work.attend_all, bench)
        row["exchange_ms"] = timed_ms(work.exchange, bench)
        del work, judge
        row |= _against_one(row, timed_ms(_alone(rules, new, cached, bench), bench))
    return row


def _against_one(row: dict[str, Any], alone_ms: float) -> dict[str, Any]:
    """Efficiency of the fastest way, and the share of pass-KV's exchange that its attention hides."""
    times = [row[f"{way}_ms"] for way in FITTED if row[f"{way}_ms"] is not None]
    found = {"alone_ms": alone_ms, "efficiency": alone_ms / (row["ranks"] * min(times)) if times else None}
    if row["pass_kv_ms"] is not None:
        hidden = row["attention_ms"] + row["exchange_ms"] - row["pass_kv_ms"]
        found["exchange_hidden"] = max(0.0, min(1.0, hidden / row["exchange_ms"]))
    return found


def crossover_row(rules: Rules, row: dict[str, Any]) -> dict[str, Any]:
    """What the rules choose in a measured cell, and how much longer that takes than the best way (1.0: none)."""
    choice = rules.choose(row["new_tokens"], row["cached_tokens"])
    times = {way: row[f"{way}_ms"] or math.inf for way in FITTED}
    chosen_ms, best_ms = times[choice.way], min(times.values())
    over_best = chosen_ms / best_ms if math.isfinite(chosen_ms) else None
    return row | {"chosen": choice.way, "rule": choice.rule, "reason": choice.reason, "chosen_over_best": over_best}


def _judge(work: CellWork, bench: Bench) -> Callable[[Tensor], float]:
    """Relative error of a few of this rank's rows against fp64; 0 for a rank without rows. Collective when made."""
    k, v = work.everything()
    places = work.rows.counts()[bench.group.rank]
    if not places:
        return lambda out: 0.0
    sample = sorted({round(i * (places - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)})
    mine = work.rows.rows(bench.group.rank)[sample]
    visible = torch.arange(len(k), device=k.device)[None, :] <= (mine + len(k) - work.new)[:, None].to(k.device)
    want, _ = dense_attention(work.q[sample], k, v, visible, work.scale)
    return lambda out: relative_error(out[sample], want)


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
