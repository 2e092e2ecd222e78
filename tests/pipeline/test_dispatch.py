"""What an actor does, without Ray around it, and how a pool is sized."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from askmany.engine.errors import ConfigError, EngineError
from askmany.engine.fake import fake_engine
from askmany.pipeline import dispatch, engine_actor
from askmany.pipeline.acks import Ack
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.blocks import pack, unpack
from askmany.pipeline.building import build_engine, build_preparer
from askmany.pipeline.config import RunConfig
from askmany.pipeline.dispatch import Pool, group_block, size_pool
from askmany.pipeline.engine_actor import EngineActor, die
from askmany.pipeline.failure import Failure
from askmany.pipeline.interrupt import draining_first, interrupts_as_exceptions
from askmany.pipeline.plan import make_plan
from askmany.pipeline.worker import Job
from tests.helpers.runs import opened_run, run_config, survey


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Ray to ask for the GPU, no waiting, and the test process gets its signal handlers back."""
    monkeypatch.setattr(engine_actor, "accelerator", lambda: "cpu")
    monkeypatch.setattr(engine_actor, "BUILD_PAUSES_S", (0.0, 0.0))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def prepared(folder: Path, engine: Any = build_engine) -> tuple[Job, list[pa.Table]]:
    opened = opened_run(folder, [{"doc_id": f"d{i}", "text": f"w{i} w2"} for i in range(3)])
    plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits())
    return Job(opened.config, opened.fingerprint, 1, engine, build_preparer), [group_block(plan, group) for group in plan.groups]


def test_an_actor_answers_its_groups(tmp_path: Path) -> None:
    job, blocks = prepared(tmp_path)
    actor = EngineActor(job, None)
    assert actor.room_and_kind()[0] > 0
    assert actor.room_and_kind()[1] == "cpu"
    acks = [Ack.load(actor(pack(block)).column("ack")[0].as_py()) for block in blocks]
    assert [ack.group for ack in acks] == [block.column("group")[0].as_py() for block in blocks]
    assert sum(ack.footer.statuses["ok"] for ack in acks) == 3
    assert not any(pa.types.is_dictionary(column.type) for column in blocks[0].schema)


def test_an_actor_whose_engine_cannot_be_built_says_why(tmp_path: Path) -> None:
    tries: list[Exception] = []

    def failing(error: Exception) -> Any:
        def build(config: RunConfig) -> Any:
            tries.append(error)
            raise error

        return build

    job, blocks = prepared(tmp_path, failing(OSError("bucket is busy")))
    with pytest.raises(EngineError, match="OSError: bucket is busy"):
        Ack.load(EngineActor(job, None).process(blocks[0]))
    assert len(tries) == 2
    job, blocks = prepared(tmp_path, failing(ConfigError("model m: not supported")))
    actor = EngineActor(job, None)
    with pytest.raises(ConfigError, match="model m: not supported"):
        Ack.load(actor.process(blocks[0]))
    assert len(tries) == 3
    assert actor.room_and_kind() == (0, "")


def test_an_engine_that_comes_up_at_the_second_try_serves(tmp_path: Path) -> None:
    tries: list[int] = []

    def build(config: RunConfig) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise OSError
        return fake_engine(config.engine)

    job, blocks = prepared(tmp_path, build)
    assert Ack.load(EngineActor(job, None).process(blocks[0])).footer.rows == blocks[0].num_rows


def test_a_shard_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    job, blocks = prepared(tmp_path)
    actor = EngineActor(job, None)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "answers").write_text("in the way")
    with pytest.raises(EngineError, match=r"answers/.*cannot be written"):
        Ack.load(actor.process(blocks[0]))


def test_failures_carry_their_traceback() -> None:
    try:
        raise ValueError("x")
    except ValueError as error:
        failure = Failure.of(error)
    with pytest.raises(EngineError, match="ValueError: x") as caught:
        Ack.load(failure.dump())
    assert "test_failures_carry" in caught.value.__notes__[0]


