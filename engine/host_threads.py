"""How many threads PyTorch's operations on the host take beside a GPU.

What is left for the host there is short work on index tensors and masks. PyTorch spreads what has more than 32,768 elements over a thread a
core, and the threads of several engines on one host spin while they wait for each other: on two H200s a prefill step of two such
processes took 0.65 s in place of 0.1 s.
"""

from __future__ import annotations

import torch


def keep_host_work_in_one_thread(device: torch.device) -> None:
    """Where `device` is a GPU, PyTorch's operations on the host take one thread from now on; on a CPU they are the work itself."""
    if device.type == "cuda":
        torch.set_num_threads(1)
