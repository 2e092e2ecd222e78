"""A fake device, whose answers can be computed by hand, and which checks every plan as strictly as a device would obey it.

The n-th answer token (from 0) to a question is

    (sum of the prefix's tokens + sum of the question's tokens + n, + the seed if temperature > 0) modulo vocab_size

Example: prefix segments (1, 2) and (3, 4), question (5, 6), vocab_size 1000: 1+2+3+4 + 5+6 = 21, so the answer is 21, 22, 23, ...; its text
is "21 22 23". Every token has log-probability -0.25 and margin 1 + token / vocab_size. Grammars are ignored; a question with labels gets
`expected_label_logprobs`.

The sums are taken from what lies in the pages that the plan names, not from the request: a page given to two owners, a token fed twice, in
the wrong place or too early, raises `PlanError` or shows in the answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from askmany.engine.build import build_scheduler
from askmany.engine.choice import Expected, bounded, chosen
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.labels import LabelTrie
from askmany.engine.prefix_tree import PrefixNode
from askmany.engine.request import Document, InterleavedRequest, Question, Stream
from askmany.engine.step import MaskedRun, PrefixChunk, Sampled, StepPlan, StreamRun

VOCAB_SIZE = 1000
LOGPROB = -0.25

Owner = PrefixNode | Stream | InterleavedRequest


class PlanError(Exception):
    """A plan that no device could run rightly: a bug of the scheduler."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What shall go wrong. Keys are document keys; the fault strikes when a step first feeds a token of one of the document's streams."""

    raise_on: frozenset[str] = frozenset()  # the step raises
    abort_on: frozenset[str] = frozenset()  # the process dies at once, without clean-up
    hang_on: frozenset[str] = frozenset()  # the step never returns
    step_s: float = 0.0  # added to every step


