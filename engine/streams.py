"""The life of a stream, for both layouts: waiting, tail, decode, done.

Only the schedulers call this, and nothing else writes a `Stream`.
"""

from __future__ import annotations

from askmany.engine.request import FinishReason, Phase, Stream
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
    stream.logprob += sample.logprob
    stream.margin = min(stream.margin, sample.margin)
    if reason is None and len(stream.answer_token_ids) >= stream.question.sampling.max_new_tokens:
        reason = "length"
    if reason is not None:
        stream.finish_reason = reason
        stream.phase = Phase.DONE
        stream.document.live -= 1
        stream.document.done += 1


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
