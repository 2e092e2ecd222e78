"""Everything that can refuse a run without reading its documents: files, columns, questions, model, prompt, context, output.

`open_run` returns the configuration with its names resolved (model revision, questions), which is what every process works from and
what run.json shows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from askmany.engine.errors import ConfigError
from askmany.engine.models import ResolvedModel
from askmany.pipeline import building
from askmany.pipeline.config import InputConfig, OutputConfig, RunConfig
from askmany.pipeline.fingerprint import basis, differences, fingerprint, identity
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.questions import as_config, load_questions
from askmany.pipeline.readers import columns_of, format_of
from askmany.pipeline.run_file import read_run
from askmany.pipeline.schema import answer_schema
from askmany.pipeline.storage import InputFile, ObjectStore, list_files, outside


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that may start: nothing about it is `auto` or relative any more, but how its work is spread."""

    config: RunConfig
    model: ResolvedModel
    identity: Mapping[str, Any]
    fingerprint: str
    files: tuple[InputFile, ...]
    preparer: Preparer
    store: ObjectStore


def open_run(
    config: RunConfig, build_preparer: Callable[[RunConfig], Preparer] = building.build_preparer, own_output: bool = True
) -> OpenedRun:
    """Check and resolve. Raises ConfigError; reads no document, loads no weights, writes nothing.

    Without `own_output` nothing will be written there, so another run's answers in it do not matter.
    """
    answer_schema(config.input.keep)
    store = ObjectStore(config.output.uri, config.output.storage_options)
    questions = load_questions(config.questions, config.sampling, config.input.storage_options)
    files = input_files(config.input, config.output, bool(questions))
    model = building.resolve(config)
    resolved = {"model_revision": model.revision, "questions": as_config(questions, config.sampling), "date": config.date or _date(store)}
    config = config.model_copy(update=resolved)
    preparer = build_preparer(config)
    preparer.check()
    parts = identity(config)
    if own_output:
        refuse_other_run(store, parts)
    return OpenedRun(config, model, parts, fingerprint(parts), tuple(files), preparer, store)


def _date(store: ObjectStore) -> datetime:
    """When the run in the output began, now if there is none: prompts that show the date stay the same when a run is resumed."""
    before = _run_before(store)
    return datetime.fromisoformat(before["identity"]["date"]) if before else datetime.now().replace(microsecond=0)


def input_files(columns: InputConfig, output: OutputConfig, shared_questions: bool) -> list[InputFile]:
    """The input's files, each of a format that is read, the first of each format with the columns it needs. What a run writes into an
    output below its input is none of them: every launch finds the same."""
    found = list_files(columns.uris, columns.storage_options)
    files = outside(found, output.uri, output.storage_options)
    if not files:
        raise ConfigError(f"input.uri: no files in {', '.join(columns.uris)} but those below output.uri ({output.uri})")
    files = _only(files, columns.only)
    first: dict[str, InputFile] = {}
    for file in files:
        first.setdefault(format_of(file.uri, columns.format), file)
    for kind, file in first.items():
        _refuse_missing_columns(file, kind, columns, shared_questions)
    return files


def _only(files: list[InputFile], wanted: Sequence[str]) -> list[InputFile]:
    """The files that are wanted, all without a wish. ConfigError for one that is not there."""
    if not wanted:
        return files
    found = [file for file in files if file.uri in set(wanted)]
    missing = sorted(set(wanted) - {file.uri for file in found})
    if missing:
        raise ConfigError(f"input.only: {missing[0]} is not among the {len(files)} files of the input")
    return found


def _refuse_missing_columns(file: InputFile, kind: str, columns: InputConfig, shared_questions: bool) -> None:
    present = columns_of(file, columns)
    if present is None:
        return
    wanted = {"input.id": columns.id, "input.text": columns.text}
    tabular = kind in ("parquet", "csv")
    if columns.questions and (tabular or not shared_questions):
        wanted["input.questions"] = columns.questions
    if tabular:
        wanted |= {f"input.keep.{n}": name for n, name in enumerate(columns.keep)}
    for key, name in wanted.items():
        if name not in present:
            close = difflib.get_close_matches(name, present, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, present)) or 'none'}"
            raise ConfigError(f"{key}: {file.uri} has no column {name!r}; {hint}")


def _run_before(store: ObjectStore) -> dict[str, Any] | None:
    """run.json of the output, None when there is none. ConfigError when it cannot be read."""
    try:
        return read_run(store)
    except OSError as error:
        raise ConfigError(f"output.uri: {error}") from error


def refuse_other_run(store: ObjectStore, parts: Mapping[str, Any]) -> None:
    """ConfigError when the output already holds answers of another model or under other parameters; questions and documents may differ."""
    before = _run_before(store)
    if before is None:
        return
    known, now = basis(before.get("identity") or {}), basis(parts)
    if known == now:
        return
    keys = differences(known, now)
    raise ConfigError(
        f"output.uri: {store.uri} holds the answers of another run (different: {', '.join(keys) or 'schema'}); "
        "choose another output, or remove that one"
    )
