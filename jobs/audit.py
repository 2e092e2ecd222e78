"""`askmany audit CONFIG`: what a finished run's answers depend on, tried out on a sample. The report is `audit.json` in the output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from askmany.engine.errors import ConfigError
from askmany.pipeline import building, resume
from askmany.pipeline.audit import Auditor, draw_sample, match
from askmany.pipeline.commit import current_answers
from askmany.pipeline.config_file import load_config
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.opening import OpenedRun, open_run
from askmany.pipeline.plan import planned_documents
from askmany.pipeline.readers import Fetcher

REPORT = "audit.json"


def main(config: Path, overrides: Sequence[str], sample: int, seed: int, console: Console) -> int:
    """Audit the run of a configuration, write the report, print its figures. ConfigError when there are no answers."""
    opened = open_run(load_config(config, overrides))
    rows = draw_sample((row for table in current_answers(opened.store) for row in table.to_pylist()), sample, seed)
    if not rows:
        raise ConfigError(f"{opened.store.uri}: no answers that are ok; audit a run after it has answered")
    items = match(rows, _documents(opened, {row["doc_id"] for row in rows}), opened.preparer)
    report = Auditor(building.build_engine(opened.config), opened.preparer, seed).report(items)
    opened.store.put(REPORT, json.dumps(report, indent=1, ensure_ascii=False).encode("utf-8"))
    for line in lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(opened.store.uri_of(REPORT), markup=False, highlight=False, soft_wrap=True)
    return 0


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report in a few lines."""
    order, truncation = report["label_order"], report["truncation"]
    flips = "no sampled question shows its options" if order["flip_rate"] is None else f"{100 * order['flip_rate']:.1f} % of answers flip"
    return [
        f"asked again alone: {_agreement(report['independence'])}",
        f"options in another order: {flips}" + (f" ({order['asked']} asked)" if order["asked"] else ""),
        f"half of the document left out: {_agreement(truncation['whole'])}",
        f"another part of documents that were cut: {_agreement(truncation['cut_by_the_run'])}",
    ]


def _agreement(found: Mapping[str, Any]) -> str:
    if found["agreement"] is None:
        return "none asked"
    text = f"{100 * found['agreement']:.1f} % of {found['asked']} answers stay"
    margin = found.get("largest_margin_that_differs")
    return text if margin is None else f"{text}, the largest margin of those that differ is {margin:.2g}"


def _documents(opened: OpenedRun, wanted: set[str]) -> dict[str, SourceDocument]:
    """The sampled documents, read again by their places in the plan."""
    before = resume.read_plan(opened.store)
    if before is None:
        raise ConfigError(f"{opened.store.uri}: it holds no plan; is it the output of a run?")
    plan = before[0]
    planned = {document.doc_id: document for document in planned_documents(plan.table, plan.sets) if document.doc_id in wanted}
    fetcher = Fetcher(opened.config.input)
    try:
        found = [source for _, source in fetcher.fetch([document.locator for document in planned.values()])]
    finally:
        fetcher.close()
    errors = [source for source in found if not isinstance(source, SourceDocument)]
    if errors:
        raise ConfigError(f"a sampled document cannot be read again: {errors[0]}")
    return {source.doc_id: source for source in found if isinstance(source, SourceDocument)}
