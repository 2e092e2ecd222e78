"""The benchmark of the pipeline: real launches of a small run, and what is worked out from their records."""

import json
import math
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from askmany.engine.config import EngineConfig
from askmany.engine.fake import fake_engine
from askmany.engine.request import Document, Question, Sampling
from askmany.jobs import bench_pipeline
from askmany.jobs.bench_launch import Changes, launch
from askmany.jobs.bench_preparer import RememberingPreparer
from askmany.jobs.bench_sleep import NOISE, SLOW, SleepingEngine, Stretch, noise, stretches
from askmany.pipeline.readers import plan_spans, scan
from tests.helpers.runs import opened_run
from tests.helpers.word_model import word_model


def test_a_run_is_launched_checked_and_told(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    out.write_text(json.dumps({"busy": {"kept": True}}))
    model = str(word_model(tmp_path / "model", 64))
    command = ["overhead", "--documents", "60", "--questions", "2", "--workers", "1", "--model", model, "--out", str(out)]
    result = CliRunner().invoke(bench_pipeline.app, command, catch_exceptions=False)
    told = json.loads(result.output.splitlines()[-1])["overhead"]
    assert json.loads(out.read_text()) == {"busy": {"kept": True}, "overhead": told}
    assert told["answers_per_s"] == pytest.approx(120 / told["dispatching_s"])
    assert 0 < told["engine_busy_share"] <= 1
    assert 0 < told["driver_cores"] < 2


def test_a_launch_that_fails_says_why(tmp_path: Path) -> None:
    config = bench_pipeline.fake_config(tmp_path, 2, 1, 1, str(tmp_path / "no-such-model"))
    with pytest.raises(RuntimeError, match="no-such-model"):
        launch(config, Changes())


def test_makespan_is_held_against_the_same_work_spread_over_all_speeds() -> None:
    found = [Stretch(0, 1.0, 10.0, 100.0, 110.0), Stretch(1, 0.5, 5.0, 101.0, 111.0), Stretch(0, 1.0, 2.0, 110.0, 112.0)]
    figures = bench_pipeline.makespan(found)
    assert figures == {"makespan_s": 12.0, "bound_s": pytest.approx(17 / 1.5), "ratio": pytest.approx(12 / (17 / 1.5)), "workers": 2}


def test_every_second_engine_sleeps_longer_and_all_of_them_tell(tmp_path: Path) -> None:
    document = Document("g/d", ((1, 2, 3),), (Question("q", (4, 5), Sampling(max_new_tokens=2)),))
    engines = [SleepingEngine(fake_engine(EngineConfig(backend="fake")), tmp_path / "slept", 1e-6) for _ in range(3)]
    for engine in engines:
        engine.submit(document)
        assert len(list(engine.drain())) == 1
    found = sorted(stretches(tmp_path), key=lambda stretch: stretch.worker)
    assert [stretch.speed for stretch in found] == [1.0, SLOW, 1.0]
    assert len({stretch.work_s for stretch in found}) == 1
    assert all(stretch.end - stretch.begin >= stretch.work_s / stretch.speed for stretch in found)


def test_noise_has_the_spread_that_was_asked_for() -> None:
    logs = [math.log(noise(f"g/d{number}")) for number in range(4000)]
    assert statistics.mean(logs) == pytest.approx(0.0, abs=4 * NOISE / 4000**0.5)
    assert statistics.stdev(logs) == pytest.approx(NOISE, rel=0.05)


def test_remembered_documents_are_prepared_as_any_other(tmp_path: Path) -> None:
    opened = opened_run(tmp_path, [{"doc_id": f"d{n}", "text": "w1 w2 w3" if n % 2 else "w4"} for n in range(6)])
    sources = [
        row for file in opened.files for span in plan_spans(file, opened.config.input, 1 << 20) for row in scan(span, opened.config.input)
    ]
    remembering = RememberingPreparer(opened.preparer)
    assert [remembering.prepare(source) for source in sources] == [opened.preparer.prepare(source) for source in sources]
