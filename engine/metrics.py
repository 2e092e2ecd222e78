"""Counters of an engine's work. They add: per step, per shard, per run. Ratios are derived from sums, never summed.

KV reads are counted by one rule. A step reads a prefix node's stored tokens once if any row of the step lies below it (split layout), or
once per request (interleaved), and each stream's own stored tokens once; one request per question, with prefix caching, reads the whole
prefix once per live stream and step. `kv_*_alone` is that second figure for the very same steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, fields

from askmany.engine.prefix_tree import PrefixNode
from askmany.engine.request import Phase
from askmany.engine.step import MaskedRun, StepPlan


@dataclass(frozen=True, slots=True)
class Metrics:
    """Sums since the engine was made. Tokens unless the name says otherwise."""

    steps: int = 0
    documents: int = 0  # finished
    streams: int = 0  # finished
    prefill_tokens: int = 0  # prefix tokens fed
    tail_tokens: int = 0  # question tokens fed
    decode_tokens: int = 0  # answer tokens fed
    answer_tokens: int = 0  # answer tokens returned, stop tokens left out
    prefix_hit_tokens: int = 0  # prefix tokens found in the tree at admission
    prefix_missed_tokens: int = 0  # prefix tokens that had to be prefilled
    prefix_evicted_tokens: int = 0
    kv_tokens_read: int = 0
    kv_tokens_alone: int = 0  # what one request per question would have read
    kv_bytes_read: int = 0
    kv_bytes_alone: int = 0
    busy_s: float = 0.0  # wall time inside steps
    prefill_s: float = 0.0  # of that, inside steps that fed prefix tokens alone
    device_busy_s: float = 0.0  # a GPU's own time inside steps ...
    device_idle_s: float = 0.0  # ... and between them, while there was work

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    @property
    def kv_bytes_saved(self) -> int:
        """Against one request per question; negative where the interleaved layout reads more."""
        return self.kv_bytes_alone - self.kv_bytes_read

    @property
    def kv_reads_ratio(self) -> float:
        """How many times fewer KV tokens were read than by one request per question; 1.0 before anything was read."""
        return self.kv_tokens_alone / self.kv_tokens_read if self.kv_tokens_read else 1.0

    @property
    def fed_tokens(self) -> int:
        return self.prefill_tokens + self.tail_tokens + self.decode_tokens

    @property
    def tokens_per_s(self) -> float:
        """All tokens fed per second of step time; 0.0 before the first step."""
        return self.fed_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def answer_tokens_per_s(self) -> float:
        return self.answer_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of admitted prefix tokens that were in the tree."""
        admitted = self.prefix_hit_tokens + self.prefix_missed_tokens
        return self.prefix_hit_tokens / admitted if admitted else 0.0

    @property
    def device_idle_ratio(self) -> float:
        """Share of the GPU's time that it waited for the host; 0.0 without a GPU."""
        whole_s = self.device_busy_s + self.device_idle_s
        return self.device_idle_s / whole_s if whole_s else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Counters and derived figures, for JSON."""
        derived = (
            "kv_bytes_saved",
            "kv_reads_ratio",
            "fed_tokens",
            "tokens_per_s",
            "answer_tokens_per_s",
            "prefix_hit_ratio",
            "device_idle_ratio",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}


def measure(plan: StepPlan, kv_bytes_per_token: int) -> Metrics:
    """One planned step's counters, from the state before it is advanced."""
    tail, decode = _private_tokens(plan)
    read, alone = _kv_reads(plan)
    return Metrics(
        steps=1,
        prefill_tokens=sum(chunk.stop - chunk.start for chunk in plan.chunks),
        tail_tokens=tail,
        decode_tokens=decode,
        kv_tokens_read=read,
        kv_tokens_alone=alone,
        kv_bytes_read=read * kv_bytes_per_token,
        kv_bytes_alone=alone * kv_bytes_per_token,
    )


def _private_tokens(plan: StepPlan) -> tuple[int, int]:
    """Question tokens and answer tokens that the step feeds."""
    tail = total = 0
    for run in plan.runs:
        total += run.stop - run.start
        if run.stream.phase is Phase.TAIL:
            tail += run.stop - run.start
    for masked in plan.masked:
        lengths = [len(stream.question.token_ids) for stream in masked.request.streams]
        tail += sum(index < lengths[sid] for sid, index in masked.entries)
        total += len(masked.entries)
    return tail, total - tail


def _kv_reads(plan: StepPlan) -> tuple[int, int]:
    """Stored tokens that the step reads, and that one request per question would read in its place."""
    shared: set[PrefixNode] = set()
    own = alone = 0
    for chunk in plan.chunks:
        shared.update(chunk.node.ancestors)
        own += chunk.start
        alone += chunk.node.start + chunk.start
    private = sum(run.start for run in plan.runs)
    own += private
    alone += private
    for state, rows in Counter(run.stream.document for run in plan.runs).items():
        shared.update(state.path)
        alone += rows * state.document.prefix_tokens
    for masked in plan.masked:
        own += masked.request.document.document.prefix_tokens + masked.start
        alone += _alone_masked(masked)
    return own + sum(node.stored for node in shared), alone


def _alone_masked(run: MaskedRun) -> int:
    first: dict[int, int] = {}
    for sid, index in run.entries:
        first.setdefault(sid, index)
    return len(first) * run.request.document.document.prefix_tokens + sum(first.values())
