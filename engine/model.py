"""What an executor needs of a model, whichever library runs its layers. Knows no library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from askmany.engine.batch import StepBatch
    from askmany.engine.kv_pool import KVPool, KVShape


class StepModel(Protocol):
    """A loaded decoder that runs steps over a KV pool of `kv_shape`."""

    name: str
    vocabulary: int
    kv_shape: KVShape

    @property
    def device(self) -> torch.device:
        """Where weights and pool lie."""
        ...

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """Run one step: stores the rows' K and V in `pool`, returns the logits of `batch.sampled_rows`, in their order: [N, V]."""
        ...

    def step_bytes(self, step_tokens: int, rows: int) -> int:
        """An upper estimate of what a step of `step_tokens`, of which `rows` are sampled, needs beside weights and pool."""
        ...
