"""The life of a stream, for both layouts: waiting, tail, decode, done.

Only the schedulers call this, and nothing else writes a `Stream`.
"""

from __future__ import annotations

from askmany.engine.request import PENDING, FinishReason, Phase, Stream
from askmany.engine.step import Sampled


def open_stream(stream: Stream) -> None:
    """A waiting stream becomes live."""
    stream.phase = Phase.TAIL
    stream.document.next_question += 1
    stream.document.live += 1


def book_sample(sample: Sampled, reason: FinishReason | None) -> None:
    """Append a stream's new answer token; end the stream for `reason`, or at its budget."""
    stream = sample.stream
    stream.phase = Phase.DECODE
    stream.answer_token_ids.append(sample.token_id)
    _goes_on(sample, len(stream.answer_token_ids), reason)


def _goes_on(sample: Sampled, known: int, reason: FinishReason | None) -> bool:
    """Book what came with a stream's `known`-th answer token; whether the stream lives on."""
    stream = sample.stream
    stream.logprob += sample.logprob
    if sample.margin < stream.margin:
        stream.margin = sample.margin
    if reason is None and known < stream.question.sampling.max_new_tokens:
        return True
    stream.finish_reason = reason or "length"
    stream.phase = Phase.DONE
    stream.document.live -= 1
    stream.document.done += 1
    return False


def book_pending(stream: Stream) -> None:
    """A token is being drawn for the stream: it takes its place among the answer's tokens, unknown."""
    stream.phase = Phase.DECODE
    stream.answer_token_ids.append(PENDING)


def settle_sample(sample: Sampled, reason: FinishReason | None) -> bool:
    """The oldest pending token of a stream is known now; end the stream for `reason`, or at its budget. False, and nothing done, for a
    stream that ended while the token was drawn."""
    stream = sample.stream
    answer = stream.answer_token_ids
    if stream.phase is Phase.DONE:
        return False
    at = len(answer) - 1
    while at and answer[at - 1] == PENDING:
        at -= 1
    answer[at] = sample.token_id
    if not _goes_on(sample, at + 1, reason):
        del answer[at + 1 :]
    return True


def may_decode(stream: Stream) -> bool:
    """Whether a next token may be asked for; not so while the last one of the budget is pending, nor while labels' scores are."""
    return (
        stream.phase is Phase.DECODE
        and stream.question.labels is None
        and len(stream.answer_token_ids) < stream.question.sampling.max_new_tokens
    )


def check_stream(stream: Stream) -> None:
    """Fail unless a live stream is within its budget and its counts fit its phase."""
    tail = stream.question.feed_tokens
    assert stream.phase in (Phase.TAIL, Phase.DECODE), f"a live stream is {stream.phase.value}"
    assert len(stream.answer_token_ids) < stream.question.sampling.max_new_tokens, "a live stream is at its budget"
    if stream.phase is Phase.TAIL:
        assert stream.stored < tail, "a tail is stored and its stream does not decode"
        assert not stream.answer_token_ids, "a stream answered before its tail was stored"
    else:
        assert stream.stored == tail + len(stream.answer_token_ids) - 1, "stored tokens and answer tokens disagree"
