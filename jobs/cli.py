"""The command line: one function a command. It parses, calls and prints; what is done lives in the pipeline.

Exit codes: 0 all ok · 1 internal · 2 configuration or bad input · 3 more errors than allowed · 4 interrupted, resumable
· 5 an evaluation on a schedule became worse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.console import Console

from askmany.jobs import audit as audit_job
from askmany.jobs import doctor as doctor_job
from askmany.jobs import evaluate as evaluate_job
from askmany.jobs import export as export_job
from askmany.jobs import gc as gc_job
from askmany.jobs import init as init_job
from askmany.jobs import prefetch as prefetch_job
from askmany.jobs import preview as preview_job
from askmany.jobs import resume as resume_job
from askmany.jobs import run as run_job
from askmany.jobs import scheduled as scheduled_job
from askmany.jobs import score as score_job
from askmany.jobs import show as show_job
from askmany.jobs import status as status_job
from askmany.jobs import submit as submit_job
from askmany.jobs.evaluate import BASELINES, Request
from askmany.jobs.output_uri import Options, Output, open_output, storage_options
from askmany.pipeline.config_file import load_config
from askmany.pipeline.eval_schedule import Since, checked_date
from askmany.pipeline.eval_tasks import TASKS
from askmany.pipeline.lock import IfRunning
from askmany.pipeline.score_report import ScoreRequest
from askmany.pipeline.scoring import ScoreOptions

app = typer.Typer(
    help="Ask many questions of each of many long documents with a local language model, reading every document once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(help="The run's YAML file; `askmany init` writes one to start from.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set engine.streams=4. Repeatable.")]
Waiting = Annotated[IfRunning, typer.Option("--if-running", help="When another run holds the output: fail, wait, or take it over.")]
Again = Annotated[bool, typer.Option("--retry-errors", help="Try documents whose records are errors again.")]
Model = Annotated[str | None, typer.Option("--model", help="A known name, a local folder or a hub id.")]
Place = Annotated[str | None, typer.Option("--output", "-o", help="Where the answers go; the same as --set output.uri=...")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N documents.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse the run when a row of the input is no document.")]


@app.callback()
def settings() -> None:
    """What holds for a whole process: freed Arrow memory goes back to the system, since a driver lives as long as its run."""
    pa.set_memory_pool(pa.system_memory_pool())


@app.command()
def run(
    config: Config,
    sets: Sets = None,
    model: Model = None,
    output: Place = None,
    limit: Limit = None,
    strict: Strict = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    if_running: Waiting = "fail",
    retry_errors: Again = False,
    sort_output: Annotated[bool, typer.Option("--sort-output", help="answers.jsonl in order of document and question.")] = False,
) -> None:
    """Answer every question of every document. Running it again goes on where it stopped, and asks what is new."""
    overrides = run_job.overrides(sets or [], model=model, output=output, limit=limit, strict=strict, sort=sort_output)
    how: dict[str, Any] = {"dry_run": dry_run, "quiet": quiet, "if_running": if_running, "retry_errors": retry_errors}
    raise typer.Exit(run_job.main(config, overrides, **how))


@app.command()
def submit(
    config: Config,
    sets: Sets = None,
    model: Model = None,
    output: Place = None,
    limit: Limit = None,
    strict: Strict = False,
    address: Annotated[str | None, typer.Option("--address", help="The job server's URL; RAY_API_SERVER_ADDRESS otherwise.")] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Names the run on the cluster; from the configuration otherwise.")] = None,
    retries: Annotated[int, typer.Option("--retries", min=0, help="How often to go on after a driver that died.")] = 2,
    again: Annotated[bool, typer.Option("--again", help="Submit a run that has succeeded once more, for what is new.")] = False,
    shared: Annotated[bool, typer.Option("--shared", help="Paths of this machine are the same on every node.")] = False,
    wheel: Annotated[bool, typer.Option(help="Send this askmany along; otherwise the image's own is used.")] = True,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="NAME[=VALUE]", help="For driver and workers. Repeatable.")] = None,
    runtime_env: Annotated[Path | None, typer.Option("--runtime-env", help="A YAML file with more of Ray's runtime_env.")] = None,
    if_running: Waiting = "fail",
    retry_errors: Again = False,
    evaluation: Annotated[bool, typer.Option("--evaluate", help="An evaluation on a schedule instead of a run.")] = False,
    date: Annotated[str | None, typer.Option("--date", help="With --evaluate, as there.")] = None,
    since: Annotated[Since, typer.Option("--since", help="With --evaluate, as there.")] = "all",
    smallest_drop: Annotated[float, typer.Option("--smallest-drop", min=0, max=1, help="With --evaluate, as there.")] = 0.0,
) -> None:
    """Run on a Ray cluster through its job server: follow the log, return the run's exit code. The same command joins it again."""
    overrides = run_job.overrides(sets or [], model=model, output=output, limit=limit, strict=strict)
    words = ("--date", checked_date(date), "--since", since, "--smallest-drop", str(smallest_drop)) if evaluation else None
    how = submit_job.Options(address, run_id, retries, again, shared, wheel, tuple(env or ()), runtime_env, if_running, retry_errors, words)
    raise typer.Exit(run_job.guarded(lambda: submit_job.main(config, overrides, how)))


