"""The README's figures of many GPUs: python -m askmany.jobs.tables_scaling README.md jobs/measurements/scaling-h200.json

Replaces what stands between `<!-- scaling -->` and `<!-- /scaling -->` by what `bench_scaling` wrote, a line a count of workers, and draws
`scaling.svg` beside the file (needs matplotlib). Without the file the README says that nothing was measured. `--check` only compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from askmany.jobs.bench_scaling import efficiency
from askmany.jobs.markers import options_of, put

COLUMNS = (
    "workers", "documents an hour", "efficiency", "busy", "GPU, by nvidia-smi", "seconds", "over the bound", "driver, of a core",
    "measured",
)  # fmt: skip
NOTHING = "Not measured yet."


def markdown(record: Mapping[str, Any] | None) -> str:
    """The setup in a sentence and a line for each count."""
    if record is None or not record["runs"]:
        return NOTHING
    setup, share = record["setup"], efficiency(dict(record))
    said = (
        f"{setup['model']}, random weights, {setup['documents']:,} documents of {setup['document_words']:,} to {setup['longest_words']:,} "
        f"tokens x {setup['questions']} questions, {setup['new_tokens']} answer tokens, dispatch {setup['dispatch']}; every key once in "
        f"every run."
    )
    lines = [_line(run, share[run["workers"]]) for run in record["runs"]]
    head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([said, "", *head, *lines])


def _line(run: Mapping[str, Any], share: float) -> str:
    gpu, driver = ("-" if run[name] is None else f"{run[name]:.1%}" for name in ("gpu", "driver"))
    told = f"{run['device'].split(', ')[0]}, commit {run['commit'][:12]}, {run['date']}"
    over = f"{run['span_s'] / run['bound_s']:.3f}" if run["bound_s"] else "-"
    rates = f"{run['documents_per_hour']:,.0f} | {share:.1%} | {run['busy']:.1%} | {gpu} | {run['span_s']:.1f} | {over} | {driver}"
    return f"| {run['workers']} | {rates} | {told} |"


def plot(record: Mapping[str, Any], file: Path) -> None:
    """Documents an hour over workers, and the line on which they would lie if each were as fast as one of the fewest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = [run["workers"] for run in record["runs"]]
    rates = [run["documents_per_hour"] for run in record["runs"]]
    figure, panel = pyplot.subplots(figsize=(6, 4))
    panel.plot(counts, rates, marker="o", label="measured")
    panel.plot(counts, [rates[0] / counts[0] * count for count in counts], linestyle="--", label="in proportion")
    panel.set_xlabel("workers, one GPU each")
    panel.set_ylabel("documents an hour")
    panel.set_xticks(counts)
    panel.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    record = json.loads(options.measurements.read_text()) if options.measurements.exists() else None
    if record is not None and not options.check:
        plot(record, options.measurements.with_name("scaling.svg"))
    return put(options, "scaling", markdown(record))


if __name__ == "__main__":
    raise SystemExit(main())
