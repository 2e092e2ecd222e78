"""Dense-mask attention in fp64, written straight from the visibility rule: the judge of every kernel.

Knows nothing of pages, slots, plans or tiles: it sees tokens with their keys and values side by side, so no index code is shared with
what it judges. Slow and obvious on purpose; `reference.py` says what each operation means, this says what the answer is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EVERYONE = -1


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where tokens stand, one entry each, all [N] int64. In `document`, `group` and `stream` EVERYONE marks a token that every document,
    every question group or every stream may see: a document's token has stream EVERYONE, an instruction's document EVERYONE too."""

    document: Tensor
    group: Tensor
    stream: Tensor
    position: Tensor

    def __len__(self) -> int:
        return int(self.position.shape[0])

    def take(self, index: Tensor) -> Tokens:
        """The tokens at `index` (int64 or bool)."""
        return Tokens(self.document[index], self.group[index], self.stream[index], self.position[index])


def visible_by_rule(queries: Tokens, keys: Tokens) -> Tensor:
    """[Q, K] bool: a key is visible iff causal and (sid_k == -1 or sid_k == sid_q), and likewise for its group and its document."""
    causal = keys.position[None, :] <= queries.position[:, None]
    return causal & _shared(queries.document, keys.document) & _shared(queries.group, keys.group) & _shared(queries.stream, keys.stream)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """fp64 attention of `q` [Q, HQ, D] over `k`, `v` [K, HKV, D] under `visible` [Q, K] bool.

    Returns output [Q, HQ, D] and natural log-sum-exp [Q, HQ], both fp64; 0 and -inf for a row that sees nothing. One query head at a
    time, so that hundreds of rows and hundreds of thousands of keys fit in memory.
    """
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(rows, heads, dim, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64, device=q.device)
    blind = ~visible.any(dim=1)  # [Q]
    if k.shape[0] == 0 or bool(blind.all()):
        return out, lse
    for head in range(heads):
        k_head, v_head = k[:, head // group].double(), v[:, head // group].double()  # [K, D]
        scores = (q[:, head].double() @ k_head.T * scale).masked_fill(~visible, float("-inf"))  # [Q, K]
        lse[:, head] = torch.logsumexp(scores, dim=-1)
        out[:, head] = torch.softmax(scores, dim=-1).masked_fill(blind[:, None], 0.0) @ v_head
    return out, lse


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want` (0 when both are empty or zero); NaN wherever `got` holds one."""
    difference, size = torch.linalg.norm(got.double() - want.double()), torch.linalg.norm(want.double())
    return float(difference if size == 0 else difference / size)


def lse_error(got: Tensor, want: Tensor) -> float:
    """Largest |got - want| / max(1, |want|) of log-sum-exps, inf where exactly one of them is -inf; 0 for no rows."""
    if want.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    empty = torch.isneginf(want)
    if bool((torch.isneginf(got) != empty).any()):
        return float("inf")
    difference = (got - want).abs() / want.abs().clamp(min=1.0)
    return float(difference.masked_fill(empty, 0.0).max())


def _shared(of_query: Tensor, of_key: Tensor) -> Tensor:
    return (of_key == EVERYONE)[None, :] | (of_key[None, :] == of_query[:, None])
