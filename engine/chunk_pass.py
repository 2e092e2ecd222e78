"""Prefix chunks of a step through a prefill kernel: each chunk's rows, causal, over its ancestors' keys and its own.

Knows which slots a chunk reads; the kernel is handed in (`kernels/vendor_prefill`).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from askmany.engine.paged import MaskedStep, PagedStep
from askmany.engine.slots import page_slots_array
from askmany.kernels.vendor_prefill import PrefillKernel


class ChunkPass:
    """Plans once a step, runs once a layer; leaves rows that belong to no chunk alone."""

    def __init__(self, kernel: PrefillKernel) -> None:
        self._kernel = kernel
        self._rows = 0

    def plan(self, step: PagedStep | MaskedStep, page_size: int) -> None:
        """Take the step's chunks; there may be none."""
        self._rows = step.chunk_rows
        if not self._rows:
            return
        if isinstance(step, PagedStep):
            parts = [
                ([(node.pages, node.length) for node in map(step.nodes.__getitem__, run.path)], run.pages, run.length, run.rows)
                for run in step.runs[: step.chunks]
            ]
        else:
            parts = [
                ([(node.pages, len(node.token_ids)) for node in request.nodes], request.pages, request.stored + request.rows, request.rows)
                for request in step.requests[: step.chunks]
            ]
        slots = [
            np.concatenate([
                *(page_slots_array(held, count, page_size) for held, count in above),
                page_slots_array(pages, length, page_size),
            ])
            for above, pages, length, _ in parts
        ]  # fmt: skip
        self._kernel.plan([rows for *_, rows in parts], slots)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor) -> None:
        """Write the chunks' rows of `out` [T, HQ, D]."""
        if self._rows:
            out[: self._rows] = self._kernel.run(q[: self._rows], k_cache, v_cache, scale)
