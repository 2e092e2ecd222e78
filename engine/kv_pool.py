"""The KV pool: every layer's keys and values, by slot.

Knows neither pages nor who holds a slot. On a CPU the memory is touched only where something was stored, so a generous pool costs nothing
until it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.kernels.passes import Run


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model stores for one token: `layers` x (K and V) x `kv_heads` x `head_dim` of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """`slots` places for a token's K and V in each layer; `k[layer]`, `v[layer]` are [S, HKV, D].

    With `poisoned`, memory starts as NaN and so do slots given to `poison`: a read of a slot that was never stored then shows in every
    result. For tests.
    """

    def __init__(self, shape: KVShape, slots: int, device: torch.device, poisoned: bool = False) -> None:
        self.shape = shape
        self.slots = slots
        self.device = device
        size = (slots, shape.kv_heads, shape.head_dim)
        self.k = [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self.v = [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        if poisoned:
            self.poison(slice(0, slots))

    @property
    def bytes(self) -> int:
        """Of all slots, touched or not."""
        return self.slots * self.shape.token_bytes

    def store(self, layer: int, slots: Run, k: Tensor, v: Tensor) -> None:
        """Write the rows of `k` and `v` [T, HKV, D] into `slots` (T of them, each once)."""
        self.k[layer][slots] = k
        self.v[layer][slots] = v

    def poison(self, slots: Run) -> None:
        """Fill slots with NaN in every layer."""
        for cache in (*self.k, *self.v):
            cache[slots] = float("nan")