@app.command()
def resume(output: Output, option: Options = None, sets: Sets = None, if_running: Waiting = "fail", retry_errors: Again = False) -> None:
    """Go on with the run whose output this is, by what its run.json tells."""

    def work() -> int:
        options = storage_options(option)
        return resume_job.main(open_output(output, option), options, sets or [], if_running, retry_errors, Console())

    raise typer.Exit(run_job.guarded(work))


@app.command()
def status(
    output: Output,
    option: Options = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every shard and compare it with its checksum.")] = False,
) -> None:
    """Show where a run stands, from its output alone. Exit code 4: it should be alive and is silent."""
    raise typer.Exit(run_job.guarded(lambda: status_job.main(open_output(output, option), Console(), as_json, verify)))


@app.command()
def report(
    output: Output,
    option: Options = None,
    to: Annotated[str | None, typer.Option("--to", help="A local file instead of report.html in the output.")] = None,
) -> None:
    """Write report.html: the run on one page that opens anywhere, offline."""
    raise typer.Exit(run_job.guarded(lambda: status_job.report(open_output(output, option), to, Console())))


@app.command()
def gc(
    output: Output,
    option: Options = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List only.")] = False,
) -> None:
    """Remove what no answer needs: shards of older plans, marks, unfinished writes."""
    raise typer.Exit(run_job.guarded(lambda: gc_job.main(open_output(output, option), Console(), dry_run)))


@app.command()
def doctor(
    config: Config,
    sets: Sets = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The same as --set output.uri=...")] = None,
    worker: Annotated[bool, typer.Option(help="Look from a worker of the cluster too.")] = True,
) -> None:
    """Check that this machine and a worker can list, read, write and delete where the run needs it."""
    overrides = run_job.overrides(sets or [], output=output)
    raise typer.Exit(run_job.guarded(lambda: doctor_job.main(load_config(config, overrides), Console(), worker)))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("askmany.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented configuration to start from."""
    raise typer.Exit(run_job.guarded(lambda: init_job.main(path, force, Console())))


@app.command()
def preview(
    config: Config,
    sets: Sets = None,
    model: Model = None,
    document: Annotated[str | None, typer.Option("--document", help="A doc_id; the first document when left out.")] = None,
    question: Annotated[str | None, typer.Option("--question", help="A question id; the first question when left out.")] = None,
    chunk: Annotated[int, typer.Option("--chunk", min=0, help="Which chunk of a document that is split, counted from 0.")] = 0,
) -> None:
    """Show the exact prompt of one document and question, its tokens and its BOS check. Loads no weights."""
    overrides = run_job.overrides(sets or [], model=model)
    raise typer.Exit(run_job.guarded(lambda: preview_job.main(config, overrides, document, question, Console(), chunk)))


@app.command()
def show(
    output: Annotated[str, typer.Argument(help="The output folder or URI of a run.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many answers.")] = 20,
    document: Annotated[str | None, typer.Option("--document", help="Only this doc_id.")] = None,
    question: Annotated[str | None, typer.Option("--question", help="Only this question id.")] = None,
    status: Annotated[str | None, typer.Option("--status", help="Only this status, such as error.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole answers, one below the other.")] = False,
) -> None:
    """Show answers of a run, also of one that is still going or was interrupted."""
    wanted = show_job.Filter(document, question, status)
    raise typer.Exit(run_job.guarded(lambda: show_job.main(output, wanted, limit, full, Console())))


@app.command()
def score(
    output: Annotated[str, typer.Argument(help="The output folder or URI of a run.")],
    gold: Annotated[str | None, typer.Option("--gold", help="JSON lines with right answers; the run's own references otherwise.")] = None,
    against: Annotated[str | None, typer.Option("--against", help="Another run's output, compared answer by answer.")] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="How far numbers may be off, as a share.")] = 0.0,
    resamples: Annotated[int, typer.Option("--resamples", min=100, help="Bootstrap resamples.")] = 10_000,
    seed: Annotated[int, typer.Option("--seed", help="Of the bootstrap.")] = 0,
) -> None:
    """Score stored answers: means with intervals that resample documents, classes, calibration. Changes no answer."""
    request = ScoreRequest(output, gold, against, ScoreOptions(tolerance, resamples, seed))
    raise typer.Exit(run_job.guarded(lambda: score_job.main(request, Console())))


