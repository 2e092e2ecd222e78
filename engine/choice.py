"""What `streams: auto` means for a run: rows, streams and resident documents, from the KV budget and what is expected of the documents.

Arithmetic alone; the reason is a sentence for the log. Nothing here may cost a document that is unlike the others: limits are lowered only
to what the run as a whole can ever use (`bounded`), and the usual document decides no more than what is made ready at the start and what
is told (`chosen`). How many documents are resident is up to admission, which goes by free pages. P of the interleaved layout can be
measured on a calibration set, as published (Parallel Prompting, arXiv 2611.15130).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from askmany.engine.config import DEFAULT_INTERLEAVED_STREAMS, EngineConfig, Layout

PREFILLING = 1  # documents beyond those that fill the rows: the next is prefilled while they are answered
LEAST_ROWS = 16  # fewer save nothing worth having
INTERLEAVED_CANDIDATES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a usual document brings, and at most: `most_questions` of one document, `streams` of all together (0: not known).

    Tokens and counts are at least 1; `question_tokens` and `answer_tokens` are those of one question, the latter its budget.
    """

    document_tokens: int
    questions: int
    question_tokens: int
    answer_tokens: int
    most_questions: int = 0
    streams: int = 0

    @property
    def own_tokens(self) -> int:
        return self.question_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """`rows`: live streams of all documents, as the usual document has them; `streams`: of one; `documents`: resident at once."""

    layout: Layout
    streams: int
    rows: int
    documents: int
    reason: str


def bounded(config: EngineConfig, expected: Expected | None) -> EngineConfig:
    """`config`, where its streams are `auto`, without room that the run can never use: no more rows than it has questions; interleaved, no
    larger P than a document has questions, so that more requests share a step.

    Unchanged without expectations, with streams that the user set, and in deterministic mode, where a shape must not depend on the run.
    """
    if expected is None or config.streams != "auto" or config.deterministic:
        return config
    rows = min(config.max_rows, max(LEAST_ROWS, expected.streams)) if expected.streams else config.max_rows
    if config.layout == "split":
        return config.model_copy(update={"max_rows": rows})
    streams = min(DEFAULT_INTERLEAVED_STREAMS, rows, expected.most_questions or rows)
    return config.model_copy(update={"max_rows": rows, "streams": streams})


def chosen(asked: EngineConfig, resolved: EngineConfig, expected: Expected | None) -> Choice | None:
    """What `streams: auto` in `asked` came to once the KV pool is known; None without expectations or with streams that the user set.

    A usual document for which there is no room chooses nothing: the engine refuses each such document by itself.
    """
    if expected is None or asked.streams != "auto":
        return None
    kv_tokens, limits = resolved.kv_pages * resolved.page_size, resolved.limits
    try:
        if resolved.layout == "interleaved":
            return choose_interleaved(expected, kv_tokens, resolved.page_size, limits.streams, limits.requests)
        return choose(expected, kv_tokens, resolved.page_size, limits.max_rows)
    except ValueError as error:
        return Choice(resolved.layout, limits.streams, limits.max_rows, 1, f"layout {resolved.layout}, all {limits.max_rows} rows: {error}")


def choose(expected: Expected, kv_tokens: int, page_size: int, max_rows: int) -> Choice:
    """Split layout: the rows that the KV budget carries, up to `max_rows`, with as many documents as fill them and one more.

    ValueError when not even one question of one document fits.
    """
    document, stream, budget = _fitting(expected, kv_tokens, page_size)
    max_rows = min(max_rows, expected.streams or max_rows)
    wanted = -(-max_rows // expected.questions)
    there = -(-expected.streams // expected.questions) or wanted + PREFILLING
    documents, rows = 1, 0
    for count in range(1, wanted + 1):
        held = min(count + PREFILLING, there, max(1, budget // document))
        carried = min(max_rows, count * expected.questions, max(0, budget - held * document) // stream)
        if carried > rows:
            documents, rows = held, carried
    if not rows:  # no room for a document ahead
        documents, rows = 1, min(max_rows, expected.questions, (budget - document) // stream)
    return Choice("split", min(rows, expected.questions), rows, documents, _reason(expected, rows, documents, kv_tokens))


def choose_interleaved(expected: Expected, kv_tokens: int, page_size: int, streams: int, requests: int) -> Choice:
    """Interleaved layout with P = `streams`: how many of at most `requests` the KV budget carries, each with its streams' whole budget.

    ValueError when not even one question of one document fits.
    """
    document, _, budget = _fitting(expected, kv_tokens, page_size)
    requests = min(requests, -(-expected.streams // streams) or requests)
    fitting = min(streams, expected.questions, (budget - document) * page_size // expected.own_tokens)
    row, a_document = _pages(fitting * expected.own_tokens, page_size), -(-expected.questions // fitting)
    counts = (count for count in range(1, requests + 1) if -(-count // a_document) * document + count * row <= budget)
    carried = max(counts, default=1)
    documents = -(-carried // a_document)
    reason = (
        f"layout interleaved, as configured: P = {fitting}, not calibrated (the published default is {DEFAULT_INTERLEAVED_STREAMS}, a "
        f"document has {expected.questions} questions); {carried} requests over {documents} resident documents take what {kv_tokens} KV "
        "tokens hold"
    )
    return Choice("interleaved", fitting, carried * fitting, documents, reason)


def _fitting(expected: Expected, kv_tokens: int, page_size: int) -> tuple[int, int, int]:
    """Pages of a document, of one of its streams, and of the pool. ValueError when the first two do not fit the third."""
    document, stream = _pages(expected.document_tokens, page_size), _pages(expected.own_tokens, page_size)
    budget = kv_tokens // page_size
    if document + stream > budget:
        raise ValueError(f"a document of {expected.document_tokens} tokens with one answer takes {document + stream} pages of {budget}")
    return document, stream, budget


def _reason(expected: Expected, rows: int, documents: int, kv_tokens: int) -> str:
    own = expected.own_tokens
    streams = min(rows, expected.questions)
    split, interleaved = expected.document_tokens + streams * own, expected.document_tokens * streams + streams * streams * own
    return (
        f"layout split: a step over one document reads {split} KV tokens for its {streams} streams, where interleaved rows scan "
        f"{interleaved} pairs of query and key against {streams * (expected.document_tokens + own)}; {rows} rows over {documents} resident "
        f"documents take what {kv_tokens} KV tokens hold"
    )


def calibrated_streams(
    measure: Callable[[int], float], candidates: Sequence[int] = INTERLEAVED_CANDIDATES, most: int | None = None
) -> tuple[int, str]:
    """P of the interleaved layout: the candidate with the most tokens a second on a calibration set, and the reason. `measure(P)` gives
    them; candidates above `most` are left out, and without any, the default is taken."""
    fitting = [count for count in candidates if most is None or count <= most]
    if not fitting:
        streams = DEFAULT_INTERLEAVED_STREAMS if most is None else min(DEFAULT_INTERLEAVED_STREAMS, most)
        return streams, f"P = {streams}: nothing to calibrate with"
    rates = {count: measure(count) for count in fitting}
    best = max(fitting, key=lambda count: (rates[count], -count))
    return best, f"P = {best}: " + ", ".join(f"{count} gave {rate:.0f} tokens/s" for count, rate in rates.items())


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
