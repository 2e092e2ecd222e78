"""Rows that are held to masks, on a device with kernels: the masks' way over, and the pick that replaces the likeliest token of such rows.

Three launches and one copy a step, outside of any graph, and none where no row is held. Knows nothing of grammars or streams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.engine.masks import Masks
from askmany.kernels.greedy import GreedyTokens, LegalPick


class HeldRows:
    """Memory for steps with up to `rows` held rows of `width` logits."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        pinned, words = device.type == "cuda", -(-width // 32)
        self._room = torch.zeros(rows, words, dtype=torch.int32, pin_memory=pinned)
        self._places = torch.zeros(2, rows, dtype=torch.int32, pin_memory=pinned)
        self._bits = torch.zeros(rows, words, dtype=torch.int32, device=device)
        self._rows = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._pick = LegalPick(rows, width, device)
        self._copied: torch.cuda.Event | None = None

    @property
    def room(self) -> Tensor:
        """[rows, ceil(V / 32)] int32 in page-locked memory: where the next step's masks are best written. Waits for the last copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._room

    def pick(self, masks: Masks, logits: Tensor, out: GreedyTokens, drawn: Tensor) -> None:
        """Overwrite the held rows' places in `out` and `drawn` by what they may hold. `masks.bits` lie in `room`. Does not wait."""
        assert masks.bits.data_ptr() == self._room.data_ptr(), "the masks lie elsewhere"
        count, used = len(masks.rows), len(masks.bits)
        self._places[0, :count] = torch.tensor(masks.rows, dtype=torch.int32)
        self._places[1, :count] = torch.tensor(masks.which, dtype=torch.int32)
        self._bits[:used].copy_(masks.bits, non_blocking=True)
        self._rows.copy_(self._places, non_blocking=True)
        if logits.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(logits.device))
        self._pick.run(logits, self._rows[0, :count], self._rows[1, :count], self._bits, out, drawn)
