"""Label distributions: how likely each of a question's labels is, from one forward pass.

A label is a sequence of tokens; its probability is the product of each token's probability after the tokens before it. The sequences form a
tree that is fed as chains: what all chains begin with is fed once, before the first of them, and each other chain goes on from there. A
token on which chains part further down is fed in each of them (one row more, but every chain is a causal run that kernels can follow), and
asked once. Host integers and floats alone; whoever runs the model feeds `feed` after the question and gives back one log-probability for
each of `asks`.

Where one label's tokens begin another's ("yes", "yes, in part") the shorter one would count the longer one's probability as its own; then
the end-of-answer token is scored as part of every label, and the result says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Literal

Normalise = Literal["none", "length"]
TIE_NATS = 1e-9  # labels this close in log-probability cannot be told apart


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """Labels as one tree of tokens. Row 0 is the question's last token; row i > 0 is `feed[i - 1]`, any token of a label but its last.

    Chain k is `feed[starts[k] : starts[k + 1]]`, the last of `starts` being their end (one empty chain, where nothing is fed); the first
    `trunk` tokens of chain 0 come before every other chain, too. `longest` is the length of the longest chain but the first, 0 if it is the
    only one. `depths[i]` is how many label tokens stand before `feed[i]`. `asks` lists (row, token): the log-probabilities needed, each
    once; `asked[row]` are the tokens asked of a row. `token_ids[j]` are label j's tokens, without an end token; `label_asks[j]` the indices
    into `asks` whose sum is its log-probability.
    """

    labels: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    feed: tuple[int, ...]
    starts: tuple[int, ...]
    trunk: int
    longest: int
    depths: tuple[int, ...]
    asks: tuple[tuple[int, int], ...]
    asked: tuple[tuple[int, ...], ...]
    label_asks: tuple[tuple[int, ...], ...]
    end_scored: bool
    normalise: Normalise

    def path(self, node: int) -> tuple[int, ...]:
        """The feed indices from the first token of a label down to feed index `node`, which is the last of them."""
        start = max(start for start in self.starts[:-1] if start <= node)
        return (*range(self.trunk if start else 0), *range(start, node + 1))


def label_trie(
    labels: Sequence[str], token_ids: Sequence[Sequence[int]], end_token_id: int | None, normalise: Normalise = "none"
) -> LabelTrie:
    """The trie of labels given as token ids, none of them empty and no two alike. ValueError otherwise."""
    paths = [tuple(ids) for ids in token_ids]
    for label, path in zip(labels, paths, strict=True):
        if not path:
            raise ValueError(f"label {label!r} has no tokens")
        if paths.count(path) > 1:
            raise ValueError(f"label {label!r} has the same tokens as another label")
    ends = any(one != other and other[: len(one)] == one for one in paths for other in paths)
    if ends and end_token_id is None:
        raise ValueError("one label begins another and there is no end token to tell them apart")
    if ends and end_token_id is not None:
        paths = [(*path, end_token_id) for path in paths]
    return _build(tuple(labels), tuple(map(tuple, token_ids)), paths, ends, normalise)


def _build(
    labels: tuple[str, ...], token_ids: tuple[tuple[int, ...], ...], paths: list[tuple[int, ...]], end_scored: bool, normalise: Normalise
) -> LabelTrie:
    chains = _chains(paths)
    trunk = _common(chains)
    rows: dict[tuple[int, ...], int] = {(): 0}
    feed: list[int] = []
    starts: list[int] = []
    depths: list[int] = []
    for chain in chains or [()]:
        starts.append(len(feed))
        for depth in range(trunk if feed else 0, len(chain)):
            feed.append(chain[depth])
            depths.append(depth)
            rows.setdefault(chain[: depth + 1], len(feed))
    starts.append(len(feed))
    longest = max((end - start for start, end in pairwise(starts[1:])), default=0)
    asks: dict[tuple[int, int], int] = {}
    label_asks = [
        tuple(asks.setdefault((rows[path[:depth]], token), len(asks)) for depth, token in enumerate(path)) for path in paths
    ]  # fmt: skip
    asked: list[list[int]] = [[] for _ in range(len(feed) + 1)]
    for row, token in asks:
        asked[row].append(token)
    return LabelTrie(
        labels, token_ids, tuple(feed), tuple(starts), trunk, longest, tuple(depths), tuple(asks), tuple(map(tuple, asked)),
        tuple(label_asks), end_scored, normalise,
    )  # fmt: skip


def _chains(paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What is fed of each label, all but its last token; beginnings of others and repetitions are left out."""
    inner = list(dict.fromkeys(path[:-1] for path in paths if len(path) > 1))
    begun = {path[:depth] for path in inner for depth in range(1, len(path))}
    return [path for path in inner if path not in begun]


def _common(chains: list[tuple[int, ...]]) -> int:
    """How many tokens all chains begin with."""
    common = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*chains, strict=False))
    return sum(1 for _ in common)


@dataclass(frozen=True, slots=True)
class LabelScores:
    """What a model thinks of a question's labels, in their order.

    `logprobs`: of each whole label, in nats, unconstrained. `probabilities`: over the labels, summing to 1 (of per-token log-probabilities
    when normalised by length). `legal_mass`: the labels' total unconstrained probability. `margin`: nats between the best two, the
    logarithm of their probabilities' ratio. `best`: the first of the likeliest labels; `tie` when another is as likely.
    """

    labels: tuple[str, ...]
    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    legal_mass: float
    margin: float
    best: int
    tie: bool
    end_scored: bool
    normalise: Normalise

    @property
    def label(self) -> str:
        return self.labels[self.best]

    @property
    def flags(self) -> tuple[str, ...]:
        named = {"label_tie": self.tie, "label_end_scored": self.end_scored, "label_length_normalised": self.normalise == "length"}
        return tuple(name for name, holds in named.items() if holds)


def label_scores(trie: LabelTrie, logprobs: Sequence[float]) -> LabelScores:
    """The distribution from one log-probability (nats, of the model's own distribution) for each of `trie.asks`."""
    if len(logprobs) != len(trie.asks):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(trie.asks)} asked")
    totals = [math.fsum(logprobs[i] for i in asks) for asks in trie.label_asks]
    compared = totals if trie.normalise == "none" else [total / len(asks) for total, asks in zip(totals, trie.label_asks, strict=True)]
    top = max(compared)
    weights = [math.exp(value - top) if top > -math.inf else 1.0 for value in compared]
    total = math.fsum(weights)
    best = next(i for i, value in enumerate(compared) if value >= top - TIE_NATS or top == -math.inf)
    runner_up = max((value for i, value in enumerate(compared) if i != best), default=-math.inf)
    margin = max(0.0, top - runner_up) if top > -math.inf else 0.0
    return LabelScores(
        labels=trie.labels,
        logprobs=tuple(totals),
        probabilities=tuple(weight / total for weight in weights),
        legal_mass=min(1.0, math.fsum(math.exp(value) for value in totals)),
        margin=margin,
        best=best,
        tie=margin <= TIE_NATS,
        end_scored=trie.end_scored,
        normalise=trie.normalise,
    )
