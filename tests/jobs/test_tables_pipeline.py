"""The pipeline's figures in the README, from made-up measurements and from the ones that are kept."""

from __future__ import annotations

import json
from pathlib import Path

from askmany.jobs.tables_pipeline import main, markdown

ROOT = Path(__file__).parents[2]
CONDITIONS = {"machine": {"cores": 2, "load": 3.6}, "commit": "abc1234", "date": "2026-01-01"}


def test_each_figure_has_a_line_with_its_conditions() -> None:
    resume = {"documents": 1_000_000, "finished_shards": 880, "to_first_work_s": 12.71, "finished_shards_opened_before_work": 0}
    record = {
        "overhead": {"documents": 30_000, "questions": 6, "workers": 2, "answers_per_s": 5432.1, "driver_cores": 0.123} | CONDITIONS,
        "resume": resume | {"killed_bytes_per_document": 234.4, "resumed_bytes_per_document": 199.6} | CONDITIONS,
    }
    lines = markdown(record).splitlines()[2:]
    end = "| 2 cores, load 4; commit abc1234, 2026-01-01 |"
    assert lines[0] == (
        f"| the fake engine, 30,000 documents x 6 questions, 2 workers | 5,432 answers/s; the driver takes 0.12 of a core {end}"
    )
    assert "| work handed out after 12.7 s, 0 finished shards opened |" in lines[1]
    assert [line.split(" | ")[1] for line in lines[2:]] == ["234 bytes", "200 bytes"]


def test_the_readme_follows_the_file() -> None:
    assert main([str(ROOT / "README.md"), str(ROOT / "jobs/measurements/pipeline-cpu.json"), "--check"]) == 0


def test_an_old_readme_is_told_and_rewritten(tmp_path: Path) -> None:
    readme, figures = tmp_path / "README.md", tmp_path / "figures.json"
    readme.write_text("before\n<!-- pipeline -->\nold\n<!-- /pipeline -->\nafter\n")
    figures.write_text(json.dumps({"memory": {"bytes_per_further_answer": -20.6} | CONDITIONS}))
    paths = [str(readme), str(figures)]
    assert main([*paths, "--check"]) == 1
    assert main(paths) == 0
    assert "| driver's memory a further answer | -21 bytes | 2 cores" in readme.read_text()
    assert main([*paths, "--check"]) == 0
