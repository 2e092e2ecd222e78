"""Runs the split layout's kernel over a world."""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.kernels.layout import SplitBatch
from askmany.kernels.plan import Chunking
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import StepLimits
from askmany.kernels.tiles import AttentionShape
from tests.helpers.attention_cases import World


def split_attention(world: World, batch: SplitBatch, *, deterministic: bool = False) -> StreamAttention:
    """A `StreamAttention` large enough for `batch`, loaded with it. Limits come in few sizes, so that plan kernels are compiled once.
    Nothing is stored in the step, so that nodes may be taken for settled: half of the batches do."""
    case = world.case
    shape = AttentionShape(*case.heads, case.head_dim, case.page_size, case.torch_dtype)
    lengths = [item.slots.shape[0] for item in batch.shared] + [item.slots.shape[0] for item in batch.private]
    pages = sum(-(-length // case.page_size) for length in lengths)
    rows = next(size for size in (64, 1024, 4096) if size >= max(world.q.shape[0], len(batch.private)))
    limits = StepLimits(rows=rows, streams=min(rows, 1024), nodes=16, pages=max(1, pages))
    most = max((item.rows.shape[0] for item in batch.shared), default=1)
    attention = StreamAttention(
        shape, limits, world.q.device, node_rows=most, rows_per_stream=case.rows,
        chunking=Chunking(deterministic=deterministic), settled_nodes=len(batch.private) % 2 == 0,
    )  # fmt: skip
    attention.load(batch)
    attention.plan.check()
    return attention


def run_split(world: World, batch: SplitBatch, *, deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of `StreamAttention`, written over NaN."""
    out = torch.full_like(world.q, float("nan"))
    lse = torch.full(world.q.shape[:2], float("nan"), dtype=torch.float32, device=world.q.device)
    attention = split_attention(world, batch, deterministic=deterministic)
    attention.run(world.q, world.k_cache, world.v_cache, world.case.scale, out, lse)
    return out, lse
