"""The README's figures of two GPUs, from a made-up record and from the one that is kept."""

from __future__ import annotations

from pathlib import Path

from askmany.jobs.tables_cluster import main, markdown

ROOT = Path(__file__).parents[2]


def test_each_run_has_a_line() -> None:
    run = {"workers": 2, "killed": "", "documents_per_hour": 41023.3, "answer_tokens_per_s": 8751.6, "busy": 0.985, "gpu": None}
    run |= {"span_s": 17.56, "start_s": 30.1}
    setup = {
        "model": "a/b",
        "documents": 200,
        "document_words": 4500,
        "questions": 32,
        "new_tokens": 24,
        "dispatch": "direct",
        "workers": 2,
    }
    record = {
        "setup": setup,
        "device": "GPU, GPU",
        "commit": "abc1234",
        "date": "2026-01-01",
        "scaling": 1.914,
        "killed_share_of_rate": 0.621,
    }
    text = markdown(record | {"runs": [run, run | {"killed": "host/12", "gpu": 0.58}]})
    assert "| 2 | - | 41,023 | 8,752 | 98.5% | - | 17.6 | 30 |" in text
    assert "| 2 | one | 41,023 | 8,752 | 98.5% | 58.0% | 17.6 | 30 |" in text
    assert "2 workers answer 1.91 times as fast as one" in text
    assert text.startswith("GPU, GPU; commit abc1234, 2026-01-01. b, random weights, 200 documents of about 4,500 tokens x 32 questions")


def test_the_readme_follows_the_file() -> None:
    assert main([str(ROOT / "README.md"), str(ROOT / "jobs/measurements/cluster-h200x2.json"), "--check"]) == 0
