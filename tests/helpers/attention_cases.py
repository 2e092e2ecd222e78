"""Attention cases for kernel tests: a grid of shapes, and for each a world of tokens laid out in poisoned, scattered pages.

A world holds the same tokens twice: side by side with their places (for the oracle) and as caches, slots and batches (for kernels).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from askmany.kernels.layout import MaskedBatch, MaskedItem, PrivateItem, SharedItem, SplitBatch
from askmany.kernels.oracle import EVERYONE, Tokens, dense_attention, visible_by_rule
from tests.helpers.covering import Choice, pairwise

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRIVATE_LENGTHS = (0, 1, 2, 64, 65, 1000)


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the grid. `private` is the count of a stream's own cached keys, or "ragged"; `rows` the new tokens each stream feeds on
    top of them; `dead` padding rows behind all others; `peak` the largest score (0: whatever normal numbers give)."""

    dtype: str
    head_dim: int
    heads: tuple[int, int]
    streams: int
    document: int
    private: int | str
    page_size: int
    documents: int
    loners: int
    levels: int
    rows: int
    dead: int
    peak: int

    def __str__(self) -> str:
        hq, hkv = self.heads
        peak = f"-peak{self.peak}" if self.peak else ""
        return (
            f"{self.dtype}-D{self.head_dim}-H{hq}x{hkv}-P{self.streams}-L{self.document}-priv{self.private}-page{self.page_size}"
            f"-docs{self.documents}+{self.loners}-lv{self.levels}-rows{self.rows}-dead{self.dead}{peak}"
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


FACTORS: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "fp32", "fp16"),
    "head_dim": (64, 80, 96, 128, 256),
    "heads": ((32, 32), (28, 4), (12, 2), (9, 3), (16, 1)),
    "streams": (1, 2, 7, 16, 64, 200),
    "document": (0, 1, 63, 64, 65, 511, 4097, 32768),
    "private": (*PRIVATE_LENGTHS, "ragged"),
    "page_size": (1, 16, 64),
    "documents": (1, 2, 5),
    "loners": (0, 3),
    "levels": (1, 2, 3),
    "rows": (1, 2, 4),
    "dead": (0, 5),
    "peak": (0, 80),
}
# for the interpreter, which cannot multiply bf16
SMALL_FACTORS: dict[str, tuple[object, ...]] = FACTORS | {
    "dtype": ("fp32", "fp16"),
    "head_dim": (64, 80, 128),
    "heads": ((4, 4), (7, 1), (6, 2)),
    "streams": (1, 2, 7),
    "document": (0, 1, 63, 65),
    "private": (0, 1, 2, 65, "ragged"),
    "documents": (1, 2),
}


def cases(factors: dict[str, tuple[object, ...]], *, seed: int, at_least: int, limit_values: int) -> list[Case]:
    """A pairwise-covering sample of `factors` in which no world holds more than `limit_values` cached numbers."""

    def feasible(choice: Choice) -> bool:
        case = Case(**choice)  # type: ignore[arg-type]
        length = 190 if case.private == "ragged" else int(case.private)
        keys = case.documents * case.document + (case.documents * case.streams + case.loners) * (length + case.rows)
        return keys * case.heads[1] * case.head_dim <= limit_values

    return [Case(**choice) for choice in pairwise(factors, feasible, seed=seed, at_least=at_least)]  # type: ignore[arg-type]


