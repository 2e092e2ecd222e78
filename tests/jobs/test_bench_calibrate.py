"""Calibration of P on a run's own documents, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from askmany.engine.loading import load_executor
from askmany.engine.pipelined import PipelinedEngine
from askmany.jobs import bench_calibrate
from askmany.pipeline import building
from askmany.pipeline.config_file import load_config
from askmany.pipeline.opening import open_run
from tests.helpers.hand_models import CHATML, byte_level, write_folder
from tests.helpers.runs import write_jsonl
from tests.helpers.tiny_models import tiny_model

LABELLED = {"id": "who", "question": "Who?", "type": "choice", "options": ["the mayor", "the fox"]}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tokenizer = byte_level()
    tiny_model("llama-gqa", vocabulary=tokenizer.get_vocab_size()).save_pretrained(write_folder(tmp_path / "tiny", tokenizer, CHATML))
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": f"d{i}", "text": "The mayor said no. " * (i + 2)} for i in range(4)])
    values: dict[str, Any] = {
        "model": str(tmp_path / "tiny"),
        "input": {"uri": str(tmp_path / "d.jsonl")},
        "questions": [*(f"Who said {'it ' * n}?" for n in range(5)), LABELLED],
        "output": {"uri": str(tmp_path / "out")},
        "engine": {"device": "cpu", "kv_tokens": 4096, "page_size": 8},
        "sampling": {"max_new_tokens": 3},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_fastest_p_becomes_a_line_for_the_configuration(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []
    measured = bench_calibrate.Bench.tokens_per_s

    def tokens_per_s(bench: bench_calibrate.Bench, streams: int) -> float:
        tried.append(streams)
        assert measured(bench, streams) > 0
        return {1: 10.0, 2: 30.0, 4: 20.0}[streams]

    monkeypatch.setattr(bench_calibrate.Bench, "tokens_per_s", tokens_per_s)
    out = tmp_path / "rates.json"
    assert bench_calibrate.main([str(config), "--documents", "2", "--candidates", "4", "1", "2", "64", "--out", str(out)]) == 0
    assert tried == [1, 2, 4], "64 is more than a document's five questions"
    record = json.loads(out.read_text())
    assert (record["streams"], record["documents"], record["questions"], record["device"]) == (2, 2, 10, "cpu")
    assert record["tokens_per_s"] == {"1": 10.0, "2": 30.0, "4": 20.0}
    assert "engine: {layout: interleaved, streams: 2}" in capsys.readouterr().out
    assert not (tmp_path / "out").exists(), "calibrating wrote into the run's output"


def test_a_p_answers_as_any_other(config: Path) -> None:
    opened = open_run(load_config(config), own_output=False)
    documents = bench_calibrate.calibration_set(opened, 3)
    assert [len(document.questions) for document in documents] == [5, 5, 5], "labels of several tokens are left out"
    model = building.resolve(opened.config, weights=True)
    engine_config = opened.config.engine.model_copy(update={"layout": "interleaved", "streams": 4})
    executor, resolved = load_executor(model, engine_config, 512)
    bench = bench_calibrate.Bench(model, executor, resolved, 512, documents)
    answers = []
    for streams in (1, 4):
        engine = bench.engine(streams)
        assert engine.scheduler.limits.streams == streams  # type: ignore[attr-defined]
        for document in documents:
            engine.submit(document)
        answers.append({(r.document_key, r.question_id): r.answer_token_ids for r in engine.drain()})
    assert len(answers[0]) == 15
    assert answers[0] == answers[1]


def test_graphs_are_captured_before_the_clock_in_memory_that_the_former_gave_back(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which is only named here."""
    opened = open_run(load_config(config), own_output=False)
    documents = bench_calibrate.calibration_set(opened, 3)
    model = building.resolve(opened.config, weights=True)
    engine_config = opened.config.engine.model_copy(update={"layout": "interleaved", "streams": 4, "max_rows": 16})
    executor: Any = SimpleNamespace(model=None, pool=SimpleNamespace(device=torch.device("cuda")), steps="of another P")
    did: list[Any] = []
    steps = SimpleNamespace(warm_run=lambda rows, document_rows: did.append((rows, document_rows)))
    monkeypatch.setattr(bench_calibrate, "hand_back", lambda device: did.append(executor.steps))
    monkeypatch.setattr("askmany.engine.kernel_loading.load_steps", lambda model, pool, config, context: steps)
    bench = bench_calibrate.Bench(model, executor, engine_config, 512, documents)
    assert type(bench.engine(4)) is PipelinedEngine
    assert did == [None, (16, 5)], "three documents of five questions are six requests, of which four are live"
    assert executor.steps is steps
    assert bench.most_rows(2) == (16, 5)
    assert bench_calibrate.Bench(model, executor, engine_config, 512, documents[:1]).most_rows(4) == (8, 5)


def test_what_cannot_be_measured_is_refused_in_a_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_calibrate.main([str(config), "--set", "input.uri=nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().out
    assert bench_calibrate.main([str(config), "--set", f"questions={json.dumps([LABELLED])}"]) == 2
    assert "has a question for the interleaved layout" in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(SystemExit):
        bench_calibrate.main([str(config), "--documents", "0"])