def test_a_preempted_worker_acknowledges_no_group_that_it_leaves_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher hands such a group to another worker when this one's process has ended; it must not take it for drained."""
    job, blocks = prepared(tmp_path)
    actor, ended, acks = EngineActor(job, None), threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.wait(20)
    thread = threading.Thread(target=lambda: acks.append(actor.process(blocks[0])), daemon=True)
    thread.start()
    thread.join(1.0)
    assert (thread.is_alive(), acks) == (True, [])


def test_die_ends_the_process() -> None:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        die(ValueError("x"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_group_travels_whole_and_alone(tmp_path: Path) -> None:
    _, (block, *_) = prepared(tmp_path)
    packed = pack(block)
    assert packed.num_rows == 1
    assert unpack(packed).equals(block)
    with pytest.raises(ValueError, match="a batch of 2 groups"):
        unpack(pa.concat_tables([packed, packed]))


def test_ray_data_is_asked_for_gpus_resources_and_labels_as_it_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    """Ray Data checks what it is asked for when the data set is made; no GPU is needed to hear its refusal."""
    job, _ = prepared(tmp_path)
    opened = opened_run(tmp_path, [{"doc_id": "d", "text": "w1"}])
    plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits())
    monkeypatch.setattr(dispatch, "batches", lambda acks: iter_nothing())
    pool = Pool(2, 1.0, 1.0, {"disk": 0.5}, {"ray.io/accelerator-type": "in(A100,H200)"})
    assert pool.takes["label_selector"] == {"ray.io/accelerator-type": "in(A100,H200)"}
    assert list(dispatch.dispatch_ray_data(job, plan, plan.groups, pool)) == []


def iter_nothing() -> Iterator[Any]:
    yield from ()


@pytest.mark.parametrize(
    ("resources", "overrides", "pool"),
    [
        ({"CPU": 8}, {}, Pool(1, 8.0, 0.0)),
        ({"CPU": 8}, {"workers": {"count": 4}}, Pool(4, 2.0, 0.0)),
        ({"CPU": 2}, {"workers": {"count": 4}}, Pool(4, 1.0, 0.0)),
        ({"CPU": 8}, {"workers": {"count": 2, "cpus": 0.5}}, Pool(2, 0.5, 0.0)),
        ({"CPU": 64, "GPU": 4}, {"engine": {"backend": "auto"}}, Pool(4, 1.0, 1.0)),
        ({"CPU": 64, "GPU": 4}, {"engine": {"backend": "auto"}, "workers": {"gpus": 2}}, Pool(2, 1.0, 2.0)),
        ({"CPU": 64, "GPU": 4}, {"engine": {"backend": "auto", "device": "cpu"}}, Pool(1, 64.0, 0.0)),
        ({"CPU": 64, "GPU": 4}, {}, Pool(1, 64.0, 0.0)),
        ({"CPU": 8}, {"engine": {"backend": "auto", "device": "cuda"}}, Pool(1, 1.0, 1.0)),
    ],
)
def test_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resources: dict[str, int], overrides: dict[str, Any], pool: Pool) -> None:
    monkeypatch.setattr(dispatch, "resource", lambda name: resources.get(name, 0))
    assert size_pool(run_config(tmp_path, **overrides)) == pool


def test_sigterm_is_an_interrupt_inside_and_what_it_was_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated() -> None:
        with interrupts_as_exceptions():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        terminated()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_first_signal_drains_and_the_end_of_draining_interrupts() -> None:
    drained = threading.Event()

    def terminated() -> None:
        with draining_first(drained.set):
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(10)

    with pytest.raises(KeyboardInterrupt):
        terminated()
    assert drained.is_set()


def test_a_block_that_ends_while_draining_is_not_interrupted_afterwards() -> None:
    drained = threading.Event()

    def drain() -> None:
        time.sleep(0.3)
        drained.set()

    before = signal.getsignal(signal.SIGTERM)
    with draining_first(drain):
        os.kill(os.getpid(), signal.SIGTERM)
    assert drained.is_set()
    assert signal.getsignal(signal.SIGTERM) == before
    time.sleep(0.1)  # a late interrupt would end the test here


def test_signals_are_left_alone_in_other_threads() -> None:
    seen: list[bool] = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with interrupts_as_exceptions(), draining_first(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM) == before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]
