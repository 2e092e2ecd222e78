"""Whether streams together answer as questions alone: python -m askmany.jobs.verify --model DIR --prompts FILE --engines ours stock-triton

Every engine, in a process of its own, answers the same (document, question) prompts greedily; two engines' answers are compared prompt by
prompt: how many agree, where the others part, how far the two best logits were apart there, how much log-probabilities differ before. Two
stock backends beside each other are the yardstick for ours beside stock: a near-tie may fall either way under any kernel. The verdict is on
what was counted; beside it stands how far the two shares may lie apart by chance.
FILE holds one JSON object a line: `document` and `questions`, lists of token ids. The record (`--out`) is written after every engine, its
answers beside it (`.answers.json`), from where a later call with `--add` takes them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from askmany.jobs.bench_process import lines_from
from askmany.jobs.record_file import write_record
from askmany.jobs.verify_chance import Chance, chance

RULE = (
    "our disagreement rate with stock is no higher than that between two stock backends on the same prompts, and each gap is at most twice "
    "the largest logit difference between those two"
)
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
    def pair(self) -> str:
        return f"{self.first} and {self.second}"

    @property
    def ours(self) -> bool:
        """Whether one of the two is this project's engine."""
        return "ours" in (self.first, self.second)

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
    measure = yardstick(comparisons)
    if measure is None:
        return []
    difference = max(c.largest_difference for c in comparisons if not c.ours)
    found = []
    for c in comparisons:
        if c.ours and c.rate > measure.rate:
            found.append(f"{c.pair} disagree on {c.rate:.1%} of the prompts, stock backends on {measure.rate:.1%}")
        if c.ours and c.widest_gap > GAP_FACTOR * difference:
            found.append(f"{c.pair} part at a gap of {c.widest_gap:.3g}, stock backends differ by at most {difference:.3g}")
    return found


def yardstick(comparisons: Sequence[Comparison]) -> Comparison | None:
    """The two stock backends that disagree most often; None without two."""
    return max((c for c in comparisons if not c.ours), key=lambda c: c.rate, default=None)


def chances(comparisons: Sequence[Comparison]) -> dict[str, Chance]:
    """By pair, what each comparison of ours counted beside the yardstick. Empty without one."""
    measure = yardstick(comparisons)
    if measure is None:
        return {}
    return {c.pair: chance(c.prompts, _parted(c), _parted(measure)) for c in comparisons if c.ours}


def main(arguments: list[str] | None = None) -> None:
    """Run every engine, compare every pair, print, write. An engine that gives no answers is left out and makes the command fail."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    if options.only:
        _answer_here(options)
        return
    found, began_s = _held(options), time.monotonic()
    for name in options.engines:
        left_s = options.total_s - (time.monotonic() - began_s)
        if name in found or left_s <= 0:
            continue
        if said := _in_own_process(name, given, min(options.limit_s, left_s)):
            found[name] = said
            _write(options, found)
    record = _record(options, found)
    _show(Console(), record)
    if record["complaints"] or record["missing"]:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with weights")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument(
        "--engines", nargs="+", default=["ours", "stock-flashinfer", "stock-triton"], help="ours, transformers, stock-BACKEND"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--setup", default="{}", help="JSON: fields of OursSetup")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds that each engine may take")
    parser.add_argument("--total-s", type=float, default=math.inf, help="seconds after which no engine runs on")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--add", action="store_true", help="do not ask engines whose answers lie beside --out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    return parser


Answers = dict[str, Any]  # of one engine: its `traces`, one a prompt, and the `environment` that they came from


def _answer_here(options: argparse.Namespace) -> None:
    """In a process of its own: say the engine's answers, then that there is nothing more to say."""
    from askmany.jobs.bench_contender import END, MARK
    from askmany.jobs.bench_gpu import environment
    from askmany.jobs.verify_engines import answers

    traces = [asdict(trace) for trace in answers(options.only, options)]
    print(MARK + json.dumps({"traces": traces, "environment": environment(options.commit)}), flush=True)
    print(END, flush=True)


