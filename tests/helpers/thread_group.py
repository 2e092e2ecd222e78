"""A group of ranks that are threads of one process, for kernels that only this process can interpret."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from askmany.kernels.rank_group import RankGroup, Traffic


class _Board:
    """What the ranks hand to each other, one exchange at a time."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=100)

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        self.given[rank] = value
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


class ThreadGroup(RankGroup):
    """One rank's view."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.ranks, self.size, self.rank, self.traffic, self._board = tuple(range(size)), size, rank, Traffic(), board

    def pass_on(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> Callable[[], None]:
        given = self._board.swap(self.rank, [tensor.clone() for tensor in send])[(self.rank - 1) % self.size]
        for target, tensor in zip(receive, given, strict=True):
            target.copy_(tensor)
        return lambda: None

    def all_gather(self, part: Tensor) -> tuple[Tensor, Callable[[], None]]:
        gathered = torch.stack(self._board.swap(self.rank, part.clone()))
        return gathered, lambda: None

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([given[self.rank] for given in self._board.swap(self.rank, parts.clone())])


def on_threads(size: int, function: Callable[[ThreadGroup], Any]) -> list[Any]:
    """The function's result on each rank; the first error is raised."""
    board = _Board(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(ThreadGroup(rank, size, board)), range(size)))
