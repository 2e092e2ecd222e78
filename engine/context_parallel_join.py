"""How the processes of a context-parallel group find each other: one hosts a meeting place, all join it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from askmany.engine.context_parallel import Groups
from askmany.engine.host_threads import keep_host_work_in_one_thread
from askmany.kernels.rank_group import RankGroup

TIMEOUT_S = 1800.0  # of one exchange of tensors: a step over a long document takes its time on a CPU
IDLE_S = 7 * 86_400.0  # followers wait so long for the leader's next step; a leader that is gone is noticed at once


class MeetingPlace:
    """A store that the ranks join, alive as long as this object. Any process may host it, once."""

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = (host, int(self._store.port))


def join(host: str, port: int, rank: int, ranks: int, device: Literal["auto", "cpu", "cuda"] = "auto") -> Groups:
    """Become rank `rank` of `ranks`; returns when all are there. NCCL carries tensors between GPUs, gloo everything else.

    Beside a GPU this process's PyTorch keeps to one thread (`host_threads`). RuntimeError when the others do not come.
    """
    cuda = device != "cpu" and torch.cuda.is_available()
    keep_host_work_in_one_thread(torch.device("cuda" if cuda else "cpu"))
    if host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    everyone = list(range(ranks))
    data = dist.new_group(everyone, timeout=timeout, backend="nccl" if cuda else "gloo")
    control = dist.new_group(everyone, timeout=timedelta(seconds=IDLE_S), backend="gloo")
    return Groups(RankGroup(everyone, data), RankGroup(everyone, control))
