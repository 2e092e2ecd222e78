"""How an engine benchmark's call shares its seconds among contenders, and what it will take: arithmetic, no clock, no processes.

A call is killed at a fixed time, and a ratio needs the times of both sides. So every contender of a pass is kept as long as its start took
when it was slowest (of this call where it has started before, else of all that was measured) and LEAST_S; what is over is shared by
WEIGHTS. Whatever a contender leaves goes to those that follow: what is timed quickly comes first. A later pass is kept time for if all of
it fits, and else begins only where the former ones leave it that much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from askmany.jobs.bench_cells import Cell

START_S = {"stock-flashinfer": 200.0, "stock": 130.0, "ours": 85.0}  # the slowest measured on H200, imports and compilers included
STOP_S = 20.0  # at the end of a share, in which nothing begins: what was begun ends, and notes are written
LEAST_S = 30.0 + STOP_S  # for a contender's cells
WEIGHTS = {"stock": 4.0, "ours": 1.0}  # stock takes 3 to 20 times ours for a cell, down to once in the worst cells

Starts = Mapping[str, Sequence[float]]  # seconds that starts took, by contender


class Shares:
    """What each turn of one GPU may take. Turns are a pass's number and a contender; odd passes go backward."""

    def __init__(self, passes: Iterable[int], contenders: Sequence[str]) -> None:
        self.turns = [(number, name) for number in passes for name in (reversed(contenders) if number % 2 else contenders)]
        self._runs: dict[int, bool] = {}  # passes that were come to

    def share_s(self, at: int, left_s: float, starts: Starts) -> float:
        """Seconds of `left_s` for turn `at`, 0 where it is left out. Asked for one turn after the other. The first pass runs even where
        not all slowest starts fit: each contender's share is shortened alike."""
        turns = self.turns[at:]
        number, name = turns[0]
        wanted = [expected_start_s(own, starts) + LEAST_S for _, own in turns]
        kept = sum(own == number for own, _ in turns)
        if not self._runs.setdefault(number, not self._runs or sum(wanted[:kept]) <= left_s):
            return 0.0
        for end in _ends(turns, kept):
            kept = end if sum(wanted[:end]) <= left_s else kept
        over_s = left_s - sum(wanted[:kept])
        if over_s < 0:
            short_s = left_s * wanted[0] / sum(wanted[:kept])
            return short_s if short_s >= LEAST_S else 0.0
        return wanted[0] + over_s * weight(name) / sum(weight(own) for _, own in turns[:kept])


def _ends(turns: Sequence[tuple[int, str]], first: int) -> list[int]:
    """Where the passes after the one that ends at `first` end."""
    return [end for end in range(first + 1, len(turns) + 1) if end == len(turns) or turns[end][0] != turns[end - 1][0]]


def expected_start_s(contender: str, starts: Starts) -> float:
    """The slowest start that is known."""
    return max(starts.get(contender, ()), default=START_S.get(contender, START_S["stock" if contender.startswith("stock-") else "ours"]))


def weight(contender: str) -> float:
    return WEIGHTS["stock" if contender.startswith("stock-") or contender == "transformers" else "ours"]


def plan(passes: Iterable[int], contenders: Sequence[str], limit_s: float) -> list[str]:
    """A line for each pass: the shares where every start is as slow as expected and every contender takes all that it may."""
    shares, left_s = Shares(passes, contenders), limit_s
    lines: dict[int, list[str]] = {}
    for at, (number, name) in enumerate(shares.turns):
        share_s = shares.share_s(at, left_s, {})
        left_s -= share_s
        start_s = expected_start_s(name, {})
        told = f"{name} {share_s:.0f} s, a start of up to {start_s:.0f} s in it{' (TOO SHORT)' if share_s < start_s + LEAST_S else ''}"
        lines.setdefault(number, []).extend([told] if share_s else [])
    return [f"pass {number}: {'; '.join(told) or 'only if the passes before it leave enough'}" for number, told in lines.items()]


def wall_budget_s(cells: Iterable[Cell], contenders: Sequence[str], seeds: int, passes: int) -> float:
    """A rough upper estimate of a call's seconds: starts, and each cell's prefill and answers at rates of an H200 with a 7B model."""
    starts = sum(expected_start_s(name, {}) for name in contenders)
    work = sum((_prefill_s(cell) + _answers_s(cell)) for cell in cells)
    return passes * (starts + len(contenders) * (seeds + 1) * work)


def _prefill_s(cell: Cell) -> float:
    return cell.documents * cell.document_tokens / 25_000


def _answers_s(cell: Cell) -> float:
    rows = min(256, cell.documents * cell.questions)
    steps = cell.new_tokens * max(1, cell.documents * cell.questions / rows)
    return steps * (0.006 + rows * cell.document_tokens * 1.5e-8)
