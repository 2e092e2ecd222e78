"""The attention of one step as plain data: which rows look at which slots.

Knows nothing of requests: the engine's batch builder fills these in, kernels and `reference` read them. A *row* is one token of the
step (its queries, all heads); a *slot* holds one token's K and V. Shapes: T rows in the step, S slots in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedItem:
    """A document pass: every row of `rows` sees every key of `slots`. A prefix node with live rows below it makes one item."""

    rows: Tensor  # [R] int64, indices into the step's rows
    slots: Tensor  # [L] int64


@dataclass(frozen=True, slots=True)
class PrivateItem:
    """A causal run: row `row_start + i` sees the first `len(slots) - row_count + i + 1` keys of `slots`.

    Serves a stream (its own tail and answer) and a chunk of a prefix node (the node's own tokens) alike.
    """

    row_start: int
    row_count: int
    slots: Tensor  # [cached + row_count] int64


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """The split layout: each row belongs to exactly one private item and to at most one shared item per prefix level."""

    shared: tuple[SharedItem, ...]
    private: tuple[PrivateItem, ...]


@dataclass(frozen=True, slots=True)
class MaskedItem:
    """One interleaved request: row `row_start + i` may see key j of `slots` iff j <= len(slots) - row_count + i (causal) and the
    stream ids allow it: `slot_sid[slots[j]] == -1` or `slot_sid[slots[j]] == q_sid[row]`."""

    row_start: int
    row_count: int
    slots: Tensor  # [prefix + cached + row_count] int64


@dataclass(frozen=True, slots=True)
class MaskedBatch:
    """The interleaved layout (Parallel Prompting as published, arXiv 2611.15130): a stream-id mask over one KV row a request."""

    items: tuple[MaskedItem, ...]
    q_sid: Tensor  # [T] int32, stream id of each row
    slot_sid: Tensor  # [S] int32, stream id of each slot, -1 for document tokens
