"""One engine step as host data: what the scheduler hands to an executor and what comes back.

An executor turns a `StepPlan` into one forward pass and one sampled token for every run that asks for it. The Transformers and
SGLang executors do it with tensors, the fake one with arithmetic. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from askmany.engine.request import InterleavedRequest, Stream

if TYPE_CHECKING:
    from askmany.engine.prefix_tree import PrefixNode


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """Tokens [start, stop) of a prefix node to prefill; tokens before `start` are stored, ancestors are complete."""

    node: PrefixNode
    start: int
    stop: int


@dataclass(slots=True)  # not frozen: one is made for each row of each step, and freezing triples what that costs
class StreamRun:
    """Private tokens [start, stop) of a stream to feed; when `samples`, the last of them yields the next answer token (or completes the
    label scores)."""

    stream: Stream
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, slots=True)
class MaskedRun:
    """New tokens of one interleaved request, in KV order: `entries[i]` = (sid, private token index) of the token that takes the row's
    slot `start + i`. `samples` lists the entries (indices into `entries`) that yield a next answer token."""

    request: InterleavedRequest
    start: int
    entries: tuple[tuple[int, int], ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows of the forward pass: every chunk's tokens, then every run's, then every masked run's, each in order.

    The split layout fills `runs`, the interleaved one `masked`; never both.
    """

    chunks: tuple[PrefixChunk, ...]
    runs: tuple[StreamRun, ...] = ()
    masked: tuple[MaskedRun, ...] = ()

    @property
    def tokens(self) -> int:
        chunks = sum(c.stop - c.start for c in self.chunks)
        return chunks + sum(r.stop - r.start for r in self.runs) + sum(len(m.entries) for m in self.masked)

    @property
    def sampling_streams(self) -> list[Stream]:
        """The streams that get a token in this step, in the order an executor returns them."""
        masked = [m.request.streams[m.entries[i][0]] for m in self.masked for i in m.samples]
        return [run.stream for run in self.runs if run.samples] + masked


@dataclass(slots=True)  # not frozen: as StreamRun
class Sampled:
    """The token drawn for one stream. `logprob` in nats under the unscaled distribution; `margin` is the top-2 logit gap, among the legal
    tokens where a grammar holds the stream; `complete` when the grammar lets nothing follow.

    A stream with labels draws nothing: `label_logprobs` are the log-probabilities its label tree asks for, the rest means nothing.
    """

    stream: Stream
    token_id: int
    logprob: float
    margin: float
    complete: bool = False
    label_logprobs: tuple[float, ...] = ()


class Executor(Protocol):
    """Runs steps on a device. Stateless towards the schedule: everything it needs is in the plan."""

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Run one step; one `Sampled` for each run with `samples`, in plan order."""
        ...

    def release(self, streams: list[Stream]) -> None:
        """Forget whatever is kept for these finished streams (sampler or grammar state)."""
        ...
