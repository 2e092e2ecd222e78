"""What is loaded is left out of collections, and what comes later is not."""

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
