"""One cell of the kernel benchmark: a document, its streams and their keys on the GPU, several layers' caches side by side.

Every kernel of a cell sees the same keys, values, queries and pages, so that one oracle answers for all. Layers rotate so that the L2
cache holds none of the next one's keys, as in a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.kernels.oracle import dense_attention

PAGE = 64
READ_BYTES_PER_S = 4.3e12  # an H200's device memory, copied
FLOP_PER_S = 790e12  # an H200's bf16 matrix product
L2_BYTES = 60e6


@dataclass(frozen=True, slots=True)
class Cell:
    """`private` counts a stream's own keys, the one of its newest token included."""

    q_heads: int
    kv_heads: int
    head_dim: int
    document: int
    streams: int
    private: int

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer, bf16."""
        return 4 * self.kv_heads * self.head_dim

    @property
    def moved_bytes(self) -> int:
        """The least to move: the document once, each stream's own keys, queries in and outputs out."""
        rows = 4 * self.streams * self.q_heads * self.head_dim
        return self.token_bytes * (self.document + self.streams * self.private) + rows

    @property
    def flops(self) -> int:
        return 4 * self.streams * self.q_heads * self.head_dim * (self.document + self.private)

    @property
    def floor_us(self) -> float:
        return 1e6 * max(self.moved_bytes / READ_BYTES_PER_S, self.flops / FLOP_PER_S)

    @property
    def layers(self) -> int:
        """How many layers to rotate so that a layer comes around after four L2 capacities, at most 48."""
        return int(min(48, max(2, -(-4 * L2_BYTES // self.moved_bytes))))


class Inputs:
    """Tensors of a cell. `document` [L] and `own` [P, private] are slots; caches are [layers][S, HKV, D] views of `pool`."""

    def __init__(self, cell: Cell, pool: Tensor, seed: int) -> None:
        self.cell, device = cell, pool.device
        generator = torch.Generator(device=device).manual_seed(seed)
        self.document_pages = -(-cell.document // PAGE)
        self.own_pages = -(-cell.private // PAGE)
        pages = self.document_pages + cell.streams * self.own_pages
        self.slots = pages * PAGE
        scattered = torch.randperm(pages, generator=generator, device=device)
        self.document_table = scattered[: self.document_pages].to(torch.int32)  # [document pages]
        self.own_table = scattered[self.document_pages :].reshape(cell.streams, self.own_pages).to(torch.int32)
        self.document = _slots_of(self.document_table[None], cell.document)[0]
        self.own = _slots_of(self.own_table, cell.private)
        shape = (cell.layers, 2, self.slots, cell.kv_heads, cell.head_dim)
        self.caches = pool[: torch.Size(shape).numel()].view(shape)
        self.q = torch.randn(cell.streams, cell.q_heads, cell.head_dim, generator=generator, device=device).to(torch.bfloat16)
        self.scale = cell.head_dim**-0.5

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """`k_cache`, `v_cache` [S, HKV, D] of a layer."""
        return self.caches[index, 0], self.caches[index, 1]

    def truth(self, streams: list[int]) -> Tensor:
        """fp64 output [len(streams), HQ, D] in layer 0."""
        k, v = self.layer(0)
        outs = []
        for stream in streams:
            slots = torch.cat([self.document, self.own[stream]])
            visible = torch.ones(1, slots.shape[0], dtype=torch.bool, device=k.device)
            outs.append(dense_attention(self.q[stream : stream + 1], k[slots], v[slots], visible, self.scale)[0])
        return torch.cat(outs)


def pool_for(cells: list[Cell], device: torch.device) -> Tensor:
    """Random bf16 numbers, enough for the largest of `cells`."""
    most = max(c.layers * 2 * (-(-c.document // PAGE) + c.streams * -(-c.private // PAGE)) * PAGE * c.kv_heads * c.head_dim for c in cells)
    pool = torch.empty(most, dtype=torch.bfloat16, device=device)
    for start in range(0, most, 2**28):
        pool[start : start + 2**28].normal_()
    return pool


def _slots_of(table: Tensor, tokens: int) -> Tensor:
    """[rows, tokens] slots of page tables [rows, pages]."""
    inside = torch.arange(PAGE, device=table.device)
    return (table.long()[:, :, None] * PAGE + inside).reshape(table.shape[0], -1)[:, :tokens]
