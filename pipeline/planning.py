"""From an opened run to its plan: survey the input on the cluster's CPUs, or take up the plan that is there, and see what is left to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from askmany.engine.errors import ConfigError
from askmany.pipeline import resume
from askmany.pipeline.balance import GroupLimits
from askmany.pipeline.carrying import fill, find_sources, put_aside, read_former, write_former
from askmany.pipeline.columns import release
from askmany.pipeline.commit import DEAD_LETTERS, PLAN, Shard, group_of, seal
from askmany.pipeline.config import RunConfig
from askmany.pipeline.costing import Costs, learn
from askmany.pipeline.documents import DeadLetter
from askmany.pipeline.ledger import read_ledger
from askmany.pipeline.long_documents import long_above
from askmany.pipeline.opening import OpenedRun
from askmany.pipeline.plan import Group, Plan, recosted, refuse_duplicate_documents, to_bytes
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.readers import plan_spans
from askmany.pipeline.replanning import Wanted, replan
from askmany.pipeline.storage import ObjectStore
from askmany.pipeline.survey import Survey, run_survey

SPAN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What there is to do. `done` are the committed groups, of which `carried` were filled by this launch with records of an earlier plan;
    `distrusted` names objects that are no shards of this run and are redone; `standing` are all groups that are redone although an object
    has their name. `rates` are the cost units a second that earlier launches have
    measured on each kind of worker."""

    plan: Plan
    todo: tuple[Group, ...]
    done: dict[str, Shard]
    dead_letters: int
    unasked: int
    distrusted: tuple[str, ...] = ()
    carried: dict[str, Shard] = field(default_factory=dict)
    standing: frozenset[str] = frozenset()
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class How:
    """How a launch plans: the epoch that it may write under (None: it only looks), and whether errors are tried again."""

    epoch: int | None
    retry_errors: bool = False


def take_up(opened: OpenedRun, how: How) -> PlannedRun | None:
    """The plan that the output holds, if it was made from the input and the questions as they are now. Reads no document and needs no
    cluster."""
    before = resume.read_plan(opened.store)
    if before is None or before[1] != made_from(opened):
        return None
    letters, unasked = read_dead_letters(opened.store)
    if letters and opened.config.input.strict:
        raise ConfigError(f"{opened.store.uri_of(DEAD_LETTERS)}: {letters} rows of the input are no documents; refused because of strict")
    costs = learn(read_ledger(opened.store), before[0])
    plan = recosted(before[0], costs.model)
    del before
    release()
    return _planned(opened, plan, letters, unasked, how, costs)


def plan_run(opened: OpenedRun, speed: float, build_preparer: Callable[[RunConfig], Preparer], how: How) -> PlannedRun:
    """Survey the input and plan; unless the launch only looks, plan and dead letters are written to the output. Raises ConfigError."""
    survey = _survey(opened, build_preparer)
    refuse_duplicate_documents(survey.documents)
    release()
    if not survey.documents.num_rows:
        raise ConfigError(f"input.uri: no document with a question in {', '.join(opened.config.input.uris)}{_explain(survey)}")
    output, apart = opened.config.output, long_above(opened.config, opened.preparer)
    limits = GroupLimits(max_documents=output.shard_documents, max_records=output.shard_records, apart_tokens=apart)
    before = resume.read_plan(opened.store)
    done = resume.committed(opened.store, before[0], opened.fingerprint).shards if before else {}
    if before and how.epoch is not None:
        put_aside(opened.store, before[0], done)
    sources, sets = find_sources(opened.store, before[0], done, opened.fingerprint) if before else ([], {})
    costs = learn(read_ledger(opened.store), before[0]) if before else Costs()
    if how.epoch is not None:
        opened.store.put(DEAD_LETTERS, dead_letter_lines(survey.dead_letters, survey.unasked))
    wanted, letters, unasked = Wanted(survey.documents, opened.preparer.shared_asks), len(survey.dead_letters), survey.unasked
    del survey  # with `wanted`, as large as the plan
    found = replan(wanted, sources, sets, speed, costs.model, limits)
    del wanted
    if how.epoch is not None:
        write_former(opened.store, found.former, sets)
        opened.store.put(PLAN, to_bytes(found.plan, made_from(opened)))
        release()
    return _planned(opened, found.plan, letters, unasked, how, costs)


def made_from(opened: OpenedRun) -> str:
    """What a plan of this run is made from."""
    return resume.listing_hash(opened.files, opened.config.input, opened.preparer.shared_name)


def _planned(opened: OpenedRun, plan: Plan, letters: int, unasked: int, how: How, costs: Costs) -> PlannedRun:
    """What of a plan is done, once its groups are filled with the records that earlier plans left. With `retry_errors`, a group whose shard
    holds errors counts as not done."""
    found = resume.committed(opened.store, plan, opened.fingerprint)
    carried = _carry(opened, plan, found.shards, how.epoch)
    shards = {**found.shards, **carried}
    trusted = {group: shard for group, shard in shards.items() if not (how.retry_errors and shard.footer.statuses.get("error"))}
    standing = frozenset(map(group_of, found.distrusted)) | (shards.keys() - trusted.keys())
    return PlannedRun(plan, tuple(plan.without(trusted)), trusted, letters, unasked, found.distrusted, carried, standing, costs.rates)


def _carry(opened: OpenedRun, plan: Plan, done: Mapping[str, Shard], epoch: int | None) -> dict[str, Shard]:
    """Fill what can be filled; then the manifest names the plan's shards, and those that are none any more are put aside."""
    groups = [group for group in plan.groups if group.source is not None and group.name not in done]
    if epoch is None:
        return {}
    carried = fill(opened.store, plan, groups, opened.fingerprint, epoch) if groups else {}
    there = {**done, **carried}
    if read_former(opened.store) is not None:
        seal(opened.store, opened.fingerprint, plan.records_by_group, there, plan.documents_by_group)
        put_aside(opened.store, plan, there)
    return carried


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
    except ValueError as error:
        raise ConfigError(f"{store.uri_of(DEAD_LETTERS)}: not valid JSON lines: {error}") from error
    if not all(isinstance(line, dict) for line in lines):
        raise ConfigError(f"{store.uri_of(DEAD_LETTERS)}: every line must be a JSON object")
    unasked = sum(line.get("unasked_documents", 0) for line in lines)
    return sum("reason" in line for line in lines), unasked
