"""The work of one step's attention, prepared once and run in every layer: three kinds of pass that `torch_attention` knows how to run.

A plan turns the items of `layout` into passes: contiguous rows and slots become slices (no copy of keys), short runs of many streams become
one padded batch, and what depends only on lengths (masks, indices) is made here and not once a layer.

Order of the passes: first those that hold each row's own keys (every row of the step's items is in exactly one of them), then the document
passes, ancestors before descendants, which are merged into the first. A row's result therefore never depends on which other rows ride
along, except through the shape of matrix products; `row_block` fixes that too: document passes then run in products of exactly
`row_block` rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from askmany.kernels.layout import MaskedBatch, MaskedItem, PrivateItem, SplitBatch

Run = slice | Tensor  # contiguous indices as a slice, others as int64 [N]
LONG_RUN = 64  # from this many rows on, a private item is worth products of its own


@dataclass(frozen=True, slots=True)
class CausalPass:
    """`rows` over their own keys `slots`, as many: row i sees the first i + 1. Writes the rows."""

    rows: slice
    slots: Run


@dataclass(frozen=True, slots=True)
class PaddedPass:
    """B runs of up to N rows over up to L keys each. Repeated rows and slots pad it; `visible` hides the padding. Writes the rows."""

    rows: Run  # [B * N]
    slots: Tensor  # [B * L] int64
    visible: Tensor  # [B, 1, N, L] bool
    kept: Run  # the places in [B * N] that are no padding
    targets: Run  # the rows at those places


@dataclass(frozen=True, slots=True)
class StreamMaskPass:
    """`rows` over `slots`, causal (row i sees the first `seen + i + 1`) and by stream id. Writes the rows."""

    rows: slice
    slots: Run
    seen: int
    q_sid: Tensor  # [R] int32
    key_sid: Tensor  # [L] int32


@dataclass(frozen=True, slots=True)
class SharedPass:
    """Every row of `rows` over every key of `slots`. Merged into what the rows hold."""

    rows: Run
    slots: Run


OwnPass = CausalPass | PaddedPass | StreamMaskPass
AnyPass = TypeVar("AnyPass", bound=OwnPass | SharedPass)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`own` passes write disjoint rows, `shared` passes are merged in order. `row_block`: see above."""

    own: tuple[OwnPass, ...]
    shared: tuple[SharedPass, ...]
    row_block: int | None = None


def plan_split(batch: SplitBatch, row_block: int | None = None) -> AttentionPlan:
    """The passes of the split layout. Empty items are dropped: a row that no pass writes stays zero."""
    own: list[OwnPass] = []
    shared: list[SharedPass] = []
    short: list[tuple[Tensor, Tensor]] = []
    for item in batch.private:
        if item.row_count >= LONG_RUN:
            _add_long_run(item.row_start, item.row_count, item.slots, own, shared)
        elif item.row_count:
            short.append((_row_indices(item), item.slots))
    own += _padded_passes(short)
    shared += [SharedPass(as_run(item.rows), as_run(item.slots)) for item in batch.shared if len(item.rows) and len(item.slots)]
    return AttentionPlan(tuple(own), tuple(shared), row_block)


def plan_masked(batch: MaskedBatch, row_block: int | None = None) -> AttentionPlan:
    """The passes of the interleaved layout: the leading document keys of an item are visible to all its rows and become a document pass.

    With `row_block`, the keys of each row's own stream are picked out, so that no product's shape depends on a sibling.
    """
    own: list[OwnPass] = []
    shared: list[SharedPass] = []
    short: list[tuple[Tensor, Tensor]] = []
    for item in batch.items:
        key_sid = batch.slot_sid[item.slots]
        cached = min(_leading(key_sid == -1), len(item.slots) - item.row_count)
        rows = slice(item.row_start, item.row_start + item.row_count)
        if bool((key_sid[cached:] == -1).all()):
            _add_long_run(item.row_start, item.row_count, item.slots, own, shared)
            continue
        if cached:
            shared.append(SharedPass(rows, as_run(item.slots[:cached])))
        if row_block is None:
            seen = len(item.slots) - cached - item.row_count
            own.append(StreamMaskPass(rows, as_run(item.slots[cached:]), seen, batch.q_sid[rows], key_sid[cached:]))
        else:
            short += _row_by_row(item, cached, batch.q_sid, key_sid)
    own += _padded_passes(short)
    return AttentionPlan(tuple(own), tuple(shared), row_block)


