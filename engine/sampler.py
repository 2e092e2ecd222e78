"""Drawing tokens: every row with its own temperature, cuts and seed.

Random numbers are counted, not stateful: the number of a token is a function of (seed, index in the answer) alone, so a draw depends
neither on the rows around it, nor on the step it happens in, nor on a restart. Knows nothing of streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from askmany.engine.request import Sampling

NUCLEUS_FIRST = 512  # tokens in which most nuclei end: finding the largest few is much cheaper than sorting a vocabulary
FLAT_ROWS = 16
_MASK = (1 << 64) - 1


@dataclass(slots=True)  # not frozen: one for each row of each step
class Drawn:
    """A token with its log-probability (nats, of the model's own distribution) and the gap between the two largest logits."""

    token_id: int
    logprob: float
    margin: float


def draw(logits: Tensor, samplings: list[Sampling], indices: list[int], totals: Tensor | None = None) -> list[Drawn]:
    """One token for each row of `logits` [N, V]; row i is answer token `indices[i]` of a stream that samples by `samplings[i]`.

    Greedy rows take the largest logit (the lowest id among equals). Others: logits / temperature, then `top_k`, then `top_p` over what
    is left (tokens as likely as the last one kept are kept), then the token at which the cumulated probability, in the order of ids, passes
    the row's random number. Where illegal tokens were set to -inf, `totals` [N] are the log-sum-exps of the rows before that.
    """
    logits = logits.float()
    best = torch.topk(logits, min(2, logits.shape[1]), dim=-1)
    chosen, margins = best.indices[:, 0], best.values[:, 0] - best.values[:, -1]
    _settle_ties(logits, chosen, margins)
    sampled = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if sampled:
        chosen[sampled] = _sample(logits[sampled], [samplings[row] for row in sampled], [indices[row] for row in sampled])
    picked = logits.gather(1, chosen[:, None])[:, 0]
    logprobs = (picked - (torch.logsumexp(logits, dim=-1) if totals is None else totals)).tolist()
    return [Drawn(*values) for values in zip(chosen.tolist(), logprobs, margins.tolist(), strict=True)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), evenly spread over (seed, index): two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014)."""
    return (_mix(_mix(seed & _MASK) + index) >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _settle_ties(logits: Tensor, chosen: Tensor, margins: Tensor) -> None:
    """Where the two largest logits are equal, choose the lowest id that has them."""
    for row in torch.nonzero(margins == 0)[:, 0].tolist():
        chosen[row] = torch.nonzero(logits[row] == logits[row].max())[0, 0]


def _sample(logits: Tensor, samplings: list[Sampling], indices: list[int]) -> Tensor:
    """[N] int64 token ids for rows that all have a temperature."""
    temperatures = _column([s.temperature for s in samplings], logits.device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperatures
    weights = _keep_top_k(scaled, [s.top_k for s in samplings]).exp_()  # [N, V], the largest is 1
    weights = _keep_top_p(weights, [s.top_p for s in samplings])
    cumulated = torch.cumsum(weights, dim=-1)
    numbers = _column([uniform(s.seed, index) for s, index in zip(samplings, indices, strict=True)], logits.device)
    return (cumulated <= numbers * cumulated[:, -1:]).sum(dim=-1)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _keep_top_k(scaled: Tensor, top_ks: list[int]) -> Tensor:
    """Logits with all but each row's `top_k` largest at -inf; a row with `top_k` 0 stays."""
    rows = [row for row, k in enumerate(top_ks) if 0 < k < scaled.shape[1]]
    if rows:
        counts = torch.tensor([top_ks[row] for row in rows], device=scaled.device)
        cut = scaled[rows]
        least = torch.topk(cut, max(top_ks[row] for row in rows), dim=-1).values.gather(1, counts[:, None] - 1)
        scaled[rows] = cut.masked_fill_(cut < least, float("-inf"))
    return scaled


def _keep_top_p(weights: Tensor, top_ps: list[float]) -> Tensor:
    """Weights with all but each row's nucleus at 0: the fewest tokens, likeliest first, whose share reaches `top_p`."""
    rows = [row for row, top_p in enumerate(top_ps) if top_p < 1]
    if rows:
        cut = weights[rows]
        wanted = _column([top_ps[row] for row in rows], weights.device) * torch.cumsum(cut, dim=-1)[:, -1:]  # added up in one order always
        weights[rows] = cut.masked_fill_(cut < _least_of_nuclei(cut, wanted), 0.0)
    return weights


def _least_of_nuclei(weights: Tensor, wanted: Tensor) -> Tensor:
    """[N, 1]: the weight of the last token of each row's nucleus, whose weights add up to `wanted` [N, 1]. Looks at whole rows only where
    the largest weights do not reach it."""
    least, reached = _last_wanted(weights, wanted, min(NUCLEUS_FIRST, weights.shape[1]))
    for flat in torch.split(torch.nonzero(~reached)[:, 0], FLAT_ROWS):
        if len(flat):  # sorted some at a time: a sort takes several times their memory
            least[flat] = _last_wanted(weights[flat], wanted[flat], weights.shape[1])[0]
    return least


def _last_wanted(weights: Tensor, wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row's `count` largest weights, the one with which they reach `wanted`, or else the last [N, 1]; whether they do [N]."""
    ordered = torch.topk(weights, count, dim=-1).values
    cumulated = torch.cumsum(ordered, dim=-1)
    last = (cumulated < wanted).sum(dim=-1, keepdim=True).clamp_(max=count - 1)
    return ordered.gather(1, last), cumulated[:, -1] >= wanted[:, 0]
