"""Which tiles the stream-attention kernel uses: a choice per GPU generation, head shape and rows a node. No measuring here, only the table.

Each choice says where it comes from: `measured` on that GPU, or `arithmetic` from its shared memory and multiprocessor count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a kernel is compiled for."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are no multiple of {self.kv_heads} KV heads")
        if not 16 <= self.head_dim <= 256:
            raise ValueError(f"head_dim must be 16 to 256, not {self.head_dim}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, not {self.page_size}")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, not {self.dtype}")

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tiles:
    """Compile-time sizes of one launch. `rows` and `keys` tile a shared node; the `single_` ones tile one stream's own keys."""

    rows: int  # query rows (token x query head of the group) a tile, 16 to 128
    keys: int  # key rows a tile
    stages: int  # tiles in flight
    warps: int
    per_sm: int  # persistent programs a multiprocessor
    single_rows: int
    single_keys: int
    single_heads: int  # KV heads an item
    single_stages: int
    descriptors: bool  # read whole pages through tensor descriptors (TMA)
    registers: int | None = None  # cap per thread
    overhead: int = 4  # fixed cost of an item, in key tiles
    groups: int = 0  # consumer warp groups of the Hopper kernel, 64 rows each; 0: the plain kernel


def single_heads(shape: AttentionShape, rows_per_stream: int, single_rows: int) -> int:
    """KV heads that fit one row tile of a stream: the largest power of two, at most all heads."""
    heads = 1
    while heads * 2 * shape.group * rows_per_stream <= single_rows and heads < shape.kv_heads:
        heads *= 2
    return heads


def choose(shape: AttentionShape, node_rows: int, rows_per_stream: int, capability: tuple[int, int] | None) -> Tiles:
    """Tiles for nodes read by `node_rows` tokens at once and streams of `rows_per_stream` tokens; `capability` None: no GPU."""
    if capability is not None and capability[0] == 9 and hopper_serves(shape):
        return _choose_hopper(shape, node_rows, rows_per_stream)
    return _choose_plain(shape, node_rows, rows_per_stream, capability)


def hopper_serves(shape: AttentionShape) -> bool:
    """Whether the warp-specialised kernel can run this shape: whole boxes of 16-bit vectors of 128 bytes or a multiple."""
    return shape.dtype.itemsize == 2 and shape.head_dim in (64, 128, 256) and shape.page_size >= 16


def _choose_hopper(shape: AttentionShape, node_rows: int, rows_per_stream: int) -> Tiles:
    """Measured on an H200 with heads 32/32, 28/4 and 12/2 of 128: two groups from 128 rows on, one group twice a multiprocessor below."""
    groups = 2 if max(node_rows, rows_per_stream) * shape.group > 112 else 1
    wide = shape.head_dim == 256
    keys = 64 if wide or groups == 1 else 128
    stages = 2 if wide or groups == 2 else 3
    heads = min(single_heads(shape, rows_per_stream, 64), keys // 16)
    two = groups == 1 and not wide
    return Tiles(
        64 * groups, keys, stages, 4, 2 if two else 1, 64 * groups, keys, heads, stages, False, 128 if two else None, groups=groups
    )


def _choose_plain(shape: AttentionShape, node_rows: int, rows_per_stream: int, capability: tuple[int, int] | None) -> Tiles:
    rows = min(128, max(16, 1 << (max(node_rows * shape.group, 1) - 1).bit_length()))
    single_rows = min(128, max(16, 1 << (max(rows_per_stream * shape.group, 1) - 1).bit_length()))
    wide = shape.head_dim > 128
    if shape.dtype == torch.float32:  # ieee products run on the plain cores: small tiles, or the registers overflow
        rows, single_rows = min(rows, 32), min(single_rows, 32)
        heads = single_heads(shape, rows_per_stream, single_rows)
        return Tiles(rows, 32, 2, 4, 1, single_rows, max(32, heads), heads, 2, False)
    heads = single_heads(shape, rows_per_stream, single_rows)
    keys = 32 if wide else 64
    single_keys = max(32 if wide else 64, heads)
    hopper = capability is not None and capability[0] == 9
    descriptors = hopper and shape.page_size % keys == 0
    warps = 8 if rows == 128 else 4
    return Tiles(rows, keys, 3 if hopper else 2, warps, 2 if rows < 128 else 1, single_rows, single_keys, heads, 2, descriptors)