@dataclass(slots=True)
class World:
    """Everything a kernel and its judge need: `q` [T, HQ, D], `k`, `v` [N, HKV, D] of the tokens `keys`, and where they lie."""

    case: Case
    q: Tensor
    queries: Tokens  # [T]; a padding row has document -2, which sees nothing
    k: Tensor
    v: Tensor
    keys: Tokens  # [N]
    key_slots: Tensor  # [N] int64
    row_keys: Tensor  # [T] int64, index among the keys of the row's own token, -1 for a padding row
    k_cache: Tensor  # [S, HKV, D], NaN wherever no token lies
    v_cache: Tensor

    @property
    def live(self) -> Tensor:
        return self.queries.document != -2

    def truth(self) -> tuple[Tensor, Tensor]:
        """fp64 output and log-sum-exp of every row, one document at a time."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        lse = torch.full(self.q.shape[:2], float("-inf"), dtype=torch.float64, device=self.q.device)
        for rows, keys, visible in self.parts():
            out[rows], lse[rows] = dense_attention(self.q[rows], self.k[keys], self.v[keys], visible, self.case.scale)
        return out, lse

    def sdpa(self, dtype: torch.dtype) -> Tensor:
        """torch's scaled_dot_product_attention in `dtype` under the same boolean mask; rows that see nothing are 0."""
        out = torch.zeros(self.q.shape, dtype=dtype, device=self.q.device)
        group = self.q.shape[1] // self.k.shape[1]
        for rows, keys, visible in self.parts():
            q = self.q[rows].to(dtype).transpose(0, 1)  # [HQ, R, D]
            k = self.k[keys].to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)
            v = self.v[keys].to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)
            seeing = visible.any(dim=1)
            if bool(seeing.any()):
                part = torch.nn.functional.scaled_dot_product_attention(
                    q[None][:, :, seeing], k[None], v[None], attn_mask=visible[seeing][None, None], scale=self.case.scale
                )
                out[rows[seeing]] = part[0].transpose(0, 1)
        return out

    def parts(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(rows, keys, visible [R, K]) of each document: the world cut where nothing crosses, to keep masks small."""
        found = []
        for document in sorted(set(self.queries.document.tolist())):
            rows = torch.nonzero(self.queries.document == document)[:, 0]
            near = (self.keys.document == document) | (self.keys.document == EVERYONE)
            keys = torch.nonzero(near)[:, 0]
            if document != -2:
                found.append((rows, keys, visible_by_rule(self.queries.take(rows), self.keys.take(keys))))
        return found


@dataclass(slots=True)
class _Stream:
    document: int
    group: int
    start: int  # position of its first token
    cached: int
    rows: int

    @property
    def keys(self) -> int:
        return self.cached + self.rows


@dataclass(slots=True)
class _Node:
    document: int
    group: int
    start: int
    length: int


def split_world(case: Case, seed: int, device: str) -> tuple[World, SplitBatch]:
    """A world for the split layout: instruction (levels 2 and 3), documents, question groups (level 3), streams; rows stream by stream."""
    draw = random.Random(seed)
    nodes, streams = _family(case, draw)
    keys: list[tuple[int, int, int, int]] = []
    rows: list[tuple[int, int, int, int]] = []
    row_keys: list[int] = []
    spans = []  # (first key, count) of nodes, then streams
    for node in nodes:
        spans.append((len(keys), node.length))
        keys += [(node.document, node.group, EVERYONE, node.start + i) for i in range(node.length)]
    row_starts = []
    for sid, stream in enumerate(streams):
        spans.append((len(keys), stream.keys))
        first = len(keys)
        keys += [(stream.document, stream.group, sid, stream.start + i) for i in range(stream.keys)]
        row_starts.append(len(rows))
        for i in range(stream.rows):
            rows.append((stream.document, stream.group, sid, stream.start + stream.cached + i))
            row_keys.append(first + stream.cached + i)
    world, slots = _lay_out(case, rows, row_keys, keys, spans, seed, device)
    shared = []
    for number, node in enumerate(nodes):
        below = [
            row_starts[i] + r
            for i, s in enumerate(streams)
            if node.document in (EVERYONE, s.document) and node.group in (EVERYONE, s.group)
            for r in range(s.rows)
        ]
        if below and node.length:
            shared.append(SharedItem(torch.tensor(below, device=device), slots[number]))
    private = [PrivateItem(row_starts[i], s.rows, slots[len(nodes) + i]) for i, s in enumerate(streams)]
    return world, SplitBatch(tuple(shared), tuple(private))


def masked_world(case: Case, seed: int, device: str) -> tuple[World, MaskedBatch]:
    """A world for the interleaved layout: one request a document (and a loner), its streams' cached tokens shuffled together, then the
    step's new tokens. Instruction and groups do not exist here: their tokens are the document's."""
    draw = random.Random(seed)
    _, streams = _family(case, draw)
    keys: list[tuple[int, int, int, int]] = []
    rows: list[tuple[int, int, int, int]] = []
    row_keys: list[int] = []
    spans, bounds = [], []
    for document in sorted({s.document for s in streams}):
        first, row_start = len(keys), len(rows)
        keys += [(document, EVERYONE, EVERYONE, i) for i in range(case.document)]
        mine = [(sid, s) for sid, s in enumerate(streams) if s.document == document]
        turns = [sid for sid, s in mine for _ in range(s.cached)]
        draw.shuffle(turns)
        fed = dict.fromkeys((sid for sid, _ in mine), case.document)
        for sid in turns:
            keys.append((document, EVERYONE, sid, fed[sid]))
            fed[sid] += 1
        news = [sid for sid, s in mine for _ in range(s.rows)]
        draw.shuffle(news)
        for sid in news:
            rows.append((document, EVERYONE, sid, fed[sid]))
            row_keys.append(len(keys))
            keys.append(rows[-1])
            fed[sid] += 1
        spans.append((first, len(keys) - first))
        bounds.append((row_start, len(rows) - row_start))
    world, slots = _lay_out(case, rows, row_keys, keys, spans, seed, device)
    slot_sid = torch.full((world.k_cache.shape[0],), 10**6, dtype=torch.int32, device=device)
    slot_sid[world.key_slots] = world.keys.stream.to(torch.int32)
    items = tuple(MaskedItem(start, count, slots[i]) for i, (start, count) in enumerate(bounds))
    return world, MaskedBatch(items, world.queries.stream.to(torch.int32), slot_sid)


def poison_value(dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


def _family(case: Case, draw: random.Random) -> tuple[list[_Node], list[_Stream]]:
    instruction = 37 if case.levels >= 2 else 0
    nodes = [_Node(EVERYONE, EVERYONE, 0, instruction)] if instruction else []
    streams: list[_Stream] = []
    group_number = 0
    for document in range(case.documents):
        count = case.streams if document == 0 else draw.randint(1, case.streams)
        nodes.append(_Node(document, EVERYONE, instruction, case.document))
        groups = [EVERYONE]
        start = instruction + case.document
        if case.levels == 3:
            groups = [group_number, group_number + 1]
            group_number += 2
            nodes += [_Node(document, g, start, 29) for g in groups]
        for i in range(count):
            group = groups[i * len(groups) // count]
            streams.append(_Stream(document, group, start + (29 if case.levels == 3 else 0), _private(case, draw), case.rows))
    for i in range(case.loners):
        streams.append(_Stream(case.documents + i, EVERYONE, instruction, _private(case, draw), case.rows))
    return nodes, streams


def _private(case: Case, draw: random.Random) -> int:
    return draw.choice(PRIVATE_LENGTHS) if case.private == "ragged" else int(case.private)


def _tokens(entries: list[tuple[int, int, int, int]], device: str) -> Tokens:
    table = torch.tensor(entries, dtype=torch.int64, device=device).reshape(-1, 4)
    return Tokens(*table.T.contiguous())


def _lay_out(
    case: Case,
    rows: list[tuple[int, int, int, int]],
    row_keys: list[int],
    keys: list[tuple[int, int, int, int]],
    spans: list[tuple[int, int]],
    seed: int,
    device: str,
) -> tuple[World, list[Tensor]]:
    """Draw the numbers and put every span of keys into pages of its own, pages scattered over a pool a quarter larger, NaN elsewhere."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = rows + [(-2, EVERYONE, EVERYONE, -1)] * case.dead
    row_keys = row_keys + [-1] * case.dead
    (hq, hkv), dim, dtype = case.heads, case.head_dim, case.torch_dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    q, k, v = normal(len(rows), hq, dim), normal(len(keys), hkv, dim), normal(len(keys), hkv, dim)
    if case.peak and len(keys) and len(rows):
        q = sharpen(q, k, case)
    size = case.page_size
    needed = [-(-count // size) for _, count in spans]
    pool_pages = sum(needed) * 5 // 4 + 2
    pages = torch.randperm(pool_pages, generator=torch.Generator().manual_seed(seed)).to(device)
    slots, key_slots, taken = [], torch.empty(len(keys), dtype=torch.int64, device=device), 0
    for (first, count), page_count in zip(spans, needed, strict=True):
        mine = pages[taken : taken + page_count]
        taken += page_count
        here = (mine[:, None] * size + torch.arange(size, device=device)[None, :]).reshape(-1)[:count]
        slots.append(here)
        key_slots[first : first + count] = here
    k_cache = poison_value(dtype, device).repeat(pool_pages * size, hkv, dim)
    v_cache = k_cache.clone()
    k_cache[key_slots], v_cache[key_slots] = k, v
    own = torch.tensor(row_keys, dtype=torch.int64, device=device)
    return World(case, q, _tokens(rows, device), k, v, _tokens(keys, device), key_slots, own, k_cache, v_cache), slots


def sharpen(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """Scale `q` so that the scores of each head reach +-`case.peak` (up to rounding)."""
    group = q.shape[1] // k.shape[1]
    sample = k[:: max(1, k.shape[0] // 4096)].float().repeat_interleave(group, dim=1)
    top = torch.einsum("thd,nhd->htn", q.float(), sample).abs().amax(dim=(1, 2)) * case.scale  # [HQ]
    return (q.float() * (case.peak / top)[None, :, None]).to(q.dtype)


def id_of(case: Case) -> str:
    return str(case)


assert {f.name for f in fields(Case)} == set(FACTORS)
