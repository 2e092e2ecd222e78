"""Whether streams together answer as questions alone: python -m askmany.jobs.verify --model DIR --prompts FILE --engines ours stock-triton

Every engine, in a process of its own, answers the same (document, question) prompts greedily; two engines' answers are compared prompt by
prompt: how many agree, where the others part, how far the two best logits were apart there, how much log-probabilities differ before. Two
stock backends beside each other are the yardstick for ours beside stock: a near-tie may fall either way under any kernel.
FILE holds one JSON object a line: `document` and `questions`, lists of token ids.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GAP_FACTOR = 2.0  # a divergence may be as wide as this many times the largest difference between two stock backends


@dataclass(frozen=True, slots=True)
class Trace:
    """One greedy answer: its tokens, their log-probabilities, and at each the gap of the two largest logits."""

    token_ids: list[int]
    logprobs: list[float]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two engines' answers to the same prompts."""

    first: str
    second: str
    prompts: int
    disagreeing: int
    first_divergence: int | None  # the earliest token at which two answers part
    widest_gap: float  # the smaller of the two engines' gaps, at the widest divergence
    largest_difference: float  # of the log-probability of a token that both drew after the same text
    mean_difference: float
    divergences: list[tuple[int, int, float]]  # (prompt, token, gap)

    @property
    def rate(self) -> float:
        return self.disagreeing / self.prompts


def compare(first: str, second: str, ours: Sequence[Trace], theirs: Sequence[Trace]) -> Comparison:
    """Compare answers prompt by prompt. ValueError when they are not of the same prompts."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{first} has {len(ours)} answers, {second} has {len(theirs)}")
    divergences: list[tuple[int, int, float]] = []
    differences: list[float] = []
    for prompt, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        at = divergence(one.token_ids, other.token_ids)
        shared = min(len(one.token_ids), len(other.token_ids)) if at is None else at
        differences += [abs(a - b) for a, b in zip(one.logprobs[:shared], other.logprobs[:shared], strict=True)]
        if at is not None:
            divergences.append((prompt, at, min(_gap(one, at), _gap(other, at))))
    return Comparison(
        first, second, len(ours), len(divergences), min((at for _, at, _ in divergences), default=None),
        max((gap for *_, gap in divergences), default=0.0), max(differences, default=0.0),
        sum(differences) / len(differences) if differences else 0.0, divergences,
    )  # fmt: skip


def divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token in which two answers differ, the end of the shorter one included; None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def complaints(comparisons: Sequence[Comparison]) -> list[str]:
    """What breaks the rule: ours must part from stock no more often than two stock backends do from each other, and nowhere by a gap of
    more than GAP_FACTOR times the largest difference between those two. Empty without a yardstick."""
    yardsticks = [c for c in comparisons if "ours" not in (c.first, c.second)]
    if not yardsticks:
        return []
    rate, difference = max(c.rate for c in yardsticks), max(c.largest_difference for c in yardsticks)
    found = []
    for c in comparisons:
        if "ours" not in (c.first, c.second):
            continue
        pair = f"{c.first} and {c.second}"
        if c.rate > rate:
            found.append(f"{pair} disagree on {c.rate:.1%} of the prompts, stock backends on {rate:.1%}")
        if c.widest_gap > GAP_FACTOR * difference:
            found.append(f"{pair} part at a gap of {c.widest_gap:.3g}, stock backends differ by at most {difference:.3g}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run every engine, compare every pair, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with weights")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument(
        "--engines", nargs="+", default=["ours", "stock-flashinfer", "stock-triton"], help="ours, transformers, stock-BACKEND"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--setup", default="{}", help="JSON: fields of OursSetup")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.only:
        from askmany.jobs.verify_engines import answers

        print(json.dumps([asdict(trace) for trace in answers(options.only, options)]))
        return
    traces = {name: _in_own_process(name, arguments or sys.argv[1:]) for name in options.engines}
    comparisons = [compare(a, b, traces[a], traces[b]) for a, b in combinations(options.engines, 2)]
    wrong = complaints(comparisons)
    _show(Console(), comparisons, wrong)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"model": options.model, "comparisons": [asdict(c) for c in comparisons], "complaints": wrong}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if wrong:
        raise SystemExit(1)


def _in_own_process(name: str, arguments: Sequence[str]) -> list[Trace]:
    command = [sys.executable, "-m", "askmany.jobs.verify", *arguments, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-3000:]}")
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("["))
    return [Trace(**trace) for trace in json.loads(line)]


def _gap(trace: Trace, at: int) -> float:
    return trace.gaps[at] if at < len(trace.gaps) else 0.0


def _show(console: Console, comparisons: Sequence[Comparison], wrong: Sequence[str]) -> None:
    table = Table("engines", "prompts", "disagree", "first at", "widest gap", "largest difference", "mean difference")
    for c in comparisons:
        figures: list[Any] = [f"{c.widest_gap:.3g}", f"{c.largest_difference:.3g}", f"{c.mean_difference:.3g}"]
        table.add_row(f"{c.first} / {c.second}", str(c.prompts), f"{c.disagreeing} ({c.rate:.1%})", str(c.first_divergence), *figures)
    console.print(table)
    for line in wrong:
        console.print(f"BROKEN: {line}")


if __name__ == "__main__":
    main()
