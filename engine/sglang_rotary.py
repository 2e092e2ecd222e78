"""Whether SGLang's layers can leave the rotary embedding to our attention, which turns and stores in one launch: tried, not assumed.

A rotary module is taken over only if it does to queries and keys what `kernels.rotary` does, and if it is asked once by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from askmany.engine.kv_pool import KVShape
from askmany.engine.sglang_compat import HostedModel
from askmany.engine.step_attention import LayerAttention
from askmany.kernels.rotary import Rotary, rotate, rotate_and_store

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the norm: two roundings; a wrong turn is off by O(1)
TRIED = 16  # positions, spread over the table


@dataclass(frozen=True, slots=True)
class OwnRotary:
    """The module that all layers share, and what it does."""

    module: Any
    rotary: Rotary


@dataclass(slots=True)
class Turned:
    """An attention that turns what it is given and passes it on. `positions` [T] of the step's rows."""

    rotary: Rotary
    positions: Tensor
    inner: LayerAttention
    layers: list[int] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `LayerAttention`."""
        self.layers.append(layer)
        q, k = (rotate(x, self.positions, self.rotary) for x in (q, k))
        return self.inner.attend(layer, q, k, v, scale)


def own_rotary(hosted: HostedModel, shape: KVShape, q_heads: int) -> OwnRotary | None:
    """The one rotary module of the model, if it turns as `rotate` does; None if there is none, several, or one of another kind."""
    modules = hosted.rotary_modules
    if len(modules) != 1:
        return None
    module, table = modules[0], modules[0].cos_sin_cache
    width = getattr(module, "rotary_dim", 0)
    if table.ndim != 2 or table.shape[1] != width or not 0 < width <= shape.head_dim:
        return None
    rotary = Rotary(table, not getattr(module, "is_neox_style", True))
    return OwnRotary(module, rotary) if _turns_alike(module, rotary, shape, q_heads) else None


def _turns_alike(module: Any, rotary: Rotary, shape: KVShape, q_heads: int) -> bool:
    """Both on the same rows, ours by the very launch that steps use."""
    device, last = rotary.table.device, len(rotary.table) - 1
    positions = torch.linspace(0, last, min(TRIED, last + 1), device=device).long()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(positions), q_heads + shape.kv_heads, shape.head_dim, generator=generator).to(device, shape.dtype)
    q, k = (x.flatten(1).clone() for x in (rows[:, :q_heads], rows[:, q_heads:]))  # as layers hand them over; may be turned in place
    try:
        found = torch.cat([x.view(len(positions), -1, shape.head_dim) for x in module(positions, q, k)], dim=1)
        ours = _turned_and_stored(rows.clone(), q_heads, positions, rotary)
    except Exception:  # of strangers' code and of compilers: whatever it is, SGLang then turns by itself
        return False
    return all(_error(x, rotate(rows, positions, rotary)) <= TOLERANCE.get(shape.dtype, 1e-5) for x in (found, ours))


def _turned_and_stored(rows: Tensor, q_heads: int, positions: Tensor, rotary: Rotary) -> Tensor:
    """`rows` [T, HQ + HKV, D] turned, the keys as they lie in a cache."""
    q, k = rows[:, :q_heads], rows[:, q_heads:]
    k_cache, v_cache = torch.full_like(k, float("nan")), torch.empty_like(k)
    rotate_and_store(q, k, torch.zeros_like(k), positions, rotary, k_cache, v_cache, torch.arange(len(rows), device=rows.device))
    return torch.cat([q, k_cache], dim=1)


def _error(found: Tensor, want: Tensor) -> float:
    return float((found - want).float().norm() / want.float().norm())
