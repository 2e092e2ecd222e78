"""A step's message as the leader sends it to the other ranks: slots and positions mostly count up, so runs of them travel instead.

Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from askmany.engine.context_parallel_step import StepMessage
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch

SHORT = 8  # numbers that are sent as they are

Packed = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """A `StepMessage` for the way."""

    tensors: tuple[Packed, ...]  # token ids, positions, store slots, sampled rows, freed slots
    shared: tuple[tuple[Packed, Packed], ...]
    private: tuple[tuple[int, int, Packed], ...]
    prefix_rows: int


def pack(message: StepMessage) -> PackedMessage:
    """For the way."""
    known: dict[int, Packed] = {}  # tensors that several items share are packed once
    return PackedMessage(
        tuple(
            packed(tensor) for tensor in (message.token_ids, message.positions, message.store_slots, message.sampled_rows, message.freed)
        ),
        tuple((packed(item.rows), known.setdefault(id(item.slots), packed(item.slots))) for item in message.attention.shared),
        tuple((item.row_start, item.row_count, packed(item.slots)) for item in message.attention.private),
        message.prefix_rows,
    )


def unpack(message: PackedMessage) -> StepMessage:
    """What was packed."""
    token_ids, positions, store_slots, sampled_rows, freed = map(unpacked, message.tensors)
    shared = tuple(SharedItem(unpacked(rows), unpacked(slots)) for rows, slots in message.shared)
    private = tuple(PrivateItem(start, count, unpacked(slots)) for start, count, slots in message.private)
    return StepMessage(token_ids, positions, store_slots, SplitBatch(shared, private), sampled_rows, message.prefix_rows, freed)


def packed(numbers: Tensor) -> Packed:
    """`numbers` [N] int64 as runs that count up by one, where that is shorter."""
    values = numbers.numpy()
    if len(values) > SHORT:
        starts = np.concatenate([[0], np.flatnonzero(np.diff(values) != 1) + 1])
        if 2 * len(starts) < len(values):
            return values[starts], np.diff(starts, append=len(values))
    return (values,)


def unpacked(parts: Packed) -> Tensor:
    """The numbers."""
    if len(parts) == 1:
        return torch.from_numpy(parts[0])
    firsts, counts = parts
    ends = np.cumsum(counts)
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return torch.from_numpy(np.repeat(firsts, counts) + within)
