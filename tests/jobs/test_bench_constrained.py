"""The benchmark of constrained decoding on a tiny model: lengths are equal, kinds are held, figures are there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from askmany.engine.grammar import GrammarCompiler
from askmany.jobs import bench_constrained
from askmany.jobs.bench_constrained import KINDS, measure, pieces


def test_the_vocabulary_has_every_character_once_and_the_wanted_size() -> None:
    for size in (128, 4000):
        words = pieces(size)
        assert len(words) == size
        assert words[:10] == [""] * 10
        assert len(set(words[10:])) == size - 10
        assert set(map(chr, range(32, 127))) <= set(words)
        assert not [word for word in words if len(word) > 1 and any(letter.isdigit() for letter in word)]


@pytest.mark.parametrize("kind", ["choice", "json", "regex"])
def test_no_answer_can_end_before_its_length(kind: str) -> None:
    compiler = GrammarCompiler.plain(pieces(300), 300, [2])
    for tokens in (3, 40):
        assert compiler.compile(str(KINDS[kind](1, tokens)))
    assert KINDS["choice"](0, 9) != KINDS["choice"](1, 9)


def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench_constrained.main)
    sizes = ["--shape", "tiny", "--rows", "3", "--document-tokens", "40", "--new-tokens", "6", "--passes", "2"]
    done = CliRunner().invoke(app, [*sizes, "--out", str(tmp_path / "out.json")], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert set(found["kinds"]) == {"text", "choice", "json", "regex"}
    for kind in found["kinds"].values():
        assert len(kind["seconds"]) == 2
        assert kind["low"] <= kind["ratio"] <= kind["high"]
        assert kind["tokens_per_s"] > 0
    assert found["kinds"]["text"]["ratio"] == 1.0
    assert found["untyped_launches"]["equal"]


class _Counted:
    """A bench whose kinds take known times; text takes other graphs once a grammar was there, if `moved`."""

    def __init__(self, moved: bool) -> None:
        self.moved, self.ran = moved, Counter[str]()

    def seconds(self, kind: str, new_tokens: int | None = None) -> float:
        self.ran[kind] += 1
        return {"text": 1.0, "choice": 1.25, "json": 2.0, "regex": 1.0}[kind]

    def launches(self, work: Any) -> dict[str, int]:
        work()
        return {"held": int(self.moved and self.ran["regex"] > 0)}


def test_costs_are_paired_and_a_change_of_launches_is_told() -> None:
    bench = _Counted(moved=False)
    found = measure(bench, 3, 10, 20)  # type: ignore[arg-type]
    assert {name: kind["cost"] for name, kind in found["kinds"].items()} == pytest.approx(
        {"text": 0.0, "choice": 0.2, "json": 0.5, "regex": 0.0}
    )
    assert found["kinds"]["text"]["tokens_per_s"] == pytest.approx(200.0)
    assert found["untyped_launches"]["equal"]
    assert bench.ran == {"text": 6, "choice": 4, "json": 4, "regex": 4}
    assert not measure(_Counted(moved=True), 3, 10, 20)["untyped_launches"]["equal"]  # type: ignore[arg-type]
