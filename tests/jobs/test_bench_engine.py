"""The engine benchmark on a tiny model: its work, its three ways, its checks, and the JSON at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from askmany.engine.models import ResolvedModel, resolve_model
from askmany.engine.tokenizer import TextTokenizer
from askmany.jobs import bench_engine
from tests.helpers.generate_oracle import plain_model
from tests.helpers.hand_models import byte_level, write_folder
from tests.helpers.tiny_models import tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> ResolvedModel:
    tokenizer = byte_level()
    model = tiny_model("llama-gqa", vocabulary=tokenizer.get_vocab_size())
    model.save_pretrained(write_folder(tmp_path / "tiny", tokenizer))
    return resolve_model(str(tmp_path / "tiny"))


def make_work(tiny: ResolvedModel) -> bench_engine.Work:
    return bench_engine.make_work(TextTokenizer(tiny.folder), document_tokens=90, questions=3, new_tokens=5)


def test_the_work_has_the_wanted_size(tiny: ResolvedModel) -> None:
    work = make_work(tiny)
    assert len(work.prefix) == 90
    assert len(set(work.tails)) == 3
    assert [len(document.questions) for document in (work.document(), work.document(2))] == [3, 2]


def test_the_command_ends_with_its_figures(tiny: ResolvedModel) -> None:
    app = typer.Typer()
    app.command()(bench_engine.main)
    arguments = ["--model", str(tiny.folder), "--document-tokens", "90", "--questions", "3", "--new-tokens", "5", "--threads", "1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["seconds"]) == {"a_generate", "b_one_at_a_time", "c_together"}
    better = min(figures["seconds"]["a_generate"], figures["seconds"]["b_one_at_a_time"])
    assert figures["speedup"] == pytest.approx(better / figures["seconds"]["c_together"])
    assert [row["questions"] for row in figures["memory"]] == [1, 3]
    assert all(row["within_bound"] and row["kv_bytes"] > 0 for row in figures["memory"])


def test_a_wrong_answer_fails_the_run_before_a_time_is_printed(tiny: ResolvedModel) -> None:
    work, model = make_work(tiny), plain_model(tiny)
    right = bench_engine.generate_each(model, work)
    console = Console(record=True)
    assert bench_engine.compare(model, work, {"a_generate": right, "c_together": list(right)}, console) == 0
    wrong = [right[0], (*right[1][:2], (right[1][2] + 1) % 90, *right[1][3:]), right[2]]
    with pytest.raises(typer.Exit):
        bench_engine.compare(model, work, {"a_generate": right, "c_together": wrong}, console)
    assert "c_together: question 1 parts from (a) at token 2" in " ".join(console.export_text().split())
