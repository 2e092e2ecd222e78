"""What the constrained rows of a step may draw, as bits: made by `constraints`, applied by whoever draws."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Row `rows[i]` of a step's logits may draw what `bits[which[i]]` says, a bit a token (the lowest bit of a word first)."""

    rows: list[int]  # C
    which: list[int]  # C
    bits: Tensor  # [masks, ceil(V / 32)] int32, on the CPU
