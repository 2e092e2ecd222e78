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


TYPICAL_TOKENS = 8192  # of a node whose length is not known


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


def choose(
    shape: AttentionShape, node_rows: int, rows_per_stream: int, capability: tuple[int, int] | None, node_tokens: int | None = None
) -> Tiles:
    """Tiles for nodes of `node_tokens` tokens (None: not known) read by `node_rows` tokens at once and streams of `rows_per_stream` tokens;
    `capability` None: no GPU."""
    return candidates(shape, node_rows, rows_per_stream, capability, node_tokens)[0]


def candidates(
    shape: AttentionShape, node_rows: int, rows_per_stream: int, capability: tuple[int, int] | None, node_tokens: int | None = None
) -> list[Tiles]:
    """What is worth timing, the best guess first; `node_tokens` changes their order alone."""
    if capability is not None and capability[0] == 9 and hopper_serves(shape):
        rows = max(node_rows, rows_per_stream) * shape.group
        known = node_tokens if rows_per_stream == 1 else None  # what is known of lengths was measured with single rows
        return _hopper_candidates(shape, rows, rows_per_stream, known or TYPICAL_TOKENS)
    return _plain_candidates(shape, node_rows, rows_per_stream, capability)


def hopper_serves(shape: AttentionShape) -> bool:
    """Whether the warp-specialised kernel can run this shape: whole boxes of 16-bit vectors of 128 bytes or a multiple."""
    return shape.dtype.itemsize == 2 and shape.head_dim in (64, 128, 256) and shape.page_size >= 16


def _hopper_candidates(shape: AttentionShape, rows: int, rows_per_stream: int, tokens: int) -> list[Tiles]:
    """`small`: two programs a multiprocessor. `long`: one with long tiles. `short`: one that leaves room for the next layer's, which copies
    meanwhile. `pair`: two groups share each tile. Register caps of the one-group tiles leave room for the programs of the merge, which then
    wait beside these instead of behind them."""
    wide = shape.head_dim == 256
    pair = _hopper(shape, rows_per_stream, groups=2, keys=64 if wide else 128, stages=2)
    if wide:  # two programs do not fit a multiprocessor
        return [pair, _hopper(shape, rows_per_stream, groups=1, keys=64, stages=2)]
    long = _hopper(shape, rows_per_stream, groups=1, keys=128, stages=3, registers=144)
    small = _hopper(shape, rows_per_stream, groups=1, keys=64, stages=3, per_sm=2, registers=96)
    short = _hopper(shape, rows_per_stream, groups=1, keys=64, stages=2, registers=96)
    offered = {"small": small, "long": long} | ({"pair": pair} if rows > 32 else {"short": short})
    best = offered.pop(_hopper_kind(rows, shape.kv_heads, tokens))
    return [best, *offered.values()]


def _hopper_kind(rows: int, kv_heads: int, tokens: int) -> str:
    """Measured on an H200 at D = 128 with heads 32/32, 28/4 and 12/2, documents of 512 to 32k tokens and 4 to 256 streams: with 96 own keys
    on average 0.6 % behind the best of the four and 8 % at most, with 1,024 1.1 and 7 %; without own keys, which no step lacks, 2.6 and
    24 % (12/2 heads, 512 tokens, 64 streams). `jobs/measurements/tiles-h200.json` has the times (run 10)."""
    if rows <= 32:  # bound by latency and memory
        if tokens >= 16384:
            return "short" if kv_heads >= 4 else "long"
        if rows * kv_heads <= 64:
            return "short"
        return "long" if kv_heads < 16 and tokens <= 4096 else "small"
    if rows <= 64:  # one tile, nearly full
        return "small" if kv_heads >= 16 and tokens <= 512 else "long"
    if rows * kv_heads <= 2048:
        return "long" if rows * kv_heads <= 256 or (rows * kv_heads <= 512 and tokens <= 2048) else "small"
    return "small" if tokens <= 4096 else "pair"  # bound by arithmetic, where documents weigh more than own keys


def _hopper(
    shape: AttentionShape, rows_per_stream: int, *, groups: int, keys: int, stages: int, per_sm: int = 1, registers: int | None = None
) -> Tiles:
    heads = min(single_heads(shape, rows_per_stream, 64), keys // 16)
    rows = 64 * groups
    return Tiles(rows, keys, stages, 4, per_sm, rows, keys, heads, stages, False, registers, groups=groups)


def _plain_candidates(shape: AttentionShape, node_rows: int, rows_per_stream: int, capability: tuple[int, int] | None) -> list[Tiles]:
    """sm_90 measured on an H200; sm_80 (A100), sm_86 (A6000) and all others by arithmetic, not yet measured there: from shared memory, and
    from the registers that the compiler needs (16-bit tiles spill next to none)."""
    hopper = capability is not None and capability[0] == 9
    most = _most_rows(shape)
    rows, single_rows = (min(most, max(16, _power_of_two(count * shape.group))) for count in (node_rows, rows_per_stream))
    heads = single_heads(shape, rows_per_stream, single_rows)
    found = []
    for stages in (3, 2):
        for tall in (rows, rows // 2):
            tallest = max(tall, single_rows)
            keys = _plain_keys(shape, tallest, hopper)
            if tall >= 16 and _fits(shape, tallest, keys, stages, capability):
                descriptors = hopper and shape.dtype != torch.float32 and shape.page_size % keys == 0
                warps = 8 if tallest == 128 or (tallest == 64 and shape.head_dim > 128) else 4
                per_sm = 2 if tall < 128 and _fits(shape, tall, keys, 2 * stages, capability) else 1
                found.append(Tiles(tall, keys, stages, warps, per_sm, single_rows, max(keys, heads), heads, 2, descriptors))
    return found or [Tiles(16, 32, 1, 4, 1, 16, max(32, heads), single_heads(shape, rows_per_stream, 16), 1, False)]


def _most_rows(shape: AttentionShape) -> int:
    """Rows whose sums still fit the registers; ieee products of fp32 run on the plain cores and take more of them."""
    wide = shape.head_dim > 128
    if shape.dtype == torch.float32:
        return 16 if wide else 32
    return 64 if wide else 128


def _plain_keys(shape: AttentionShape, rows: int, hopper: bool) -> int:
    """Key rows a tile: before Hopper, scores lie in registers beside the sums."""
    wide = shape.head_dim > 128
    if shape.dtype == torch.float32:
        return 16 if wide else 32
    return 32 if wide or (rows == 128 and shape.head_dim > 64 and not hopper) else 64


def _power_of_two(count: int) -> int:
    return 1 << (max(count, 1) - 1).bit_length()


SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227}  # KiB a program may use


def _fits(shape: AttentionShape, rows: int, keys: int, stages: int, capability: tuple[int, int] | None) -> bool:
    """Whether queries and the K and V tiles in flight fit the shared memory of one program."""
    vector = _power_of_two(shape.head_dim) * shape.dtype.itemsize
    return (rows + 2 * keys * stages) * vector <= SHARED_MEMORY.get(capability or (9, 0), 99) * 1024
