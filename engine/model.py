"""What an executor needs of a model, whichever library runs its layers. Knows no library."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from askmany.engine.batch import StepBatch
    from askmany.engine.kv_pool import KVPool, KVShape
    from askmany.engine.step_attention import LayerAttention
    from askmany.kernels.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows whose logits are asked for. `lengths`: of the runs of rows that end at them, the first beginning at row 0."""

    rows: Tensor  # [W] int64, ascending; where a step asks for fewer than W, the rest is any row
    lengths: Tensor  # [W] int32


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step on the model's device. `wanted` None: all of them. `unrotated`: layers hand over queries and keys as they were
    projected, and the attention turns them by the model's `rotary`."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, -1 for a dummy
    wanted: Wanted | None
    unrotated: bool = False


class RowModel(Protocol):
    """A loaded decoder as a function of tensors alone: no host value of a step enters its forward pass, so that it can be captured."""

    name: str
    vocabulary: int
    kv_shape: KVShape

    @property
    def device(self) -> torch.device:
        """Where weights and pool lie."""
        ...

    @property
    def q_heads(self) -> int:
        """Query heads of a layer."""
        ...

    @property
    def rotary(self) -> Rotary | None:
        """What `StepRows.unrotated` leaves to the attention; None where the layers cannot leave it."""
        ...

    def run_rows(self, rows: StepRows, attention: LayerAttention) -> Tensor:
        """Logits [W, V] of the wanted rows, in their order."""
        ...

    def capture_scope(self) -> AbstractContextManager[None]:
        """To be held around the capture of a forward pass."""
        ...


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


class LoadedModel(StepModel, RowModel, Protocol):
    """A decoder that a library has loaded."""
