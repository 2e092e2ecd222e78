"""A set of gloo processes that is started once and then runs many collective functions, so that a test file pays for one start."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 110.0
PRELOADED = ["torch.distributed", "tests.helpers.ring_worlds", "askmany.engine.model_transformers"]  # imported once, not in every rank


class GlooRanks:
    """`size` processes with a gloo world among them; rank r's function gets `(rank, size, *arguments)`."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = _free_port()
        self.size = size
        self._ends, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, port), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of all ranks; the first rank's traceback as an AssertionError. `function` must be importable."""
        for end in self._ends:
            end.send((function, arguments))
        results = []
        for rank, end in enumerate(self._ends):
            if not end.poll(TIMEOUT_S):
                raise AssertionError(f"rank {rank} of {self.size} gave no answer within {TIMEOUT_S} s")
            failed, value = end.recv()
            if failed:
                raise AssertionError(f"rank {rank} of {self.size}: {value}")
            results.append(value)
        return results

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def gloo_ranks(size: int) -> Iterator[GlooRanks]:
    ranks = GlooRanks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(end: Connection, rank: int, size: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            break
        try:
            end.send((False, function(rank, size, *arguments)))
        except Exception:
            end.send((True, traceback.format_exc()))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
