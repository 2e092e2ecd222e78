"""CUDA graphs of whole steps: which bucket a step takes, and when a bucket is worth capturing.

A bucket is a `StepSpace`: its buffers are the graph's, a step is loaded into them and the graph replayed. Buckets are captured when steps
ask for them, from one memory pool; a step whose own bucket is not captured yet takes the next larger one that is, since dummies cost
little and a capture costs some hundred steps. Knows nothing of layouts, and of the device only through `Capturer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from askmany.engine.paged import PagedRows
from askmany.engine.space import StepSpace

PATIENCE_FIRST = 2  # steps that run without a graph before the first fitting bucket is captured
PATIENCE_CLOSER = 64  # steps in a larger bucket before a closer one is captured
WARM_UPS = 2  # runs before a capture: kernels are compiled, libraries make their handles

Work = Callable[[], None]


class Capturer(Protocol):
    """Records device work once, to be replayed at will."""

    def capture(self, work: Work) -> Work:
        """Run `work` to warm up, record it, return its replay."""
        ...


class CudaCapturer:
    """CUDA graphs that share one memory pool. `scope` is held around warm-up and capture. With `others`, other threads may ask the device
    for things meanwhile, as the watch over messages between GPUs does."""

    def __init__(self, device: torch.device, scope: Callable[[], AbstractContextManager[None]], others: bool = False) -> None:
        self._device, self._scope = device, scope
        self._mode = "thread_local" if others else "global"
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Work) -> Work:
        """See `Capturer`."""
        with self._scope():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=self._mode):
                work()
        torch.cuda.synchronize(self._device)
        return graph.replay


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Steps of up to `rows` rows, `wanted` of which ask for logits; with `decode` all of them do. `units`: requests, where they count."""

    rows: int
    wanted: int
    decode: bool
    units: int = 0

    def holds(self, step: PagedRows) -> bool:
        return step.rows <= self.rows and len(step.wanted) <= self.wanted and (step.decodes or not self.decode)


@dataclass(slots=True)
class _Captured:
    space: StepSpace
    replay: Work


MakeSpace = Callable[[Bucket, PagedRows], StepSpace]
Fits = Callable[[Bucket, PagedRows], bool]


class GraphRunner:
    """Captures and replays. `make_space(bucket, step)` makes a bucket's space, `step` being the first that it serves; `fits` says whether
    a bucket holds a step beyond what the bucket itself can tell; `empty` is a step without rows; `drawn` as in `StepSpace`."""

    def __init__(
        self, buckets: Sequence[Bucket], make_space: MakeSpace, fits: Fits, capturer: Capturer, empty: PagedRows, drawn: Tensor
    ) -> None:
        self.buckets = tuple(sorted(buckets, key=lambda bucket: (bucket.rows, bucket.wanted, not bucket.decode, bucket.units)))
        self.capture_s: dict[Bucket, float] = {}  # seconds that each capture took
        self.loads: Counter[Bucket] = Counter()  # steps that each served
        self._make_space, self._fits, self._capturer = make_space, fits, capturer
        self._empty, self._drawn = empty, drawn
        self._captured: dict[Bucket, _Captured] = {}
        self._wanted: Counter[Bucket] = Counter()

    def load(self, step: PagedRows, feeds: Sequence[int]) -> tuple[StepSpace, Work] | None:
        """Load the step into its bucket, captured now if need be: the space that will hold the results, and the replay that brings them.
        None: no bucket serves it, run it without a graph."""
        bucket = self.choose(step)
        if bucket is None:
            return None
        found = self._captured.get(bucket) or self._capture(bucket, step)
        found.space.load(step, feeds)
        self.loads[bucket] += 1
        return found.space, found.replay

    def choose(self, step: PagedRows) -> Bucket | None:
        """The captured bucket to use, or the one to be captured now; counts what was asked for."""
        fitting = [bucket for bucket in self.buckets if bucket.holds(step) and self._fits(bucket, step)]
        if not fitting or not step.rows:
            return None
        best = fitting[0]
        held = next((bucket for bucket in fitting if bucket in self._captured), None)
        self._wanted[best] += 1
        patience = PATIENCE_FIRST if held is None else PATIENCE_CLOSER
        return best if held == best or self._wanted[best] > patience else held

    def ready(self, step: PagedRows) -> bool:
        """Whether a bucket that is captured serves the step."""
        return any(bucket.holds(step) and self._fits(bucket, step) for bucket in self._captured)

    def warm(self, steps: Iterable[PagedRows]) -> None:
        """Capture the bucket of each of these steps now, largest first, so that the pool grows once."""
        wanted: dict[Bucket, PagedRows] = {}
        for step in steps:
            bucket = next((b for b in self.buckets if b.holds(step) and self._fits(b, step)), None)
            if bucket is not None and bucket not in self._captured:
                wanted.setdefault(bucket, step)
        for bucket in sorted(wanted, reverse=True):
            self._capture(bucket, wanted[bucket])

    def check(self) -> None:
        """Wait for the device; RuntimeError if a step did not fit its bucket's attention."""
        for found in self._captured.values():
            found.space.layout.check()

    def _capture(self, bucket: Bucket, step: PagedRows) -> _Captured:
        """Over dummies alone: a capture runs its work several times, and what a step draws feeds on what the one before drew."""
        started_s = perf_counter()
        space = self._make_space(bucket, step)
        space.load(self._empty, ())
        kept = self._drawn.clone()
        replay = self._capturer.capture(space.compute)
        self._drawn.copy_(kept)
        self.capture_s[bucket] = perf_counter() - started_s
        self._captured[bucket] = _Captured(space, replay)
        return self._captured[bucket]


def row_buckets(most: int) -> list[int]:
    """Row counts worth a graph, up to `most` rows: close together where rows are few, multiples of 64 above."""
    return sorted({min(rows, most) for rows in [4, 16, 32, *range(64, most + 64, 64)]})


def request_buckets(most: int) -> list[int]:
    """Counts of interleaved requests worth a graph: powers of two (Parallel Prompting, arXiv 2611.15130)."""
    found = [1]
    while found[-1] < most:
        found.append(found[-1] * 2)
    return found
