"""Which way round: pass-KV or pass-Q, ring or gathered, for the lengths at hand. Every choice comes with its reason.

Rules in the order of trust: a fit to this machine's own measurements of all four ways (`ring_fit`), else the thresholds of
arXiv 2411.01783 with measured or given constants, else message sizes alone. Without a fit, messages no longer than `gather_bytes` go by
all-gather. Pure arithmetic; all ranks that ask the same get the same.

Letters: T new tokens, C cached tokens, N ranks; e bytes of an element; F attention FLOP/s of a rank, B bytes/s between neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from askmany.kernels.ring_fit import Fit

Way = Literal["pass_kv", "pass_q", "gather_kv", "gather_q", "local"]  # local: nothing needs to travel
MOST_GATHERED_BYTES = 1 << 30  # of what is gathered because it is faster, the messages of all ranks together: every rank then holds them
FITTED: tuple[Way, ...] = ("pass_kv", "gather_kv", "pass_q", "gather_q")
GATHER_BYTES = 256 << 10  # an all-gather of so much a rank costs 11 us in a graph over NVLink, as much as an empty one (measured)


@dataclass(frozen=True, slots=True)
class Heads:
    """What travels for a token."""

    q_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def share(self) -> float:
        """2 * HKV / HQ: key and value bytes of a token over its query bytes."""
        return 2 * self.kv_heads / self.q_heads


@dataclass(frozen=True, slots=True)
class Link:
    """Measured constants of a rank: attention FLOP/s, and bytes/s from one rank to the next."""

    flops: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do, by which rule, and the comparison that decided, in numbers."""

    way: Way
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that a choice depends on beside the lengths. Without `link` and `fit` only message sizes count."""

    heads: Heads
    ranks: int
    link: Link | None = None
    fit: Fit | None = None
    gather_bytes: int = GATHER_BYTES

    def choose(self, new_tokens: int, cached_tokens: int) -> Choice:
        """The way for T = `new_tokens` (at least 1) over C = `cached_tokens`, sums over the fused batch."""
        if self.fit is not None:
            return self._fastest(self.fit, new_tokens, cached_tokens)
        passes_q, rule, reason = self._direction(new_tokens, cached_tokens)
        size = self._q_bytes(new_tokens) if passes_q else self._kv_bytes(new_tokens + cached_tokens)
        gathers = size <= self.gather_bytes
        way: Way = ("gather_q" if gathers else "pass_q") if passes_q else ("gather_kv" if gathers else "pass_kv")
        return Choice(way, rule, f"{reason}; message {size} bytes {'<=' if gathers else '>'} {self.gather_bytes}")

    def _fastest(self, fit: Fit, new: int, cached: int) -> Choice:
        """The way that the fit expects to take least time, of those that do not make a rank hold too much."""
        times = fit.seconds(new, cached)
        sizes = {"gather_kv": self._kv_bytes(new + cached), "gather_q": self._q_bytes(new)}
        allowed: list[Way] = [way for way in FITTED if way in times and self.ranks * sizes.get(way, 0) <= MOST_GATHERED_BYTES]
        way = min(allowed, key=lambda way: times[way])
        expected = ", ".join(f"{name} {1e3 * times[name]:.3g} ms" for name in allowed)
        return Choice(way, "fit", f"T = {new}, C = {cached}: by the start-up fit {expected}")

    def _direction(self, new: int, cached: int) -> tuple[bool, str, str]:
        """(pass the queries?, rule, reason)."""
        miss, share = new / (new + cached), self.heads.share
        if self.link is None:
            return miss <= share, "equation 1", f"T/(T+C) = {miss:.4f} {'<=' if miss <= share else '>'} 2*HKV/HQ = {share:.4f}"
        hidden = hidden_kv_tokens(self.heads, self.ranks, self.link)
        if new >= hidden:
            return False, "equation 2", f"T = {new} >= {hidden:.0f}: attention hides the key blocks"
        bound = corrected_share(new, self.heads, self.ranks, self.link)
        return miss <= bound, "equation 5", f"T/(T+C) = {miss:.4f} {'<=' if miss <= bound else '>'} {bound:.4f} with the way home"

    def _q_bytes(self, new: int) -> int:
        return -(-new // self.ranks) * self.heads.q_heads * self.heads.head_dim * self.heads.element_bytes

    def _kv_bytes(self, total: int) -> int:
        return 2 * -(-total // self.ranks) * self.heads.kv_heads * self.heads.head_dim * self.heads.element_bytes


def hidden_kv_tokens(heads: Heads, ranks: int, link: Link) -> float:
    """The T from which on the attention to a block takes as long as the next block's way: N * F * HKV * e / (2 * HQ * B) (equation 2)."""
    return ranks * link.flops * heads.kv_heads * heads.element_bytes / (2 * heads.q_heads * link.bytes_per_s)


def hidden_q_tokens(heads: Heads, ranks: int, link: Link) -> float:
    """The T + C from which on pass-Q's ring is hidden: N * e * F / (4 * B) (equation 3). Its way home never is."""
    return ranks * heads.element_bytes * link.flops / (4 * link.bytes_per_s)


def corrected_share(new_tokens: int, heads: Heads, ranks: int, link: Link) -> float:
    """The largest T/(T+C) at which pass-Q, its all-to-all included, beats the exposed part of pass-KV: 2*HKV/HQ - 4*T*B / (N*F*e)
    (equation 5, which lowers equation 1's bound by what attention hides)."""
    return heads.share - 4 * new_tokens * link.bytes_per_s / (ranks * link.flops * heads.element_bytes)
