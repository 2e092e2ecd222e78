"""The acknowledgement: all that a worker says of a committed group, small enough to travel and to be kept as a line of the ledger."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from askmany.pipeline.answering import Answered
from askmany.pipeline.commit import Shard, ShardFooter
from askmany.pipeline.failure import Failure
from askmany.pipeline.schema import Record

SLOWEST, REASONS, EXAMPLES, REASON_LENGTH = 5, 10, 5, 160
_CUT = re.compile(r"truncated_tokens:(\d+)")


@dataclass(frozen=True, slots=True)
class Notes:
    """What is worth telling of a group's records beyond their number. `errors` counts reasons with their figures taken out."""

    document_tokens: int = 0
    truncated: int = 0
    dropped_tokens: int = 0
    slowest: Sequence[Mapping[str, Any]] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    examples: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Ack:
    """A committed group: its shard, how long it took, who did it. `retries` counts the worker's retried I/O since its last word,
    `choice` is what its engine made of `streams: auto`.

    `shard` is None when the worker was draining and the group is left for the next launch.
    """

    group: str
    shard: Shard | None
    seconds: float
    worker: str
    accelerator: str
    notes: Notes = field(default_factory=Notes)
    retries: Mapping[str, int] = field(default_factory=dict)
    choice: Mapping[str, Any] | None = None

    @property
    def footer(self) -> ShardFooter:
        """What was committed. ValueError when the worker was draining."""
        if self.shard is None:
            raise ValueError(f"group {self.group} was not committed")
        return self.shard.footer

    def dump(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def load(cls, text: str) -> Ack:
        """What a worker returned. Raises ConfigError or EngineError when it was a failure."""
        values = json.loads(text)
        if "failure" in values:
            raise Failure(**values["failure"]).error()
        shard = values.pop("shard")
        whole = Shard(ShardFooter(**shard["footer"]), shard["bytes"]) if shard else None
        return cls(shard=whole, notes=Notes(**values.pop("notes")), **values)

    def line(self) -> dict[str, Any]:
        """One line of the ledger: the footer, the object's size and the notes, side by side."""
        own = {"seconds": round(self.seconds, 3), "worker": self.worker, "accelerator": self.accelerator}
        footer = asdict(self.footer)
        size = self.shard.bytes if self.shard else 0
        return {**footer, "records": footer["rows"], "bytes": size, **own, **asdict(self.notes)}


def take_notes(answered: Sequence[Answered]) -> Notes:
    """The notes of a group."""
    slow = sorted((one for one in answered if one.seconds), key=lambda one: -one.seconds)[:SLOWEST]
    bad = [record for one in answered for record in one.records if record.status == "error"]
    dropped = [_dropped(one.records[0]) for one in answered if one.records and one.records[0].truncated]
    return Notes(
        document_tokens=sum(one.tokens for one in answered),
        truncated=len(dropped),
        dropped_tokens=sum(dropped),
        slowest=[
            {"doc_id": one.doc_id, "seconds": round(one.seconds, 3), "tokens": one.tokens, "questions": len(one.records)} for one in slow
        ],
        errors=dict(Counter(_reason(record.error) for record in bad).most_common(REASONS)),
        examples=[{"doc_id": r.doc_id, "question_id": r.question_id, "error": (r.error or "")[:REASON_LENGTH]} for r in bad[:EXAMPLES]],
    )


def _reason(error: str | None) -> str:
    return re.sub(r"\d+", "#", error or "?")[:REASON_LENGTH]


def _dropped(record: Record) -> int:
    return sum(int(match.group(1)) for flag in record.flags if (match := _CUT.fullmatch(flag)))
