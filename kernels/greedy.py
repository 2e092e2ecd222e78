"""The likeliest token of every row in one pass over the logits: its id, its log-probability, and the gap to the next; of some rows among
the tokens that a mask allows.

Fixed launches, no word to the host: can be captured. Knows nothing of streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from askmany.kernels.greedy_kernels import feed_rows, pick_legal_rows, pick_rows, scan_legal_rows, scan_rows

BLOCK = 4096  # logits a program reads at once
MOST_PARTS = 64  # of a row; they depend on the width alone, so that a row's bits are its own


@dataclass(frozen=True, slots=True)
class GreedyTokens:
    """For N rows: `tokens` [N] int64, `logprobs` [N] fp32 (nats), `margins` [N] fp32 (gap of the two largest logits)."""

    tokens: Tensor
    logprobs: Tensor
    margins: Tensor


class GreedyPick:
    """Workspace and outputs for up to `rows` rows of `width` logits."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._parts = max(1, min(-(-width // BLOCK), MOST_PARTS))
        self._part_width = -(-width // self._parts // 16) * 16  # whole vectors
        floats = torch.zeros(3, rows, self._parts, dtype=torch.float32, device=device)
        self._tops, self._seconds, self._sums = floats[0], floats[1], floats[2]
        self._ids = torch.zeros(rows, self._parts, dtype=torch.int32, device=device)
        self.packed = torch.zeros(2, rows, dtype=torch.int64, device=device)  # `out`, to be copied in one go: see `unpack`
        self.out = unpack(self.packed)

    def run(self, logits: Tensor, drawn: Tensor | None = None, asked: int = 0) -> None:
        """Fill the first N rows of `out` from `logits` [N, V]; among equal logits the lowest id is taken. NaN logits give a NaN
        log-probability. The tokens of the first `asked` rows go to `drawn` [>= asked] int64 as well. Raises ValueError if the logits are
        not dense in V."""
        rows, width = logits.shape
        if logits.stride(1) != 1 or rows > self.out.tokens.shape[0] or width > self._parts * self._part_width:
            raise ValueError(f"logits {tuple(logits.shape)} with strides {logits.stride()} do not fit")
        if rows == 0:
            return
        parts = (self._tops, self._ids, self._seconds, self._sums)
        scan_rows[(rows, self._parts)](logits, *parts, logits.stride(0), width, self._part_width, PARTS=self._parts, BLOCK=BLOCK)
        pick_rows[(rows,)](
            *parts, self.out.tokens, self.out.logprobs, self.out.margins, self.out.tokens if drawn is None else drawn,
            0 if drawn is None else asked, width, PARTS=self._parts, BP=triton.next_power_of_2(self._parts),
        )  # fmt: skip


def unpack(packed: Tensor) -> GreedyTokens:
    """Views of `packed` [2, N] int64: N tokens, then N log-probabilities and N margins in the bytes of the second row."""
    floats = packed[1].view(torch.float32)
    return GreedyTokens(packed[0], *floats.view(2, -1))


def feed(token_ids: Tensor, feeds: Tensor, drawn: Tensor) -> Tensor:
    """The tokens [T] int64 that a step's rows feed on: `drawn[feeds]` where `feeds` [T] is not negative, else `token_ids` [T]."""
    if token_ids.is_cuda:
        return launch_feed(token_ids, feeds, drawn)
    return torch.where(feeds >= 0, drawn[feeds.clamp(min=0)], token_ids)


def launch_feed(token_ids: Tensor, feeds: Tensor, drawn: Tensor) -> Tensor:
    """The Triton path of `feed`, on its own so that the interpreter can run it on a CPU."""
    ids, block = torch.empty_like(token_ids), 256
    feed_rows[(triton.cdiv(ids.shape[0], block),)](token_ids, feeds, drawn, ids, ids.shape[0], BLOCK=block)
    return ids


class LegalPick:
    """Workspace for up to `rows` rows of `width` logits that are held to masks."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._parts = max(1, min(-(-width // BLOCK), MOST_PARTS))
        self._part_width = -(-width // self._parts)
        floats = torch.zeros(4, rows, self._parts, dtype=torch.float32, device=device)
        self._ids = torch.zeros(rows, self._parts, dtype=torch.int32, device=device)
        self._found = (floats[0], self._ids, floats[1], floats[2], floats[3])

    def run(self, logits: Tensor, rows: Tensor, which: Tensor, bits: Tensor, out: GreedyTokens, drawn: Tensor) -> None:
        """Overwrite `out` and `drawn` at the places `rows` [C] int32 by the likeliest token of these rows of `logits` [N, V] that mask
        `bits[which[i]]` ([M, ceil(V / 32)] int32, `which` [C] int32) allows. Log-probabilities are those of the whole row, margins those of
        the allowed tokens. A mask allows something. Raises ValueError for logits that are not dense in V or too many rows."""
        count, width = rows.shape[0], logits.shape[1]
        if logits.stride(1) != 1 or count > self._ids.shape[0] or -(-width // 32) > bits.shape[1] or width > self._parts * self._part_width:
            raise ValueError(f"logits {tuple(logits.shape)}, masks {tuple(bits.shape)} and {count} rows do not fit")
        scan_legal_rows[(count, self._parts)](
            logits, rows, which, bits, bits.stride(0), *self._found, logits.stride(0), width, self._part_width,
            PARTS=self._parts, BLOCK=BLOCK,
        )  # fmt: skip
        pick_legal_rows[(count,)](
            rows, *self._found, out.tokens, out.logprobs, out.margins, drawn, width, PARTS=self._parts,
            BP=triton.next_power_of_2(self._parts),
        )  # fmt: skip
