"""Attention cases for kernel tests: a grid of shapes, and for each a world of tokens laid out in poisoned, scattered pages.

A world holds the same tokens twice: side by side with their places (for the oracle) and as caches, slots and batches (for kernels).
"""

from __future__ import annotations

import itertools
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
    """A pairwise-covering sample of `factors` in which no world holds more than `limit_values` cached numbers and no
    document more than twice as many scores."""

    def feasible(choice: Choice) -> bool:
        case = Case(**choice)  # type: ignore[arg-type]
        length = 190 if case.private == "ragged" else int(case.private)
        own = case.streams * (length + case.rows)
        keys = case.documents * (case.document + own) + case.loners * (length + case.rows)
        scores = case.streams * case.rows * case.heads[0] * (case.document + own)
        return keys * case.heads[1] * case.head_dim <= limit_values and scores <= 2 * limit_values

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
    nodes, streams = _family(case, random.Random(seed))
    runs = [_Run(n.document, n.group, EVERYONE, n.start, n.length) for n in nodes]
    runs += [_Run(s.document, s.group, sid, s.start, s.keys) for sid, s in enumerate(streams)]
    row_runs = [_Run(s.document, s.group, sid, s.start + s.cached, s.rows) for sid, s in enumerate(streams)]
    firsts = list(itertools.accumulate((r.count for r in runs), initial=0))
    row_starts = list(itertools.accumulate((s.rows for s in streams), initial=0))
    row_keys = [firsts[len(nodes) + sid] + s.cached + i for sid, s in enumerate(streams) for i in range(s.rows)]
    spans = [run.count for run in runs]
    world, slots = _lay_out(case, _tokens(row_runs), torch.tensor(row_keys), _tokens(runs), spans, seed, device)
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
    _, streams = _family(case, random.Random(seed))
    generator = torch.Generator().manual_seed(seed)
    keys, rows, row_keys, spans, counts = [], [], [], [], []
    total = 0
    for document in sorted({s.document for s in streams}):
        mine = [(sid, s) for sid, s in enumerate(streams) if s.document == document]
        prefix = _tokens([_Run(document, EVERYONE, EVERYONE, 0, case.document)])
        cached = _shuffled([_Run(document, EVERYONE, sid, case.document, s.cached) for sid, s in mine], generator)
        news = _shuffled([_Run(document, EVERYONE, sid, case.document + s.cached, s.rows) for sid, s in mine], generator)
        keys += [prefix, cached, news]
        rows.append(news)
        total += len(prefix) + len(cached)
        row_keys.append(total + torch.arange(len(news)))
        total += len(news)
        spans.append(len(prefix) + len(cached) + len(news))
        counts.append(len(news))
    world, slots = _lay_out(case, _join(rows), torch.cat(row_keys), _join(keys), spans, seed, device)
    slot_sid = torch.full((world.k_cache.shape[0],), 10**6, dtype=torch.int32, device=device)
    slot_sid[world.key_slots] = world.keys.stream.to(torch.int32)
    starts = list(itertools.accumulate(counts, initial=0))
    items = tuple(MaskedItem(starts[i], count, slots[i]) for i, count in enumerate(counts))
    return world, MaskedBatch(items, world.queries.stream.to(torch.int32), slot_sid)


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


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` consecutive tokens from position `start` on."""

    document: int
    group: int
    stream: int
    start: int
    count: int


def _tokens(runs: list[_Run]) -> Tokens:
    """The tokens of `runs`, one run after the other, on the CPU."""
    table = torch.tensor([[r.document, r.group, r.stream, r.start] for r in runs]).reshape(-1, 4)
    counts = torch.tensor([r.count for r in runs], dtype=torch.int64)
    each = table.repeat_interleave(counts, dim=0)
    ahead = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return Tokens(each[:, 0], each[:, 1], each[:, 2], each[:, 3] + torch.arange(each.shape[0]) - ahead)


def _shuffled(runs: list[_Run], generator: torch.Generator) -> Tokens:
    """The tokens of `runs` in random order that keeps each run's own order."""
    tokens = _tokens(runs)
    order = torch.randperm(len(tokens), generator=generator)
    owner = torch.arange(len(runs)).repeat_interleave(torch.tensor([r.count for r in runs]))[order]
    back = torch.empty_like(order)
    back[torch.argsort(owner, stable=True)] = torch.arange(len(tokens))  # place i of the shuffle belongs to its run's next token
    return tokens.take(back)


def _join(parts: list[Tokens]) -> Tokens:
    return Tokens(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Tokens)))


def _lay_out(
    case: Case, queries: Tokens, row_keys: Tensor, keys: Tokens, spans: list[int], seed: int, device: str
) -> tuple[World, list[Tensor]]:
    """Draw the numbers and put every span of keys into pages of its own, pages scattered over a pool a quarter larger, NaN elsewhere."""
    generator = torch.Generator(device=device).manual_seed(seed)
    nobody = torch.full((case.dead,), EVERYONE)
    queries = _join([queries, Tokens(nobody - 1, nobody, nobody, nobody)])
    own = torch.cat([row_keys.to(torch.int64), nobody]).to(device)
    (hq, hkv), dim, dtype = case.heads, case.head_dim, case.torch_dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    q, k, v = normal(len(queries), hq, dim), normal(len(keys), hkv, dim), normal(len(keys), hkv, dim)
    if case.peak and len(keys) and len(queries):
        q = sharpen(q, k, case)
    slots, pool = _scattered(spans, case.page_size, seed, device)
    key_slots = torch.cat(slots)
    k_cache = torch.full((pool, hkv, dim), float("nan"), dtype=dtype, device=device)
    v_cache = k_cache.clone()
    k_cache[key_slots], v_cache[key_slots] = k, v
    return World(case, q, _to(queries, device), k, v, _to(keys, device), key_slots, own, k_cache, v_cache), slots


def _scattered(spans: list[int], page_size: int, seed: int, device: str) -> tuple[list[Tensor], int]:
    """Slots of each span, in pages drawn at random from a pool a quarter larger than needed; the pool's slot count."""
    needed = [-(-count // page_size) for count in spans]
    pages = torch.randperm(sum(needed) * 5 // 4 + 2, generator=torch.Generator().manual_seed(seed))
    slots, taken = [], 0
    for count, page_count in zip(spans, needed, strict=True):
        mine = pages[taken : taken + page_count]
        taken += page_count
        slots.append((mine[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:count].to(device))
    return slots, pages.shape[0] * page_size


def _to(tokens: Tokens, device: str) -> Tokens:
    return Tokens(*(getattr(tokens, f.name).to(device) for f in fields(Tokens)))


def sharpen(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """Scale `q` so that the scores of each head reach +-`case.peak` (up to rounding)."""
    group = q.shape[1] // k.shape[1]
    sample = k[:: max(1, k.shape[0] // 4096)].float().repeat_interleave(group, dim=1)
    top = torch.einsum("thd,nhd->htn", q.float(), sample).abs().amax(dim=(1, 2)) * case.scale  # [HQ]
    return (q.float() * (case.peak / top)[None, :, None]).to(q.dtype)


def id_of(case: Case) -> str:
    return str(case)


assert {f.name for f in fields(Case)} == set(FACTORS)
