"""Whether SGLang's layers can leave the rotary embedding to our attention, which turns and stores in one launch: tried, not assumed.

A rotary module is taken over only if it does to queries and keys what `kernels.rotary` does, and if every layer asks it once, at the step's
positions, and hands what comes back to its attention as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from askmany.engine.kv_pool import KVShape
from askmany.engine.sglang_compat import HandedBack, HostedModel
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
    """An attention that turns what it is given, as steps do, and passes it on. `positions` [T] of the step's rows; `handed_back`: what the
    rotary module was asked so far. Raises RuntimeError where a layer did anything between the two."""

    rotary: Rotary
    positions: Tensor
    inner: LayerAttention
    handed_back: list[HandedBack]
    layers: list[int] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `LayerAttention`."""
        self.layers.append(layer)
        if len(self.handed_back) != len(self.layers):
            raise RuntimeError(f"layer {layer} attends after {len(self.handed_back)} calls of the rotary module")
        asked = self.handed_back[-1]
        same = (torch.equal(given.to(got.dtype).reshape(got.shape), got) for given, got in ((asked.q, q), (asked.k, k)))
        if not (torch.equal(asked.positions, self.positions) and all(same)):
            raise RuntimeError(f"layer {layer} turns other rows than it attends with")
        q, k, v = turned_and_stored(q, k, v, self.positions, self.rotary)
        return self.inner.attend(layer, q, k, v, scale)


def turned_and_stored(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """`q` turned in place, and keys and values as they lie in a cache, by the very launch that steps use."""
    k_cache, v_cache = (torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device) for x in (k, v))
    rotate_and_store(q, k, v, positions, rotary, k_cache, v_cache, torch.arange(len(q), device=q.device))
    if not torch.equal(k_cache, k):
        raise RuntimeError("keys in the cache are not those that were turned")
    return q, k_cache, v_cache


def own_rotary(hosted: HostedModel, shape: KVShape, q_heads: int) -> OwnRotary | None:
    """The one rotary module of the model, if it turns as `rotate` does; None if there is none, several, or one of another kind."""
    modules = hosted.rotary_modules
    if len(modules) != 1:
        return None
    module, table = modules[0], modules[0].cos_sin_cache
    if table.ndim != 2 or not 0 < table.shape[1] <= shape.head_dim or table.shape[1] % 2:
        return None
    rotary = Rotary(table, not getattr(module, "is_neox_style", True))
    return OwnRotary(module, rotary) if _turns_alike(module, rotary, shape, q_heads) else None


def _turns_alike(module: Any, rotary: Rotary, shape: KVShape, q_heads: int) -> bool:
    """Both on the same rows, the positions spread over the table."""
    device, last = rotary.table.device, len(rotary.table) - 1
    positions = torch.linspace(0, last, min(TRIED, last + 1), device=device).long()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(positions), q_heads + 2 * shape.kv_heads, shape.head_dim, generator=generator).to(device, shape.dtype)
    q, k, v = _parts(rows, q_heads)
    want = torch.cat([rotate(q, positions, rotary), rotate(k, positions, rotary), v], dim=1)
    try:
        theirs = [x.view(len(rows), -1, shape.head_dim) for x in module(positions, q.flatten(1).clone(), k.flatten(1).clone())]
        ours = turned_and_stored(*_parts(rows.clone(), q_heads), positions, rotary)
    except Exception:  # of strangers' code and of compilers: whatever it is, SGLang then turns by itself
        return False
    return all(_error(torch.cat(list(found), dim=1), want) <= TOLERANCE.get(shape.dtype, 1e-5) for found in ((*theirs, v), ours))


def _parts(rows: Tensor, q_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one projection: views, as layers hand them over."""
    kv_heads = (rows.shape[1] - q_heads) // 2
    return rows[:, :q_heads], rows[:, q_heads : q_heads + kv_heads], rows[:, q_heads + kv_heads :]


def _error(found: Tensor, want: Tensor) -> float:
    return float((found - want).float().norm() / want.float().norm())
