"""The process beside an engine: what Python's garbage collector looks through, and how many threads PyTorch's host operations take.

Libraries and a loaded model are some half a million objects, through which a full collection takes 0.3 s or more: as long as a hundred
decode steps, and every few thousand of them. They live as long as the process and need not be looked through.

Beside a GPU the host has short work alone, on index tensors and masks. PyTorch spreads what has more than 32,768 elements over a thread
a core, and threads of several engines on one host spin while they wait for each other: on two H200s a prefill step of two such
processes took 0.65 s in place of 0.1 s.
"""

from __future__ import annotations

import gc

import torch


def leave_out_what_is_loaded() -> None:
    """Collect once; objects that are there now are left out of every later collection. For a process that keeps its engine to its end."""
    gc.collect()
    gc.freeze()


def keep_host_work_in_one_thread(device: torch.device) -> None:
    """Where `device` is a GPU, PyTorch's operations on the host take one thread from now on; on a CPU they are the work itself."""
    if device.type == "cuda":
        torch.set_num_threads(1)
