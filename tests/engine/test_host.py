"""What a process that keeps an engine leaves out of collections, and when its host work keeps to one thread."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from askmany.engine.garbage import leave_out_what_is_loaded

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

kept = [Node() for _ in range(10)]
garbage = cycle()
leave_out_what_is_loaded()
assert garbage() is None, "what was unreachable is gone"
assert gc.get_freeze_count() > 1000
assert not any(isinstance(found, Node) for found in gc.get_objects())
later = cycle()
gc.collect()
assert later() is None
"""


def test_only_what_is_there_is_left_out() -> None:
    """In a process of its own: freezing would last."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ONE_THREAD = """
import torch
from askmany.engine.host_threads import keep_host_work_in_one_thread

torch.set_num_threads(3)
keep_host_work_in_one_thread(torch.device("cpu"))
assert torch.get_num_threads() == 3, "on a CPU these threads do the work"
keep_host_work_in_one_thread(torch.device("cuda", 0))
assert torch.get_num_threads() == 1
"""


def test_only_beside_a_gpu_the_host_keeps_to_one_thread() -> None:
    """In a process of its own: the count lasts."""
    done = subprocess.run([sys.executable, "-c", ONE_THREAD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
