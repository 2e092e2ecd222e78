"""From an opened run to its plan: survey the input on the cluster's CPUs, or take up the plan that is there, and see what is left to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from askmany.engine.errors import ConfigError
from askmany.pipeline import resume
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.commit import DEAD_LETTERS, PLAN, Shard
from askmany.pipeline.config import RunConfig
from askmany.pipeline.documents import DeadLetter
from askmany.pipeline.long_documents import long_above
from askmany.pipeline.opening import OpenedRun
from askmany.pipeline.plan import Group, Plan, make_plan, to_bytes
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.readers import plan_spans
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.survey import Survey, run_survey

SPAN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What there is to do. `done` are the committed groups; `distrusted` names objects that are no shards of this run and are redone."""

    plan: Plan
    todo: tuple[Group, ...]
    done: dict[str, Shard]
    dead_letters: int
    unasked: int
    distrusted: tuple[str, ...] = ()


def take_up(opened: OpenedRun, retry_errors: bool = False) -> PlannedRun | None:
    """The plan that the output holds, if it was made from the input as it is now. Reads no document and needs no cluster."""
    before = resume.read_plan(opened.store)
    if before is None or before[1] != resume.listing_hash(opened.files, opened.config.input):
        return None
    letters, unasked = read_dead_letters(opened.store)
    if letters and opened.config.input.strict:
        raise ConfigError(f"{opened.store.uri_of(DEAD_LETTERS)}: {letters} rows of the input are no documents; refused because of strict")
    return _planned(before[0], resume.committed(opened.store, before[0], opened.fingerprint), letters, unasked, retry_errors)


def plan_run(
    opened: OpenedRun, speed: float, build_preparer: Callable[[RunConfig], Preparer], keep: bool, retry_errors: bool = False
) -> PlannedRun:
    """Survey the input and plan. With `keep`, the plan and the dead letters are written to the output. Raises ConfigError."""
    before = resume.read_plan(opened.store)
    done = resume.committed(opened.store, before[0], opened.fingerprint) if before else resume.Committed({})
    survey = _survey(opened, build_preparer)
    output, apart = opened.config.output, long_above(opened.config, opened.preparer)
    limits = GroupLimits(max_documents=output.shard_documents, max_records=output.shard_records, apart_tokens=apart)
    if before and done.shards:
        plan = resume.extend(before[0], set(done.shards), survey.documents, speed, CostModel(), limits, opened.store.uri)
    else:
        plan = make_plan(survey.documents, speed, CostModel(), limits)
    if not plan.documents:
        raise ConfigError(f"input.uri: no document with a question in {', '.join(opened.config.input.uris)}{_explain(survey)}")
    if keep:
        opened.store.put(DEAD_LETTERS, dead_letter_lines(survey.dead_letters, survey.unasked))
        opened.store.put(PLAN, to_bytes(plan, resume.listing_hash(opened.files, opened.config.input)))
    return _planned(plan, done, len(survey.dead_letters), survey.unasked, retry_errors)


def _planned(plan: Plan, done: resume.Committed, letters: int, unasked: int, retry_errors: bool) -> PlannedRun:
    """With `retry_errors`, a group whose shard holds errors counts as not done."""
    shards = {group: shard for group, shard in done.shards.items() if not (retry_errors and shard.footer.statuses.get("error"))}
    return PlannedRun(plan, tuple(plan.without(shards)), shards, letters, unasked, done.distrusted)


def _survey(opened: OpenedRun, build_preparer: Callable[[RunConfig], Preparer]) -> Survey:
    spans = [span for file in opened.files for span in plan_spans(file, opened.config.input, SPAN_BYTES)]
    survey = run_survey(spans, opened.config, build_preparer)
    if survey.dead_letters and opened.config.input.strict:
        first = survey.dead_letters[0]
        more = f" (and {len(survey.dead_letters) - 1} more)" if len(survey.dead_letters) > 1 else ""
        raise ConfigError(f"{first.locator.place()}: {first.reason}{more}; refused because of strict")
    return survey


def _explain(survey: Survey) -> str:
    parts = []
    if survey.dead_letters:
        first = survey.dead_letters[0]
        parts.append(f"{len(survey.dead_letters)} rows are no documents, the first {first.locator.place()}: {first.reason}")
    if survey.unasked:
        parts.append(f"{survey.unasked} documents have no question")
    return f" ({'; '.join(parts)})" if parts else ""


def dead_letter_lines(letters: Sequence[DeadLetter], unasked: int) -> bytes:
    """The dead-letter file: a JSON object a row that is no document, by place; never its text. The last line counts the unasked."""
    lines = []
    for letter in letters:
        place = asdict(letter.locator)
        keys = ("uri", "line", "start", "length")
        lines.append({**{key: place[key] for key in keys}, "doc_id": letter.doc_id, "reason": letter.reason})
    if unasked:
        lines.append({"unasked_documents": unasked})
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8")


def read_dead_letters(store: ObjectStore) -> tuple[int, int]:
    """How many dead letters and unasked documents a former launch found."""
    try:
        lines = [json.loads(line) for line in store.get(DEAD_LETTERS).splitlines()]
    except FileNotFoundError:
        return 0, 0
    unasked = sum(line.get("unasked_documents", 0) for line in lines)
    return sum("reason" in line for line in lines), unasked
