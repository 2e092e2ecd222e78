"""What a ledger teaches: the costs and speeds behind it, whatever lies between its lines, and what a plan and a dispatcher make of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from askmany.pipeline.balance import CostModel
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.costing import Costs, learn
from askmany.pipeline.direct import ActorPool
from askmany.pipeline.ledger import Ledger
from askmany.pipeline.opening import open_run
from askmany.pipeline.plan import recosted
from askmany.pipeline.planning import How, take_up
from askmany.pipeline.storage import ObjectStore
from tests.helpers.launches import Asked, Killed, launch
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.word_model import words

SPEED = {"A100": 1.0, "RTX-A6000": 0.45}


def lines(count: int, noise: float, seed: int) -> list[dict[str, Any]]:
    """Groups of two workers of each kind, each holding two groups at once: 2 ms a document, 0.1 ms a token, 0.5 ms an answer token."""
    draw = np.random.default_rng(seed)
    clock = {f"{kind}/{n}": 1e9 for kind in SPEED for n in range(2)}
    waited = dict.fromkeys(clock, 0.0)
    found = []
    for number in range(count):
        worker = min(clock, key=lambda name: clock[name])
        kind = worker.partition("/")[0]
        documents, decode = int(draw.integers(1, 20)), int(draw.integers(50, 3000))
        prefill = int(draw.lognormal(8, 1) * documents)
        took = (0.002 * documents + 1e-4 * prefill + 5e-4 * decode) / SPEED[kind] * draw.lognormal(-(noise**2) / 2, noise)
        clock[worker] += took
        usage = {"documents": documents, "prefill_tokens": prefill, "tail_tokens": 0, "decode_tokens": decode}
        took_and_waited = took + waited[worker]
        values = {"group": f"g{number}", "worker": worker, "accelerator": kind, "seconds": took_and_waited, "usage": usage, "records": 1}
        found.append({"kind": "group", "at": clock[worker], **values})
        waited[worker] = took
    return sorted(found, key=lambda line: line["at"])


def test_costs_and_speeds_come_out_of_the_ledger() -> None:
    costs = learn(lines(200, 0.0, 1), None)
    assert costs.model.per_answer_token == pytest.approx(5.0, rel=0.05)
    assert costs.model.per_document == pytest.approx(20.0, rel=0.3)
    assert costs.rates["RTX-A6000"] / costs.rates["A100"] == pytest.approx(0.45, rel=0.02)
    assert costs.rates["A100"] == pytest.approx(10_000, rel=0.05)
    noisy = learn(lines(400, 0.3, 2), None)
    assert noisy.rates["RTX-A6000"] / noisy.rates["A100"] == pytest.approx(0.45, rel=0.15)
    assert noisy.model.per_answer_token == pytest.approx(5.0, rel=0.3)


def test_few_lines_give_a_rate_and_odd_ones_nothing() -> None:
    few = learn(lines(4, 0.0, 3), None)
    assert few.model == CostModel()
    assert set(few.rates) == set(SPEED)
    odd: list[dict[str, Any]] = [{"kind": "event"}, {"kind": "group"}, {"kind": "group", "usage": {"prefill_tokens": 5}, "at": 1}]
    assert learn(odd, None) == Costs()


def test_the_direct_dispatcher_begins_with_what_is_known_of_a_kind() -> None:
    pool = ActorPool.__new__(ActorPool)
    pool.known_rates, pool.kinds, pool.rates = {"fast": 100.0, "slow": 40.0}, {0: "fast", 1: "slow", 2: "slow", 3: "new"}, {}
    assert [pool.speed(worker) for worker in range(5)] == [100.0, 40.0, 40.0, 70.0, 70.0]
    pool.rates = {1: 30.0}
    assert [pool.speed(worker) for worker in range(4)] == [100.0, 30.0, 30.0, 30.0]
    pool.known_rates = {}
    assert pool.speed(0) == 30.0


def test_a_later_launch_goes_by_the_measured_costs(tmp_path: Path) -> None:
    """Answer tokens turn out to be dear: the group of short documents with long answers comes before the long document."""
    rows = [{"doc_id": "long", "text": words(900), "qs": ["w1"]}]
    rows += [{"doc_id": f"d{n}", "text": words(5), "qs": [{"question": "w2", "max_new_tokens": 40}]} for n in range(2)]
    write_jsonl(tmp_path / "d.jsonl", rows)
    values = run_values(tmp_path, 1024, questions=None, input={"questions": "qs"}, output={"shard_documents": 1})
    with pytest.raises(Killed):
        launch(values, Asked(), dies_after=0)
    store = ObjectStore(str(tmp_path / "out"), {})
    ledger = Ledger(store, 1)
    for line in lines(60, 0.0, 4):
        usage = {**line["usage"], "decode_tokens": line["usage"]["decode_tokens"] // 100}  # a hundred times dearer than they seem
        ledger.write("group", {key: value for key, value in {**line, "usage": usage}.items() if key != "kind"})
    ledger.flush()
    planned = take_up(open_run(parse_config(values)), How(2))
    assert planned is not None
    first, *_, last = planned.todo
    assert planned.plan.rows(last).column("doc_id").to_pylist() == ["long"]
    assert planned.plan.rows(first).column("doc_id").to_pylist() != ["long"]
    assert set(planned.rates) == set(SPEED)
    again = recosted(planned.plan, CostModel())
    assert [group.name for group in again.groups] == [group.name for group in planned.plan.groups]
    assert again.without(set())[0].longest_tokens == 900
