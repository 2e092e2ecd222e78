"""Small runs for tests of the pipeline: configurations over a word model and the fake engine, and the parts of a run by themselves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from askmany.pipeline.config import RunConfig
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.planning import SPAN_BYTES
from askmany.pipeline.readers import plan_spans
from askmany.pipeline.survey import Survey, gather, pack_spans, survey_spans
from tests.helpers.word_model import word_model


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any] | bytes]) -> Path:
    """Rows as JSON lines; bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def run_values(folder: Path, context_tokens: int = 64, **values: Any) -> dict[str, Any]:
    """A configuration's mapping: fake engine, word model, input d.jsonl, output out/, all in `folder`."""
    base: dict[str, Any] = {
        "model": str(word_model(folder / "model", context_tokens)),
        "input": {"uri": str(folder / "d.jsonl")},
        "questions": ["w1 w2"],
        "output": {"uri": str(folder / "out")},
        "engine": {"backend": "fake"},
        "sampling": {"max_new_tokens": 2},
    }
    for key, value in values.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base


def run_config(folder: Path, context_tokens: int = 64, **values: Any) -> RunConfig:
    """The configuration of `run_values`."""
    return parse_config(run_values(folder, context_tokens, **values))


def survey(opened: OpenedRun) -> Survey:
    """The survey of an opened run, made in this process."""
    columns = opened.config.input
    spans = [span for file in opened.files for span in plan_spans(file, columns, SPAN_BYTES)]
    return gather([survey_spans(block, columns, opened.preparer) for block in pack_spans(spans)], columns)


def opened_run(folder: Path, rows: Sequence[Mapping[str, Any] | bytes], context_tokens: int = 64, **values: Any) -> OpenedRun:
    """A run over these rows, opened."""
    write_jsonl(folder / "d.jsonl", rows)
    return open_run(run_config(folder, context_tokens, **values))