def _in_own_process(name: str, arguments: Sequence[str], most_s: float) -> Answers | None:
    """None, and a line on the terminal, when it fails or takes longer."""
    command = [sys.executable, "-m", "askmany.jobs.verify", *arguments, "--only", name]
    return next(iter([*lines_from(command, name, most_s)]), None)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What answers must be answers to, so that they may be compared."""
    digest = hashlib.sha256(options.prompts.read_bytes()).hexdigest()
    return {"model": options.model, "prompts": digest, "new_tokens": options.new_tokens, "setup": json.loads(options.setup)}


def _answers_file(out: Path) -> Path:
    return out.with_suffix(".answers.json")


def _held(options: argparse.Namespace) -> dict[str, Answers]:
    """With `--add`, what lies beside the record. SystemExit when it answers something else."""
    if not (options.add and options.out and _answers_file(options.out).exists()):
        return {}
    kept = json.loads(_answers_file(options.out).read_text())
    if kept["asked"] != _asked(options):
        raise SystemExit(f"{_answers_file(options.out)} answers something else: {kept['asked']}, not {_asked(options)}")
    return dict(kept["answers"])


def _write(options: argparse.Namespace, found: Mapping[str, Answers]) -> None:
    if options.out:
        write_record(_answers_file(options.out), {"asked": _asked(options), "answers": found}, indent=None)
        write_record(options.out, _record(options, found))


def _record(options: argparse.Namespace, found: Mapping[str, Answers]) -> dict[str, Any]:
    """What the answers so far come to."""
    traces = {name: [Trace(**trace) for trace in found[name]["traces"]] for name in options.engines if name in found}
    comparisons = [compare(a, b, traces[a], traces[b]) for a, b in combinations(traces, 2)]
    return _asked(options) | {
        "comparisons": [asdict(c) for c in comparisons], "rule": RULE, "complaints": complaints(comparisons),
        "judged": any(c.ours for c in comparisons) and yardstick(comparisons) is not None,
        "chances": {pair: asdict(counted) for pair, counted in chances(comparisons).items()},
        "missing": [name for name in options.engines if name not in found],
        "environments": {name: found[name]["environment"] for name in traces},
    }  # fmt: skip


def _parted(comparison: Comparison) -> list[int]:
    return [prompt for prompt, *_ in comparison.divergences]


def _gap(trace: Trace, at: int) -> float:
    return trace.gaps[at] if at < len(trace.gaps) else 0.0


def _show(console: Console, record: Mapping[str, Any]) -> None:
    """The pairs, the verdict, what breaks it, and what chance may do."""
    table = Table("engines", "prompts", "disagree", "first at", "widest gap", "largest difference", "mean difference")
    for c in record["comparisons"]:
        figures = [f"{c[name]:.3g}" for name in ("widest_gap", "largest_difference", "mean_difference")]
        share = f"{c['disagreeing']} ({c['disagreeing'] / c['prompts']:.1%})"
        table.add_row(f"{c['first']} / {c['second']}", str(c["prompts"]), share, str(c["first_divergence"]), *figures)
    console.print(table)
    lines = [f"{RULE}: {'BROKEN' if record['complaints'] else 'holds' if record['judged'] else 'not judged'}"]
    lines += [f"BROKEN: {complaint}" for complaint in record["complaints"]]
    lines += [beside(pair, Chance(**counted)) for pair, counted in record["chances"].items()]
    lines += [f"MISSING: {name} gave no answers" for name in record["missing"]]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def beside(pair: str, counted: Chance) -> str:
    """The counts of a pair with ours and of the yardstick, and the interval that tells chance from a defect."""
    difference = (counted.ours - counted.yardstick) / counted.prompts
    interval = f"{counted.low:+.1%} to {counted.high:+.1%}"
    judgement = "more than chance" if counted.low > 0 else "less than chance" if counted.high < 0 else "may be chance"
    counts = f"{counted.ours} of {counted.prompts} prompts, the stock backends on {counted.yardstick}"
    return f"{pair} disagree on {counts}: {difference:+.1%} (95 %: {interval}), {judgement}"


if __name__ == "__main__":
    main()