def expected_answer(document: Document, question: Question, n: int | None = None, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    """The first `n` answer tokens (None: as many as the question allows), stop rules aside."""
    sampling = question.sampling
    first = sum(map(sum, document.segments)) + sum(question.token_ids) + (sampling.seed if sampling.temperature > 0 else 0)
    return tuple((first + i) % vocab_size for i in range(sampling.max_new_tokens if n is None else n))


class FakeTextStream:
    """Tokens as decimal numbers with a space between them."""

    def __init__(self) -> None:
        self._first = True

    def push(self, token_id: int) -> str:
        text = str(token_id) if self._first else f" {token_id}"
        self._first = False
        return text

    def flush(self) -> str:
        return ""


class FakeDetokenizer:
    """Opens `FakeTextStream`s."""

    def stream(self) -> FakeTextStream:
        return FakeTextStream()


@dataclass(slots=True)
class _Page:
    """What lies in a page: whose tokens, how many, and their sum for each sid (-1: not of an interleaved row)."""

    owner: Owner
    filled: int = 0
    sums: dict[int, int] = field(default_factory=dict)


class FakeExecutor:
    """Runs plans over an imaginary KV pool with pages of `page_size` tokens."""

    def __init__(self, page_size: int, vocab_size: int = VOCAB_SIZE, faults: Faults | None = None) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._faults = faults or Faults()
        self._pages: dict[int, _Page] = {}

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One step: fault, feed, sample. Raises PlanError for a plan that is wrong."""
        self._strike(plan)
        if not plan.tokens or (plan.runs and plan.masked):
            raise PlanError("a step must feed tokens, in one layout")
        _check_once(plan)
        for run in plan.runs:
            self._check_prefix(run.stream)
            self._feed_run(run)
        for masked in plan.masked:
            self._check_prefix(masked.request.streams[0])
            self._feed_masked(masked)
        for chunk in plan.chunks:  # last: what is stored by this step's chunks was not complete for its runs
            self._feed_chunk(chunk)
        split = [self._sample_run(run) for run in plan.runs if run.samples]
        return split + [self._sample_entry(masked, masked.entries[i]) for masked in plan.masked for i in masked.samples]

    def release(self, streams: list[Stream]) -> None:
        """Each finished stream is released once, without pages of its own."""
        for stream in streams:
            if stream.finish_reason is None or stream.pages:
                raise PlanError(f"stream {stream.stream_id} was released before its end")

    def _strike(self, plan: StepPlan) -> None:
        streams = [run.stream for run in plan.runs] + [stream for run in plan.masked for stream in run.request.streams]
        keys = {stream.document.document.key for stream in streams}
        if self._faults.step_s:
            time.sleep(self._faults.step_s)
        if keys & self._faults.abort_on:
            os.abort()
        while keys & self._faults.hang_on:
            time.sleep(60)
        for key in sorted(keys & self._faults.raise_on):
            raise RuntimeError(f"fault injected on document {key!r}")

    def _feed_chunk(self, chunk: PrefixChunk) -> None:
        node = chunk.node
        above = node.ancestors
        if not all(parent.complete and self._stored(parent) == len(parent.token_ids) for parent in above):
            raise PlanError("a chunk came before its ancestors were complete")
        if node.start != sum(len(parent.token_ids) for parent in above):
            raise PlanError("a node does not start right after its ancestors")
        if chunk.start != node.stored or not chunk.start < chunk.stop <= len(node.token_ids):
            raise PlanError(f"chunk [{chunk.start}, {chunk.stop}) of a node with {node.stored} of {len(node.token_ids)} tokens stored")
        for index in range(chunk.start, chunk.stop):
            self._write(node, index, node.token_ids[index], -1)

    def _feed_run(self, run: StreamRun) -> None:
        stream = run.stream
        tail = stream.question.feed_tokens
        fed = tail + len(stream.answer_token_ids)
        if run.start != stream.stored or not run.start < run.stop <= fed or run.samples != (run.stop >= tail):
            raise PlanError(f"run [{run.start}, {run.stop}) of a stream with {stream.stored} of {fed} tokens stored")
        for index in range(run.start, run.stop):
            self._write(stream, self._place(stream, index), stream.private_token(index), -1)

    def _feed_masked(self, run: MaskedRun) -> None:
        request = run.request
        if run.start != len(request.sids):
            raise PlanError(f"a masked run starts at slot {run.start} of a row of {len(request.sids)}")
        fed = [stream.stored for stream in request.streams]
        for i, (sid, index) in enumerate(run.entries):
            stream = request.streams[sid]
            if index != fed[sid] or stream.finish_reason is not None:
                raise PlanError(f"token {index} of stream {stream.stream_id}, which has {fed[sid]} stored or ended")
            fed[sid] += 1
            self._write(request, run.start + i, stream.private_token(index), sid)
            if (i in run.samples) != (index >= len(stream.question.token_ids) - 1):
                raise PlanError(f"token {index} of stream {stream.stream_id} samples wrongly")

    def _check_prefix(self, stream: Stream) -> None:
        """The stream's path is its document's prefix, and all of it is stored."""
        path = stream.document.path
        if tuple(node.token_ids for node in path) != stream.document.document.segments:
            raise PlanError("a document's path is not its prefix")
        if not all(node.complete and self._stored(node) == len(node.token_ids) for node in path):
            raise PlanError("a stream ran before its prefix was complete")

    def _place(self, stream: Stream, index: int) -> int:
        """Where in its pages a stream's private token belongs."""
        if stream.question.labels is None:
            return index
        (piece,) = stream.question.label_pages(self._page_size).pieces(index, index + 1)
        return piece.page * self._page_size + index - piece.first

    def _write(self, owner: Owner, index: int, token_id: int, sid: int) -> None:
        number = owner.pages[index // self._page_size]
        page = self._pages.get(number)
        if page is None or page.owner is not owner:
            if page is not None and number in page.owner.pages:
                raise PlanError(f"page {number} has two owners")
            page = self._pages[number] = _Page(owner)
        if page.filled != index % self._page_size:
            raise PlanError(f"slot {index % self._page_size} of page {number} written when {page.filled} were filled")
        page.filled += 1
        page.sums[sid] = page.sums.get(sid, 0) + token_id

    def _sample_run(self, run: StreamRun) -> Sampled:
        self._check_stored(run.stream, run.stop)
        return self._sample(run.stream, run.stream, run.stop, -1)

    def _sample_entry(self, run: MaskedRun, entry: tuple[int, int]) -> Sampled:
        sid, index = entry
        self._check_stored(run.request, run.start + len(run.entries))
        return self._sample(run.request.streams[sid], run.request, index + 1, sid)

    def _sample(self, stream: Stream, owner: Owner, fed: int, sid: int) -> Sampled:
        """The next token from what the pages hold: the prefix, and the stream's own tokens less the answer so far."""
        question, answer = stream.question, stream.answer_token_ids
        if fed != question.feed_tokens + len(answer):
            raise PlanError(f"stream {stream.stream_id} samples after {fed} tokens, it has {question.feed_tokens + len(answer)}")
        if question.labels:
            total = sum(self._sum(node, -1) for node in stream.document.path) + self._sum(owner, sid) - sum(question.labels.feed)
            return Sampled(stream, 0, LOGPROB, 1.0, label_logprobs=_label_logprobs(question.labels, total, self._vocab_size))
        total = sum(self._sum(node, -1) for node in stream.document.path) + self._sum(owner, sid) - sum(answer) + len(answer)
        token_id = (total + (question.sampling.seed if question.sampling.temperature > 0 else 0)) % self._vocab_size
        return Sampled(stream, token_id, LOGPROB, 1 + token_id / self._vocab_size)

    def _check_stored(self, owner: Owner, fed: int) -> None:
        if self._stored(owner) != fed:
            raise PlanError(f"the pages of a stream or request hold {self._stored(owner)} of its {fed} tokens")

    def _stored(self, owner: Owner) -> int:
        return sum(page.filled for page in self._own_pages(owner))

    def _sum(self, owner: Owner, sid: int) -> int:
        return sum(page.sums.get(sid, 0) for page in self._own_pages(owner))

    def _own_pages(self, owner: Owner) -> Iterable[_Page]:
        pages = (self._pages.get(number) for number in owner.pages)
        return (page for page in pages if page is not None and page.owner is owner)


def expected_label_logprobs(document: Document, question: Question, vocab_size: int = VOCAB_SIZE) -> tuple[float, ...]:
    """One for each of the label tree's asks (row, token): -(1 + prefix + question + row + token, modulo vocab_size) / vocab_size."""
    assert question.labels is not None
    return _label_logprobs(question.labels, sum(map(sum, document.segments)) + sum(question.token_ids), vocab_size)


def _label_logprobs(trie: LabelTrie, total: int, vocab_size: int) -> tuple[float, ...]:
    return tuple(-(1 + (total + row + token) % vocab_size) / vocab_size for row, token in trie.asks)


def _check_once(plan: StepPlan) -> None:
    """No node, stream or request appears twice in a step."""
    units: list[Owner] = [chunk.node for chunk in plan.chunks]
    units += [run.stream for run in plan.runs]
    units += [run.request for run in plan.masked]
    if len(set(units)) != len(units):
        raise PlanError("a step feeds the same node, stream or request twice")


def fake_engine(
    config: EngineConfig | None = None,
    *,
    kv_tokens: int = 65536,
    eos_token_ids: Iterable[int] = (),
    vocab_size: int = VOCAB_SIZE,
    kv_bytes_per_token: int = 1,
    faults: Faults | None = None,
    expected: Expected | None = None,
) -> Engine:
    """An engine without a model. `kv_tokens` is used where the config says `auto`; `expected` as in `build.build_engine`."""
    asked = config or EngineConfig()
    resolved = bounded(asked, expected).resolve(device="cpu", dtype="float32", kv_tokens=kv_tokens)
    executor = FakeExecutor(resolved.page_size, vocab_size, faults)
    engine = Engine(build_scheduler(resolved), executor, FakeDetokenizer(), eos_token_ids, kv_bytes_per_token)
    engine.choice = chosen(asked, resolved, expected)
    return engine
