"""A step's small integers on their way to the device: one static device buffer, one copy a step, from page-locked memory.

Named fields are views of the one buffer, so their addresses never change and a captured graph may hold them. Two host mirrors take turns:
the host fills one while the copy from the other may still be under way. Knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32}


@dataclass(frozen=True, slots=True)
class Field:
    """`shape` integers of `dtype` (int32 or int64)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class Staging:
    """`tensors[name]` lie on the device; `fill` gives the host's arrays of the same names, `flush` copies them over.

    The last field may be long and is copied as far as it is used.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        offsets, total = [], 0
        for item in fields:
            offsets.append(total)
            total += -(-item.bytes // _ALIGNMENT) * _ALIGNMENT
        self._last_offset, self._last_itemsize = offsets[-1], fields[-1].dtype.itemsize
        self._flat = torch.zeros(total, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._mirrors = [_Mirror(torch.zeros(total, dtype=torch.uint8, pin_memory=pinned), fields, offsets) for _ in range(2)]
        self.tensors: Mapping[str, Tensor] = {
            item.name: self._flat[at : at + item.bytes].view(item.dtype).view(item.shape) for item, at in zip(fields, offsets, strict=True)
        }

    def fill(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The arrays to fill for the next `flush`, with what they held two flushes ago; waits until their last copy is done."""
        self._mirrors.reverse()
        self._mirrors[0].wait()
        return self._mirrors[0].arrays

    def flush(self, last_used: int) -> None:
        """Copy everything, of the last field the first `last_used` integers. Does not wait."""
        stop = self._last_offset + last_used * self._last_itemsize
        mirror = self._mirrors[0]
        self._flat[:stop].copy_(mirror.memory[:stop], non_blocking=True)
        mirror.mark(self._flat.device)


class _Mirror:
    """The host's side of the buffer."""

    def __init__(self, memory: Tensor, fields: Sequence[Field], offsets: Sequence[int]) -> None:
        self.memory = memory
        flat = memory.numpy()
        self.arrays = {
            item.name: flat[at : at + item.bytes].view(_NUMPY[item.dtype]).reshape(item.shape)
            for item, at in zip(fields, offsets, strict=True)
        }
        self._copied: torch.cuda.Event | None = None

    def mark(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
