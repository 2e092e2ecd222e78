"""The benchmark of several workers, on the fake engine: every run is whole, the killed worker is told, the sums are sums."""

from __future__ import annotations

import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import safe_open

from askmany.engine.errors import ConfigError
from askmany.engine.models import resolve_model
from askmany.jobs.bench_cluster import Setup, _killer, _refuse_losses, compare, config_of, random_model, write_input
from askmany.jobs.bench_together import DRAWN, READY, built_s, stored_engine
from askmany.jobs.machine_load import mean_over
from askmany.pipeline.ledger import Ledger
from askmany.pipeline.run import as_config
from askmany.pipeline.run_file import write_run
from askmany.pipeline.storage import ObjectStore
from tests.helpers.stored import stored_run

pytestmark = pytest.mark.timeout(300)


def test_runs_are_compared_and_one_loses_a_worker(tmp_path: Path, ray_session: None) -> None:
    model = random_model("tiny", tmp_path / "model")
    assert random_model("tiny", tmp_path / "model") == model
    sizes = {"documents": 120, "questions": 4, "document_words": 200, "new_tokens": 4, "rounds": 1}
    setup = Setup(str(model), tmp_path, **sizes, backend="fake", gpus=0, engine=(("step_tokens", 256),))  # type: ignore[arg-type]
    found = compare(setup)
    alone, together, killed = found["runs"]
    assert (alone["workers"], together["workers"], killed["workers"]) == (1, 2, 2)
    assert (len(alone["groups"]), len(together["groups"])) == (1, 2)
    assert all(one["statuses"] == {"ok": 480} for one in found["runs"])
    assert found["scaling"] == pytest.approx(together["documents_per_hour"] / alone["documents_per_hour"])
    assert (alone["killed"], together["killed"]) == ("", "")
    assert all(0 < one["busy"] <= 1 for one in found["runs"])
    assert [len(one["built_s"]) for one in (alone, together)] == [1, 2]


def test_one_worker_is_killed_once_all_are_at_work_and_a_third_is_done(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), {})
    write_run(store, {"planned_records": 90})
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    names = [f"{socket.gethostname()}/{process.pid}" for process in processes]
    ledger = Ledger(store, 1)
    with _killer(store, 2) as victim:
        for name, records in ((names[0], 40), (names[1], 10)):
            assert (victim, [process.poll() for process in processes]) == ([], [None, None])
            ledger.write("group", {"worker": name, "records": records})
            ledger.flush()
            time.sleep(0.6)
        while not victim:
            time.sleep(0.05)
    assert victim == [min(names)]
    ends = {name: process.poll() if name != victim[0] else process.wait(10) for name, process in zip(names, processes, strict=True)}
    assert ends == {victim[0]: -9, max(names): None}
    for process in processes:
        process.kill()
        process.wait()


def test_a_folder_without_weights_passes_for_a_model_whose_weights_are_drawn(tmp_path: Path) -> None:
    model = resolve_model(str(random_model("tiny", tmp_path, stored=False)))
    assert (model.layers, model.kv_heads, model.vocab_size) == (2, 2, 128)
    with safe_open(model.folder / DRAWN, "np") as file:
        assert list(file.keys()) == []


def test_engines_wait_for_each_other_and_a_replacement_for_nobody(tmp_path: Path) -> None:
    model = random_model("tiny", tmp_path / "model", stored=False)
    sizes = {"documents": 4, "questions": 2, "document_words": 20}
    setup = Setup(str(model), tmp_path, **sizes, backend="fake", gpus=0, engine=(("step_tokens", 256),))  # type: ignore[arg-type]
    write_input(setup)
    config = as_config(config_of(setup, str(tmp_path / "out"), 2))
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(stored_engine, config)
        with pytest.raises(TimeoutError):
            first.result(2)
        assert len(built_s(tmp_path / "out")) == 1
        (tmp_path / "out" / READY / "another").write_text("1.5")
        engine = first.result(60)
    assert built_s(tmp_path / "out")[-1] == 1.5
    assert not engine.has_work
    assert not list(engine.scheduler.tree.nodes())
    assert stored_engine(config) is not engine


def test_lost_answers_are_refused(tmp_path: Path) -> None:
    stored_run(tmp_path / "out", {})
    with pytest.raises(ConfigError, match="exit code 0, 0 of 6,400 keys"):
        _refuse_losses(Setup("m", tmp_path), ObjectStore(str(tmp_path / "out"), {}), 0)


def test_utilisation_is_of_the_time_and_the_gpus_that_count() -> None:
    samples = [(0.0, [1.0, 1.0, 0.0]), (5.0, [0.5, 0.0, 0.9]), (6.0, [0.7, 0.0, 0.9]), (9.0, [0.0, 0.0, 0.0])]
    assert mean_over(samples, 4, 7, 2) == pytest.approx(0.75)
    assert mean_over(samples, 4, 7, 1) == pytest.approx(0.9)
    assert mean_over(samples, 7, 8, 2) is None
