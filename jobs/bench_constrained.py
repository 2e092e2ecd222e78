"""What holding answers to a grammar costs: python -m askmany.jobs.bench_constrained --shape qwen2.5-7b --rows 256 --out FILE

One document in the cache, one question a row, the same number of answer tokens whatever the kind: free text, a choice, a JSON schema, a
regular expression. Kinds take turns in one process, in changing order; throughputs are paired by pass. Weights are random; the vocabulary
has the shape's size, single characters and made-up words. Says, too, whether free text is run by the same graphs before and after grammars.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from askmany.engine.constraints import Constraints
from askmany.engine.garbage import leave_out_what_is_loaded
from askmany.engine.grammar import GrammarCompiler
from askmany.engine.grammar_json import json_grammar
from askmany.engine.grammar_pieces import either, grammar, literal
from askmany.engine.grammar_regex import regex as regex_piece
from askmany.jobs.bench_cells import FIRST_ID, Cell, Drawn, draw
from askmany.jobs.bench_ours import OursContender, OursSetup, load_ours
from askmany.jobs.bench_ratios import geometric_mean, interval
from askmany.jobs.bench_shapes import shape_folder, vocabulary

END = 2  # the end token of all shapes
WARM_UP_TOKENS = 16
OPTIONS = 5
ITEMS = 16
Grammar = Callable[[int, int], str | None]  # of question i, with room for n tokens at least
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]


def pieces(size: int) -> list[str]:
    """A vocabulary: ids that no text has, the printable characters, made-up words with and without a blank or a mark, no digits in them."""
    rng = random.Random(0)
    found = dict.fromkeys([f"<{i}>" for i in range(FIRST_ID)])
    found |= dict.fromkeys(map(chr, range(32, 127)))
    while len(found) < size:
        word = "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))
        mark = rng.choice('."_,:;') if rng.random() < 0.05 else ""
        found.setdefault(rng.choice(["", " "]) + word + rng.choice(["", "n", "s", "r"]) + mark)
    return [*([""] * FIRST_ID), *list(found)[FIRST_ID:size]]


def text(question: int, tokens: int) -> str | None:
    """Whatever the model says."""
    return None


def choice(question: int, tokens: int) -> str | None:
    """Each question its own labels, of digits, which are tokens each."""
    rng = random.Random(question)
    labels = ["".join(rng.choices("0123456789", k=tokens + 1)) for _ in range(OPTIONS)]
    return grammar(either(*map(literal, labels)))


def regex(question: int, tokens: int) -> str | None:
    """As many digits as tokens, and one."""
    return grammar(regex_piece(f"[0-9]{{{tokens + 1}}}"))


def json_schema(question: int, tokens: int) -> str | None:
    """More records than the tokens suffice for."""
    record = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["person", "place", "event"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 100_000},
            "note": {"type": "string"},
            "sure": {"type": "boolean"},
        },
        "required": ["kind", "count", "note", "sure"],
    }
    records = -(-tokens // len(record["required"])) + 1
    schema = {"type": "array", "items": record, "minItems": records, "maxItems": records + ITEMS}
    return json_grammar(schema)[0]


KINDS: dict[str, Grammar] = {"text": text, "choice": choice, "json": json_schema, "regex": regex}


class Bench:
    """An engine with a document in its cache, and what asking it took."""

    def __init__(self, contender: OursContender, cell: Cell, drawn: Drawn) -> None:
        self._contender, self._cell, self._drawn = contender, cell, drawn
        self._grammars: dict[tuple[str, int], list[str | None]] = {}

    def seconds(self, kind: str, new_tokens: int | None = None) -> float:
        """From handing in the questions to the last answer, each of them of `new_tokens` (default: the cell's)."""
        count = new_tokens or self._cell.new_tokens
        if (kind, count) not in self._grammars:
            self._grammars[kind, count] = [KINDS[kind](i, count) for i in range(self._cell.questions)]
        asked = [(self._drawn.documents[0], self._drawn.tails[0], [count] * self._cell.questions)]
        taken_s, answers = self._contender.answer(asked, grammars=self._grammars[kind, count])
        if [len(answer.answer_token_ids) for answer in answers] != [count] * self._cell.questions:
            raise RuntimeError(f"answers of kind {kind} ended before {count} tokens")
        return taken_s

    def launches(self, work: Callable[[], Any]) -> dict[str, int]:
        """What `work` made the device run: replays by bucket, steps without a graph, picks under masks, captures."""
        before = self._contender.launches()
        work()
        return {name: count - before.get(name, 0) for name, count in self._contender.launches().items() if count != before.get(name, 0)}


def measure(bench: Bench, passes: int, rows: int, new_tokens: int) -> dict[str, Any]:
    """Warm-up, the check of launches, then the kinds in turns."""
    bench.seconds("text", WARM_UP_TOKENS)
    before = bench.launches(partial(bench.seconds, "text"))
    held = {kind: bench.launches(partial(bench.seconds, kind)) for kind in KINDS if kind != "text"}
    after = bench.launches(partial(bench.seconds, "text"))
    names = list(KINDS)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(passes):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for name in turn if number % 2 == 0 else turn[::-1]:
            taken[name].append(bench.seconds(name))
    tokens = rows * new_tokens
    kinds = {name: _kind(taken["text"], taken[name], tokens) for name in names}
    same = {"before": before, "after": after, "equal": before == after}
    return {"kinds": kinds, "untyped_launches": same, "typed_launches": held}


def _kind(free_s: Sequence[float], taken_s: Sequence[float], tokens: int) -> dict[str, Any]:
    """`ratio`: throughput over that of free text, with its interval; `cost`: what is lost of it."""
    ratios = [free / taken for free, taken in zip(free_s, taken_s, strict=True)]
    low, high = interval(ratios)
    ratio = geometric_mean(ratios)
    speed = tokens / statistics.median(taken_s)
    return {"seconds": list(taken_s), "tokens_per_s": speed, "ratio": ratio, "low": low, "high": high, "cost": 1 - ratio}


def main(
    shape: Annotated[str, typer.Option(help="a name of bench_shapes")] = "qwen2.5-7b",
    rows: Annotated[int, typer.Option(help="questions, all live at once", min=1)] = 256,
    document_tokens: Annotated[int, typer.Option(min=1)] = 8192,
    new_tokens: Annotated[int, typer.Option(help="of every answer", min=2)] = 128,
    passes: Annotated[int, typer.Option(help="timings of each kind", min=1)] = 6,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes as well")] = None,
) -> None:
    """Time free text against choices, JSON and regular expressions of the same length."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cell = Cell("constrained", document_tokens, rows, new_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        model = load_ours(shape_folder(shape, Path(scratch)), device, document_tokens + cell.question_tokens + new_tokens + 2, True)
        words = pieces(vocabulary(shape))
        constraints = Constraints(lambda: GrammarCompiler.plain(words, model.vocabulary, [END]))
        setup = replace(OursSetup(), max_rows=rows)
        contender = OursContender(model, setup, document_tokens + cell.question_tokens + new_tokens + 2, [cell], constraints)
        drawn = draw(cell, 0, vocabulary(shape))
        contender.run(replace(cell, new_tokens=2), replace(drawn, lengths=[[2] * rows]))
        leave_out_what_is_loaded()
        found = measure(Bench(contender, cell, drawn), passes, rows, new_tokens)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    sizes = {"shape": shape, "rows": rows, "document_tokens": document_tokens, "new_tokens": new_tokens, "passes": passes}
    result = {"device": machine, "torch": torch.__version__, **sizes, **found, "notes": contender.notes()}
    print(json.dumps(result))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if device.type == "cuda":
        sys.stdout.flush()
        os._exit(0)  # libraries keep threads and compilers that hold the process open for a minute


if __name__ == "__main__":
    typer.run(main)