def to_device(plan: AttentionPlan, device: torch.device) -> AttentionPlan:
    """The plan with its tensors on `device`; the plan itself where they are already."""
    if device.type == "cpu":
        return plan
    return AttentionPlan(
        tuple(_moved(own, device) for own in plan.own), tuple(_moved(shared, device) for shared in plan.shared), plan.row_block
    )


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` that waits for nothing: from pageable memory it would wait for the device."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def as_run(indices: Tensor) -> Run:
    """A slice where `indices` count up by one."""
    start, count = int(indices[0]), len(indices)
    if int(indices[-1]) - start == count - 1 and bool((indices[1:] - indices[:-1] == 1).all()):
        return slice(start, start + count)
    return indices


def _moved(part: AnyPass, device: torch.device) -> AnyPass:
    tensors = {f.name: getattr(part, f.name) for f in fields(part) if isinstance(getattr(part, f.name), Tensor)}
    return replace(part, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def _add_long_run(row_start: int, row_count: int, slots: Tensor, own: list[OwnPass], shared: list[SharedPass]) -> None:
    """A run of many rows: the keys stored before it are visible to all of it, its own are causal."""
    rows, cached = slice(row_start, row_start + row_count), len(slots) - row_count
    own.append(CausalPass(rows, as_run(slots[cached:])))
    if cached:
        shared.append(SharedPass(rows, as_run(slots[:cached])))


def _row_by_row(item: MaskedItem, cached: int, q_sid: Tensor, key_sid: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each row with the slots of its stream up to its own: neither siblings nor the pieces that a tail is fed in change its shape."""
    own_slots, own_sid = item.slots[cached:], key_sid[cached:]
    found = []
    for row in range(item.row_count):
        seen = len(own_slots) - item.row_count + row + 1
        mine = own_slots[:seen][own_sid[:seen] == q_sid[item.row_start + row]]
        found.append((torch.tensor([item.row_start + row], device=item.slots.device), mine))
    return found


def _padded_passes(runs: list[tuple[Tensor, Tensor]]) -> list[OwnPass]:
    """Runs (rows, slots) of similar size batched together; a run's padded shape depends on its own lengths alone."""
    groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for rows, slots in runs:
        groups[_row_bucket(len(rows)), _key_bucket(len(slots))].append((rows, slots))
    return [_padded_pass(runs, *shape) for shape, runs in groups.items()]


def _padded_pass(runs: list[tuple[Tensor, Tensor]], row_places: int, key_places: int) -> PaddedPass:
    device = runs[0][0].device
    row_counts = torch.tensor([len(rows) for rows, _ in runs], device=device)[:, None]  # [B, 1]
    key_counts = torch.tensor([len(slots) for _, slots in runs], device=device)[:, None]  # [B, 1]
    rows, slots = _stack([rows for rows, _ in runs], row_places), _stack([slots for _, slots in runs], key_places)
    row, key = torch.arange(row_places, device=device)[None, :], torch.arange(key_places, device=device)[None, :]
    seen = torch.minimum(key_counts - row_counts + row + 1, key_counts)  # [B, N]
    kept = torch.nonzero((row < row_counts).flatten())[:, 0]
    visible = (key < seen[:, :, None])[:, None]  # [B, 1, N, L]
    return PaddedPass(as_run(rows.flatten()), slots.flatten(), visible, as_run(kept), as_run(rows.flatten()[kept]))


def _stack(runs: list[Tensor], places: int) -> Tensor:
    """[B, places]: each run, then its last index again and again."""
    return torch.stack([torch.cat([run, run[-1:].expand(places - len(run))]) for run in runs])


def _row_indices(item: PrivateItem) -> Tensor:
    return torch.arange(item.row_start, item.row_start + item.row_count, device=item.slots.device)


def _leading(flags: Tensor) -> int:
    """How many leading entries are true."""
    return int(torch.cumprod(flags.to(torch.int64), dim=0).sum())


def _row_bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _key_bucket(count: int) -> int:
    """Steps of 32, growing with the length so that padding stays under a third and groups stay few."""
    step = max(32, (1 << count.bit_length()) // 8)
    return -(-count // step) * step
