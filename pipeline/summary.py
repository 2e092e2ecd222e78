"""What a person sees before and after a run: the plan in a few lines, then answers, counts and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from askmany.pipeline.commit import DEAD_LETTERS, Manifest, read_answers
from askmany.pipeline.config import RunConfig
from askmany.pipeline.export import JSONL
from askmany.pipeline.opening import OpenedRun
from askmany.pipeline.planning import PlannedRun
from askmany.pipeline.progress import duration
from askmany.pipeline.result import RunResult
from askmany.pipeline.storage import ObjectStore

SAMPLE_ROWS = 8


def print_plan(console: Console, opened: OpenedRun, planned: PlannedRun) -> None:
    """What there is to do."""
    plan = planned.plan
    tokens, answers = plan.total("document_tokens"), plan.total("answer_tokens")
    per_token = opened.model.kv_bytes_per_token(kv_element_bytes(opened))
    longest = int(pc.max(plan.table.column("longest_tokens")).as_py() or 0)
    lines = [
        f"{many(plan.documents, 'document')}, {many(plan.records, 'question')} in {many(len(plan.groups), 'group')}"
        + (f", {many(len(planned.done), 'group')} done before" if planned.done else ""),
        f"{many(tokens, 'document token')} (longest {longest:,}), {many(plan.total('question_tokens'), 'question token')}, "
        f"at most {many(answers, 'answer token')}",
        f"KV of all documents {size(tokens * per_token)}, of the longest {size(longest * per_token)}; "
        f"the questions of a document run in at most {many(waves(opened, plan.table), 'wave')}",
    ]
    if planned.carried:
        records = sum(shard.footer.rows for shard in planned.carried.values())
        lines.append(f"{many(records, 'answer')} of earlier plans carried over: what they answer has not changed")
    unanswerable = plan.records - plan.total("answerable")
    if unanswerable:
        lines.append(f"{many(unanswerable, 'question needs', 'questions need')} no engine: the document is empty or too long")
    if planned.dead_letters:
        lines.append(f"{many(planned.dead_letters, 'row is', 'rows are')} no document: {opened.store.uri_of(DEAD_LETTERS)}")
    if planned.unasked:
        lines.append(f"{many(planned.unasked, 'document has', 'documents have')} no question")
    if _own_questions_missed(opened, plan.table):
        lines.append(f"no document has questions of its own: nothing in column {opened.config.input.questions!r} (input.questions)")
    for text in lines:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _own_questions_missed(opened: OpenedRun, table: pa.Table) -> bool:
    """Whether a column of questions is named that holds none; a name with a slip looks like this, and so does a cut that leaves none."""
    columns = opened.config.input
    named = columns.questions is not None and columns.max_questions is None
    return named and len(table) > 0 and table.column("own_questions").null_count == len(table)


def kv_element_bytes(opened: OpenedRun) -> int:
    """Bytes of one KV element: as configured, else fp32 on a CPU and the model's own on a GPU."""
    engine = opened.config.engine
    dtype = engine.dtype if engine.dtype != "auto" else "float32" if engine.device == "cpu" else opened.model.dtype
    return 4 if dtype == "float32" else 2


def waves(opened: OpenedRun, table: pa.Table) -> int:
    """How often the engine has to begin a set of streams for the document with most questions."""
    most = pc.max(pc.ceil(pc.divide(table.column("answerable").cast("double"), table.column("chunks")))).as_py() or 0
    return -(-int(most) // opened.config.engine.limits.streams)


def print_summary(console: Console, result: RunResult, manifest: Manifest, config: RunConfig, message: str = "") -> None:
    """A sample of the answers, where they are, how many of each status, and how fast it went."""
    store = ObjectStore(config.output.uri, config.output.storage_options)
    if console.quiet:
        return
    sample = next(read_answers(store, manifest), None)
    if sample is not None and sample.num_rows:
        console.print(answer_table(sample.slice(0, SAMPLE_ROWS), console.width))
    heading = {"complete": "done", "interrupted": "interrupted", "incomplete": "not complete", "stopped": "stopped", "failed": "failed"}[
        result.state
    ]
    lines = [f"{heading}: {result.records:,} of {result.planned_records:,} records ({statuses(result.statuses)})", *figures(result)]
    if message:
        lines.append(message)
    if result.dead_letters:
        lines.append(f"dead letters: {result.dead_letters:,} in {store.uri_of(DEAD_LETTERS)}")
    lines.append(f"answers: {store.uri_of('answers/*.parquet')}")
    if config.output.format != "parquet":
        lines.append(f"         {store.uri_of(JSONL)}")
    if result.state != "complete":
        lines.append("run the same command again to go on; what is there is kept")
    for text in lines:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def statuses(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {status}" for status, count in counts.items()) or "none"


def figures(result: RunResult) -> list[str]:
    """Speed of this launch and KV reads of the whole run."""
    lines = []
    usage = result.usage
    if result.seconds and result.launch_records:
        share = result.launch_records / result.records if result.records else 0.0
        answer_tokens = usage.get("answer_tokens", 0) * share
        documents = result.documents * share / result.seconds * 3600
        lines.append(
            f"{duration(result.seconds)}: {documents:,.0f} documents/hour, {result.launch_records / result.seconds:,.1f} answers/s, "
            f"{answer_tokens / result.seconds:,.1f} answer tokens/s"
        )
    read, alone = usage.get("kv_bytes_read", 0), usage.get("kv_bytes_alone", 0)
    if read:
        lines.append(
            f"KV read {size(read)} where one request per question reads {size(alone)}: {alone / read:.1f} times less, "
            f"{size(alone - read)} saved"
        )
    return lines


def answer_table(rows: pa.Table, width: int) -> Table:
    """Records as a table `width` columns wide. Text of documents and answers is shown as it is, never as markup."""
    cells = [_cells(row) for row in rows.to_pylist()]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, column in zip(("document", "question", "answer", "status"), _widths(cells, width), strict=True):
        table.add_column(name, width=column, overflow="ellipsis", no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    status = f"{row['status']} (length)" if row["status"] == "ok" and row["finish_reason"] == "length" else row["status"]
    said = row["answer"] if row["answer"] is not None else row["error"] or ""
    return printable(document_label(row)), printable(row["question"] or row["question_id"]), printable(said), status


def document_label(row: Mapping[str, Any]) -> str:
    """The document's id, and which chunk of how many where it was split: `report-7 [2/5]`."""
    chunk = next((flag.partition(":")[2] for flag in row["flags"] or () if flag.startswith("chunk:")), "")
    return f"{row['doc_id']} [{chunk}]" if chunk else str(row["doc_id"])


def _widths(cells: Sequence[tuple[str, ...]], width: int) -> tuple[int, int, int, int]:
    """Ids and statuses get what they need, ids within bounds; questions and answers share the rest."""
    document = max(len("document"), min(24, width // 4, max(cell_len(row[0]) for row in cells)))
    status = max(len("status"), *(cell_len(row[3]) for row in cells))
    rest = max(20, width - document - status - 3 * 2)
    question = min(rest * 9 // 20, max(len("question"), *(cell_len(row[1]) for row in cells)))
    return document, question, rest - question, status


def printable(text: str) -> str:
    """One line without control characters, which could move the cursor of whoever looks."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def many(count: int, one: str, several: str = "") -> str:
    """`1 document`, `2,000 documents`."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def size(count: float) -> str:
    """Bytes for people: `640 B`, `1.2 MB`."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{sign}{count:,.0f} {unit}" if unit == "B" else f"{sign}{count:,.1f} {unit}"
