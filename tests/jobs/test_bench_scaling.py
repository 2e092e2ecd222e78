"""The scaling run, on the fake engine: counts of several calls make one record, another setup is refused, and the README follows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from askmany.engine.errors import ConfigError
from askmany.jobs.bench_cluster import Setup, write_input
from askmany.jobs.bench_scaling import Record, counts_up_to, efficiency, main, record_for
from askmany.jobs.machine_load import share_of_a_core
from askmany.jobs.tables_scaling import NOTHING, markdown
from askmany.jobs.tables_scaling import main as write_table

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_counts_of_several_calls_make_one_record(tmp_path: Path, ray_session: None) -> None:
    import typer

    app = typer.Typer()
    app.command()(main)
    out = tmp_path / "scaling.json"
    common = ["--output", str(tmp_path / "runs"), "--out", str(out), "--shape", "tiny", "--documents", "60", "--questions", "3"]
    common += ["--shortest", "20", "--longest", "200", "--new-tokens", "4", "--backend", "fake", "--gpus", "0"]
    common += ["--engine", '{"step_tokens": 256}', "--commit", "abc"]
    for counts in (["--workers", "2"], ["--workers", "1"]):
        done = CliRunner().invoke(app, [*common, *counts])
        assert done.exit_code == 0, done.output
    record: Record = json.loads(out.read_text())
    assert [run["workers"] for run in record["runs"]] == [1, 2]
    for run in record["runs"]:
        assert run["statuses"] == {"ok": 180}
        assert 0 < run["bound_s"] <= run["span_s"]
        assert run["commit"] == "abc"
    assert efficiency(record)[1] == 1.0
    done = CliRunner().invoke(app, [*common, "--questions", "4"])
    assert isinstance(done.exception, ConfigError)
    assert "questions 3 there and 4 here" in str(done.exception)


def test_every_length_between_the_two_is_as_likely(tmp_path: Path) -> None:
    write_input(Setup("m", tmp_path, documents=400, document_words=20, longest_words=40))
    lengths = [len(json.loads(line)["text"].split()) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert (min(lengths), max(lengths)) == (20, 40)
    assert len(set(lengths)) == 21
    assert sum(length < 30 for length in lengths) == pytest.approx(400 * 10 / 21, rel=0.25)


def test_counts_are_powers_of_two() -> None:
    assert [counts_up_to(gpus) for gpus in (0, 1, 2, 3, 4, 8)] == [[1], [1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_a_record_says_what_it_was_made_with(tmp_path: Path) -> None:
    held = record_for(Setup("folder/tiny", tmp_path, workers=2), "tiny", None)
    assert held["setup"]["model"] == "tiny"
    assert record_for(Setup("other/tiny", tmp_path / "b", workers=4), "tiny", held) is held
    with pytest.raises(ConfigError, match="model 'tiny' there and 'large' here"):
        record_for(Setup("folder/large", tmp_path), "large", held)


def test_a_share_of_a_core_is_of_the_span() -> None:
    samples = [(0.0, 0.0), (1.0, 0.5), (2.0, 0.6), (3.0, 0.7), (9.0, 6.0)]
    assert share_of_a_core(samples, 0.5, 3.5) == pytest.approx(0.1)
    assert share_of_a_core(samples, 0.5, 1.5) is None


def test_each_count_has_a_line() -> None:
    setup = {"model": "m", "documents": 1000, "document_words": 2000, "longest_words": 16000, "questions": 32, "new_tokens": 24}
    run = {"workers": 1, "documents_per_hour": 11000.4, "busy": 0.99, "gpu": 0.955, "span_s": 327.2, "bound_s": 324.0, "driver": 0.081}
    run |= {"device": "H, H", "commit": "abcdef0123456789", "date": "2026-01-01"}
    record = {"setup": setup | {"dispatch": "direct"}, "runs": [run, run | {"workers": 4, "documents_per_hour": 42241.5, "gpu": None}]}
    text = markdown(record)
    assert text.startswith(
        "m, random weights, 1,000 documents of 2,000 to 16,000 tokens x 32 questions, 24 answer tokens, dispatch direct;"
    )
    assert "| 1 | 11,000 | 100.0% | 99.0% | 95.5% | 327.2 | 1.010 | 8.1% | H, commit abcdef012345, 2026-01-01 |" in text
    assert "| 4 | 42,242 | 96.0% | 99.0% | - | 327.2 | 1.010 | 8.1% |" in text
    assert markdown(None) == NOTHING


def test_a_plot_is_drawn_beside_the_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [{"workers": n, "documents_per_hour": 10.0 * n, "busy": 1.0, "gpu": None, "span_s": 1.0, "bound_s": 1.0} for n in (1, 2)]
    told = {"driver": None, "device": "H", "commit": "a", "date": "2026-01-01"}
    setup = {"model": "m", "documents": 2, "document_words": 2, "longest_words": 3, "questions": 1, "new_tokens": 1, "dispatch": "direct"}
    (tmp_path / "r.json").write_text(json.dumps({"setup": setup, "runs": [run | told for run in runs]}))
    (tmp_path / "README.md").write_text("<!-- scaling -->\n<!-- /scaling -->\n")
    assert write_table([str(tmp_path / "README.md"), str(tmp_path / "r.json")]) == 0
    assert "<svg" in (tmp_path / "scaling.svg").read_text()
    assert "| 2 | 20 | 100.0% |" in (tmp_path / "README.md").read_text()


def test_the_readme_follows_the_file() -> None:
    assert write_table([str(ROOT / "README.md"), str(ROOT / "jobs/measurements/scaling-h200.json"), "--check"]) == 0
