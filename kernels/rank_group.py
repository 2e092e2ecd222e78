"""A group of processes that share sequences, and the few messages that they exchange. Counts what this rank sends.

Over torch.distributed with NCCL on GPUs and gloo on CPUs. A group is named by its global ranks, so that a world of N context-parallel
times M tensor-parallel processes is a grid of groups (`grid`). Knows nothing of attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Traffic:
    """Messages that this rank sent to others, and their bytes, by kind: `send`, `all_gather`, `all_to_all`, `gather`.

    A collective counts one message to each other rank that gets something of this rank's.
    """

    messages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sent_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, kind: str, messages: int, size: int) -> None:
        self.messages[kind] += messages
        self.sent_bytes[kind] += size

    def take(self) -> dict[str, tuple[int, int]]:
        """(messages, bytes) by kind since the last call."""
        taken = {kind: (count, self.sent_bytes[kind]) for kind, count in self.messages.items()}
        self.messages.clear()
        self.sent_bytes.clear()
        return taken


class RankGroup:
    """This process's place in a group of `ranks` (global ranks, in ring order). All methods are collective: every rank calls them alike."""

    def __init__(self, ranks: Sequence[int], process_group: Any) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.traffic = Traffic()
        self._group = process_group

    @classmethod
    def world(cls) -> RankGroup:
        """All processes."""
        return cls(range(dist.get_world_size()), dist.group.WORLD)

    def pass_on(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Callable[[], None]:
        """Start sending `send`, as one message, to the next rank of the ring and receiving `receive` (same shapes) from the one before.

        Returns the wait; until it has returned, `send` must not be written and `receive` not be read.
        """
        following, before = self.ranks[(self.rank + 1) % self.size], self.ranks[(self.rank - 1) % self.size]
        operations = [dist.P2POp(dist.isend, tensor, following, self._group) for tensor in send]
        operations += [dist.P2POp(dist.irecv, tensor, before, self._group) for tensor in receive]
        self.traffic.add("send", 1, sum(tensor.nbytes for tensor in send))
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def send(self, part: Tensor, to: int) -> None:
        """Send to rank `to`, which receives at the same time; waits."""
        self.traffic.add("send", 1, part.nbytes)
        _waited(dist.P2POp(dist.isend, part.contiguous(), self.ranks[to], self._group))

    def receive(self, room: Tensor, source: int) -> Tensor:
        """`room`, filled by rank `source`; waits."""
        _waited(dist.P2POp(dist.irecv, room, self.ranks[source], self._group))
        return room

    def all_gather(self, part: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """[N, *part.shape], filled once the returned wait has returned: the `part` of every rank, in order."""
        gathered = part.new_empty(self.size, *part.shape)
        self.traffic.add("all_gather", self.size - 1, (self.size - 1) * part.nbytes)
        work = _all_gather_single(gathered.view(-1), part.contiguous().view(-1), self._group)
        return gathered, work.wait

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send `parts[r]` to rank r; [N, ...], what each rank sent here."""
        received = torch.empty_like(parts)
        self.traffic.add("all_to_all", self.size - 1, parts.nbytes - parts[0].nbytes)
        dist.all_to_all_single(received, parts.contiguous(), group=self._group)
        return received

    def gather(self, part: Tensor, to: int = 0) -> Tensor | None:
        """On rank `to`: [N, *part.shape], the `part` of every rank. None elsewhere."""
        if self.size == 1:
            return part[None]
        here = self.rank == to
        parts = [torch.empty_like(part) for _ in self.ranks] if here else None
        if not here:
            self.traffic.add("gather", 1, part.nbytes)
        dist.gather(part.contiguous(), parts, dst=self.ranks[to], group=self._group)
        return torch.stack(parts) if parts is not None else None

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """`value` of rank `source`, pickled; for small host data."""
        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=self.ranks[source], group=self._group)
        return box[0]

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all ranks: the same list everywhere."""
        lists: list[Any] = [None] * self.size
        dist.all_gather_object(lists, list(values), group=self._group)
        return [max(column) for column in zip(*lists, strict=True)]


def grid(context_ranks: int, tensor_ranks: int = 1, backend: str | None = None, timeout_s: float = 600.0) -> tuple[RankGroup, RankGroup]:
    """This process's (context-parallel, tensor-parallel) groups in a world of `context_ranks` x `tensor_ranks` processes.

    Tensor-parallel peers are neighbours; a context-parallel group joins the processes that hold the same share of the weights (the same
    KV heads). Collective over the world. Raises ValueError when the world has another size.
    """
    world = dist.get_world_size()
    if context_ranks * tensor_ranks != world:
        raise ValueError(f"{context_ranks} x {tensor_ranks} ranks in a world of {world} processes")
    timeout = timedelta(seconds=timeout_s)
    mine: dict[str, RankGroup] = {}
    context = [[c * tensor_ranks + t for c in range(context_ranks)] for t in range(tensor_ranks)]
    tensor = [[c * tensor_ranks + t for t in range(tensor_ranks)] for c in range(context_ranks)]
    for name, groups in (("context", context), ("tensor", tensor)):
        for ranks in groups:
            made = dist.new_group(ranks, timeout=timeout, backend=backend)
            if dist.get_rank() in ranks:
                mine[name] = RankGroup(ranks, made)
    return mine["context"], mine["tensor"]


def _waited(operation: Any) -> None:
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def _all_gather_single(output: Tensor, part: Tensor, group: Any) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in PyTorch 2.13
    return gather(output, part, group=group, async_op=True)
