"""The README's figures of two GPUs: python -m askmany.jobs.tables_cluster README.md jobs/measurements/cluster-h200x2.json

Replaces what stands between `<!-- cluster -->` and `<!-- /cluster -->` by what `bench_cluster` printed, a line a run. `--check` only
compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from askmany.jobs.markers import options_of, put

HEAD = "| workers | killed | documents an hour | answer tokens a second | busy | GPU, by nvidia-smi | seconds | seconds of starting |"


def markdown(record: Mapping[str, Any]) -> str:
    """The setup in a sentence, a line for each run, and what they come to together."""
    setup = record["setup"]
    model = str(setup["model"]).rsplit("/", 1)[-1]
    documents = f"{setup['documents']} documents of about {setup['document_words']:,} tokens x {setup['questions']} questions"
    said = (
        f"{record['device']}; commit {record['commit']}, {record['date']}. {model}, random weights, {documents}, "
        f"{setup['new_tokens']} answer tokens, dispatch {setup['dispatch']}; every key once in every run."
    )
    lines = [_line(run) for run in record["runs"]]
    came = (
        f"{setup['workers']} workers answer {record['scaling']:.2f} times as fast as one; with one of them killed after a third of the "
        f"work and started anew, at {record['killed_share_of_rate']:.2f} of the rate of all."
    )
    return "\n".join([said, "", HEAD, "|---|---|---|---|---|---|---|---|", *lines, "", came])


def _line(run: Mapping[str, Any]) -> str:
    killed = "one" if run["killed"] else "-"
    gpu = "-" if run["gpu"] is None else f"{run['gpu']:.1%}"
    rates = f"{run['documents_per_hour']:,.0f} | {run['answer_tokens_per_s']:,.0f} | {run['busy']:.1%} | {gpu}"
    return f"| {run['workers']} | {killed} | {rates} | {run['span_s']:.1f} | {run['start_s']:.0f} |"


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    return put(options, "cluster", markdown(json.loads(options.measurements.read_text())))


if __name__ == "__main__":
    raise SystemExit(main())
