"""What a model's layers need to attend in one step: made once a step, handed down through the model's forward call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from askmany.engine.batch import StepBatch
from askmany.engine.kv_pool import KVPool
from askmany.kernels.layout import SplitBatch
from askmany.kernels.passes import AttentionPlan, Run, as_run, plan_masked, plan_split, to_device
from askmany.kernels.torch_attention import planned_attention


class LayerAttention(Protocol):
    """What a layer calls."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Take in `k`, `v` [T, HKV, D] of the step's rows, then attend with `q` [T, HQ, D]; output [T, HQ, D] in `q`'s dtype."""
        ...


@dataclass(frozen=True, slots=True)
class StepAttention:
    """The step's slots and its planned attention over `pool`."""

    pool: KVPool
    store_slots: Run
    plan: AttentionPlan

    @classmethod
    def of(cls, batch: StepBatch, pool: KVPool, device: torch.device, row_block: int | None) -> StepAttention:
        """Plans on the CPU, then moves what the layers need to `device`. `row_block`: see `kernels.passes`."""
        attention = batch.attention
        plan = plan_split(attention, row_block) if isinstance(attention, SplitBatch) else plan_masked(attention, row_block)
        slots = as_run(batch.store_slots)
        return cls(pool, slots if isinstance(slots, slice) else slots.to(device, non_blocking=True), to_device(plan, device))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store `k`, `v` [T, HKV, D], then attend with `q` [T, HQ, D]; output [T, HQ, D] in `q`'s dtype."""
        self.pool.store(layer, self.store_slots, k, v)
        out, _ = planned_attention(q, self.pool.k[layer], self.pool.v[layer], self.plan, scale)
        return out.to(q.dtype)