@app.command()
def export(
    output: Annotated[str, typer.Argument(help="The output folder or URI of a run.")],
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(export_job.SHAPES)}.")],
    to: Annotated[str | None, typer.Option("--to", help="Folder or URI to write to; exports/SHAPE of the output otherwise.")] = None,
) -> None:
    """Write stored answers in the shape that another tool takes."""
    raise typer.Exit(run_job.guarded(lambda: export_job.main(output, shape, to, Console())))


@app.command()
def audit(
    config: Config,
    sets: Sets = None,
    model: Model = None,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Answers to try again.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Of the sample.")] = 0,
) -> None:
    """Try a finished run's answers again: alone, with options in another order, over less of the document."""
    overrides = run_job.overrides(sets or [], model=model)
    raise typer.Exit(run_job.guarded(lambda: audit_job.main(config, overrides, sample, seed, Console())))


@app.command()
def evaluate(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}; or a run's YAML file, for an evaluation on a schedule.")],
    data: Annotated[str | None, typer.Option("--data", help="The task's file: a path or URI.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Folder or URI for answers and report [out/evaluation].")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A known name, a local folder or a hub id [smollm2].")] = None,
    baseline: Annotated[list[str] | None, typer.Option("--baseline", help=f"One of {', '.join(BASELINES)}. Repeatable.")] = None,
    sets: Sets = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N documents.")] = None,
    max_questions: Annotated[int | None, typer.Option("--max-questions", min=1, help="Only so many questions a document.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Questions in one prompt of the batch-prompt baseline.")] = 10,
    date: Annotated[str | None, typer.Option("--date", help="Schedule: the evaluation's date; today in UTC otherwise.")] = None,
    since: Annotated[Since, typer.Option("--since", help="Schedule: ask all files, or those changed since the last success.")] = "all",
    gold: Annotated[str | None, typer.Option("--gold", help="Schedule: JSON lines with right answers.")] = None,
    webhook: Annotated[str | None, typer.Option("--webhook", envvar="ASKMANY_WEBHOOK", help="Schedule: hears of trouble.")] = None,
    smallest_drop: Annotated[float, typer.Option("--smallest-drop", min=0, max=1, help="Schedule: a regression at least.")] = 0.0,
    if_running: Waiting = "fail",
) -> None:
    """Answer and score a published task with baselines; or, given a configuration, evaluate it once more and tell what became worse."""
    if scheduled_job.is_schedule(task):
        overrides = run_job.overrides(sets or [], model=model, output=output, limit=limit)
        how = scheduled_job.Options(date, since, gold, webhook, smallest_drop, if_running)
        raise typer.Exit(run_job.guarded(lambda: scheduled_job.main(task, overrides, how, Console())))
    names = (data or "", output or "out/evaluation", model or "smollm2")
    request = Request(task, *names, tuple(sets or ()), tuple(baseline or ()), limit, max_questions, batch_size)
    raise typer.Exit(run_job.guarded(lambda: evaluate_job.main(request, Console())))


@app.command()
def prefetch(
    model: Annotated[str, typer.Argument(help="A known name, a local folder, a folder in a bucket or a hub id.")],
    revision: Annotated[str | None, typer.Option("--revision", help="The hash that it must have; a hub's branch, tag or commit.")] = None,
) -> None:
    """Fetch a model into this machine's cache, once for all processes, and print its hash."""
    raise typer.Exit(run_job.guarded(lambda: prefetch_job.main(model, revision, Console())))


@app.command()
def models() -> None:
    """List the models known by name."""
    raise typer.Exit(run_job.guarded(lambda: show_job.models(Console())))


if __name__ == "__main__":
    app()
