"""The fake device must refuse what a real one would get wrong: each case spoils one thing of a plan that was right."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from askmany.engine.config import EngineConfig
from askmany.engine.fake import FakeExecutor, Faults, PlanError, expected_answer, fake_engine
from askmany.engine.request import Document, Phase
from askmany.engine.scheduler import Scheduler
from askmany.engine.step import MaskedRun, PrefixChunk, StepPlan
from tests.helpers.workload import make_document, make_question

ROOT = Path(__file__).parents[2]


def test_the_documented_example() -> None:
    document = Document("doc", ((1, 2), (3, 4)), (make_question("q", [5, 6], 3),))
    engine = fake_engine(kv_tokens=400)
    engine.submit(document)
    (result,) = engine.drain()
    assert result.answer_token_ids == (21, 22, 23) == expected_answer(document, document.questions[0])
    assert (result.text, result.logprob, result.margin) == ("21 22 23", -0.75, 1 + 21 / 1000)


def test_expected_answers_wrap_and_depend_on_the_seed_only_when_drawn() -> None:
    document = Document("doc", ((998,),), ())
    assert expected_answer(document, make_question("q", [1], 3)) == (999, 0, 1)
    assert expected_answer(document, make_question("q", [1], 3), n=1) == (999,)
    assert expected_answer(document, make_question("q", [1], 3), vocab_size=10) == (9, 0, 1)
    assert expected_answer(document, make_question("q", [1], 2, seed=5)) == (999, 0)
    assert expected_answer(document, make_question("q", [1], 2, seed=5, temperature=0.1)) == (4, 5)


def planned(layout: str, steps: int) -> tuple[Scheduler, FakeExecutor, StepPlan]:
    """A scheduler that has run `steps` steps, its device, and its next plan. Steps: instruction, document, tails, decode rows."""
    config = EngineConfig.model_validate({"layout": layout, "page_size": 2, "step_tokens": 8, "prefill_chunk": 8, "max_rows": 4})
    engine = fake_engine(config, kv_tokens=400)
    engine.submit(make_document("doc", [[1], [2, 3, 4]], [3, 2], max_new_tokens=9))
    for _ in range(steps):
        engine.step()
    plan = engine.scheduler.plan()
    assert plan is not None
    assert isinstance(engine.executor, FakeExecutor)
    return engine.scheduler, engine.executor, plan


def spoil_chunk(plan: StepPlan, start: int = 0, stop: int = 3) -> StepPlan:
    return replace(plan, chunks=(replace(plan.chunks[0], start=start, stop=stop), *plan.chunks[1:]))


def spoil_run(plan: StepPlan, start: int = 0, stop: int = 3, samples: bool = True) -> StepPlan:
    return replace(plan, runs=(replace(plan.runs[0], start=start, stop=stop, samples=samples), *plan.runs[1:]))


def spoil_masked(plan: StepPlan, **changes: object) -> StepPlan:
    return replace(plan, masked=(replace(plan.masked[0], **changes),))  # type: ignore[arg-type]


def orphan(plan: StepPlan) -> StepPlan:
    plan.runs[0].stream.document.path[1].stored -= 1
    return plan


def other_prefix(plan: StepPlan) -> StepPlan:
    plan.runs[0].stream.document.path.pop()
    return plan


def share_a_page(plan: StepPlan) -> StepPlan:
    plan.runs[0].stream.pages[0] = plan.runs[1].stream.pages[0]
    return plan


def take_a_document_page(plan: StepPlan) -> StepPlan:
    plan.runs[0].stream.pages[0] = plan.runs[0].stream.document.path[1].pages[0]
    return plan


def move_a_node(plan: StepPlan) -> StepPlan:
    plan.chunks[0].node.start += 1
    return plan


def early_child(plan: StepPlan) -> StepPlan:
    """The document's first chunk in the same step as the instruction's."""
    (child,) = plan.chunks[0].node.children.values()
    return replace(plan, chunks=(*plan.chunks, PrefixChunk(child, 0, 3)))


def end_a_stream(plan: StepPlan) -> StepPlan:
    plan.masked[0].request.streams[0].finish_reason = "stop"
    return plan


def forget_an_answer_token(plan: StepPlan) -> StepPlan:
    plan.runs[0].stream.answer_token_ids *= 2
    return plan


def repeat_entry(plan: StepPlan) -> MaskedRun:
    run = plan.masked[0]
    return replace(run, entries=(run.entries[0], *run.entries))


CASES: list[tuple[str, int, Callable[[StepPlan], StepPlan], str]] = [
    ("split", 0, lambda plan: StepPlan(()), "must feed tokens"),
    ("split", 0, early_child, "before its ancestors"),
    ("split", 1, lambda plan: spoil_chunk(plan, start=1), r"chunk \[1, 3\) of a node with 0 of 3"),
    ("split", 1, lambda plan: spoil_chunk(plan, stop=4), r"chunk \[0, 4\)"),
    ("split", 1, move_a_node, "right after its ancestors"),
    ("split", 1, lambda plan: replace(plan, chunks=plan.chunks * 2), "same node, stream or request twice"),
    ("split", 2, lambda plan: replace(plan, runs=plan.runs * 2), "same node, stream or request twice"),
    ("split", 2, lambda plan: spoil_run(plan, start=1), r"run \[1, 3\) of a stream with 0 of 3"),
    ("split", 2, lambda plan: spoil_run(plan, stop=4), r"run \[0, 4\)"),
    ("split", 2, lambda plan: spoil_run(plan, samples=False), "run"),
    ("split", 2, lambda plan: spoil_run(plan, stop=2), "run"),
    ("split", 2, orphan, "before its prefix was complete"),
    ("split", 2, other_prefix, "not its prefix"),
    ("split", 2, share_a_page, "has two owners|were filled"),
    ("split", 2, take_a_document_page, "has two owners"),
    ("split", 3, share_a_page, "hold 1 of its 4 tokens|hold 2 of its 4 tokens"),
    ("split", 3, forget_an_answer_token, "samples after 4 tokens"),
    ("interleaved", 2, lambda plan: spoil_masked(plan, start=1), "starts at slot 1 of a row of 0"),
    ("interleaved", 2, lambda plan: spoil_masked(plan, samples=(3,)), "samples wrongly"),
    ("interleaved", 2, lambda plan: replace(plan, masked=(repeat_entry(plan),)), "token 0 of stream 0, which has 1 stored"),
    ("interleaved", 2, lambda plan: replace(plan, masked=plan.masked * 2), "same node, stream or request twice"),
    ("interleaved", 3, end_a_stream, "which has 3 stored or ended"),
]


@pytest.mark.parametrize(("layout", "steps", "spoil", "message"), CASES)
def test_a_spoilt_plan_is_refused(layout: str, steps: int, spoil: Callable[[StepPlan], StepPlan], message: str) -> None:
    _, executor, plan = planned(layout, steps)
    with pytest.raises(PlanError, match=message):
        executor.execute(spoil(plan))


def test_mixed_layouts_are_refused() -> None:
    _, executor, plan = planned("split", 2)
    _, _, other = planned("interleaved", 2)
    with pytest.raises(PlanError, match="in one layout"):
        executor.execute(replace(plan, masked=other.masked))


def test_a_step_run_twice_is_refused() -> None:
    _, executor, plan = planned("split", 2)
    executor.execute(plan)
    with pytest.raises(PlanError, match="were filled"):
        executor.execute(plan)


def test_wrong_contents_show_in_the_answer() -> None:
    scheduler, executor, plan = planned("split", 2)
    plan.runs[0].stream.document.path[1].token_ids = (2, 3, 5)
    with pytest.raises(PlanError, match="not its prefix"):
        executor.execute(plan)
    assert scheduler.has_work


def test_releasing_a_live_stream_is_refused() -> None:
    _, executor, plan = planned("split", 3)
    stream = plan.runs[0].stream
    with pytest.raises(PlanError, match="released before its end"):
        executor.release([stream])
    stream.phase, stream.finish_reason = Phase.DONE, "stop"
    with pytest.raises(PlanError, match="released before its end"):
        executor.release([stream])
    stream.pages = []
    executor.release([stream])


def test_pages_may_be_reused_after_their_owner_let_go() -> None:
    engine = fake_engine(EngineConfig(page_size=2), kv_tokens=16)
    for i in range(4):
        engine.submit(make_document(f"d{i}", [[i + 1] * 5], [3, 3]))
    assert len(list(engine.drain())) == 8
    assert engine.metrics.prefix_evicted_tokens > 0


def test_latency_is_added_to_every_step() -> None:
    engine = fake_engine(kv_tokens=400, faults=Faults(step_s=0.02))
    engine.submit(make_document("doc", [[1]], [2], max_new_tokens=2))
    started = time.perf_counter()
    list(engine.drain())
    assert time.perf_counter() - started >= 3 * 0.02
    assert engine.metrics.busy_s >= 3 * 0.02


_FAULTY = """
import sys
from askmany.engine.fake import Faults, fake_engine
from askmany.engine.request import Document, Question, Sampling
engine = fake_engine(kv_tokens=400, faults=Faults(**{sys.argv[1]: frozenset({"bad"})}))
for key in ("good", "bad"):
    engine.submit(Document(key, ((1,), (len(key),)), (Question("q", (2,), Sampling(4)),)))
    print(len(list(engine.drain())), flush=True)
print("torch" in sys.modules)
"""


def start_faulty(fault: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _FAULTY, fault], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_an_abort_kills_the_process_on_its_document() -> None:
    process = start_faulty("abort_on")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (-signal.SIGABRT, "1\n")


def test_a_hang_never_returns() -> None:
    process = start_faulty("hang_on")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    finally:
        process.kill()
        process.communicate()


def test_a_whole_run_needs_no_torch() -> None:
    command = [sys.executable, "-c", _FAULTY.replace('{"bad"}', "()"), "raise_on"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n1\nFalse\n", "")
