"""Which slots the tokens of a page list lie in, as arrays. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def page_slots_array(pages: Sequence[int], count: int, page_size: int) -> NDArray[np.int32]:
    """[count] the slots of the first `count` tokens that lie in `pages`."""
    first = np.asarray(pages[: -(-count // page_size)], dtype=np.int32) * np.int32(page_size)
    slots = first[:, None] + np.arange(page_size, dtype=np.int32)
    return slots.astype(np.int32).reshape(-1)[:count]
