"""Python's garbage collector beside an engine.

Libraries and a loaded model are some half a million objects, through which a full collection takes 0.3 s or more: as long as a hundred
decode steps, and every few thousand of them. They live as long as the process and need not be looked through.
"""

from __future__ import annotations

import gc


def leave_out_what_is_loaded() -> None:
    """Collect once; objects that are there now are left out of every later collection. For a process that keeps its engine to its end."""
    gc.collect()
    gc.freeze()
