"""Whole runs whose longest documents fit no single worker, and what decides who is given what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from askmany.engine.context_parallel_build import start_up_cells
from askmany.engine.errors import ConfigError
from askmany.pipeline.balance import CostModel, GroupLimits
from askmany.pipeline.building import build_engine, build_preparer
from askmany.pipeline.commit import read_records, shard_name
from askmany.pipeline.config_file import parse_config
from askmany.pipeline.context_groups import size_groups
from askmany.pipeline.dispatch import Pool, group_block
from askmany.pipeline.long_documents import long_above
from askmany.pipeline.opening import open_run
from askmany.pipeline.plan import make_plan
from askmany.pipeline.result import RunResult
from askmany.pipeline.run import run
from askmany.pipeline.worker import GroupWorker, Job
from tests.helpers.group_runs import mortal_group_engine, tiny_word_model
from tests.helpers.runs import opened_run, run_values, survey, write_jsonl
from tests.helpers.word_model import words

CONTEXT, ROOM = 512, 128
SIZES = {"a": 20, "b": 5, "long": 180, "c": 33, "d": 40, "e": 1}


def values(folder: Path, out: str, engine: dict[str, Any], workers: dict[str, Any]) -> dict[str, Any]:
    tiny_word_model(folder / "model", CONTEXT)
    write_jsonl(folder / "d.jsonl", [{"doc_id": name, "text": words(size, start=size)} for name, size in SIZES.items()])
    whole = run_values(folder, CONTEXT, questions=["w1 w2", "w3 w4 w5"], sampling={"max_new_tokens": 3}, output={"uri": str(folder / out)})
    tiny_word_model(folder / "model", CONTEXT)  # run_values writes the folder without weights
    whole["engine"] = {"backend": "transformers", "device": "cpu", "page_size": 4, "max_rows": 4, "step_tokens": 64, **engine}
    whole["workers"] = workers
    return whole


def answers(result: RunResult) -> dict[tuple[str, str], tuple[str, str]]:
    """(status, answer) by key; fails when a key comes twice."""
    rows = result.to_table().to_pylist()
    found = {(row["doc_id"], row["question_id"]): (row["status"], row["answer"]) for row in rows}
    assert len(found) == len(rows) == len(SIZES) * 2
    return found


def answers_alone(folder: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """What one worker with room enough for everything answers, in this process."""
    opened = open_run(parse_config(values(folder, "roomy", {"kv_tokens": 1024}, {})))
    plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits())
    worker = GroupWorker(Job(opened.config, opened.fingerprint, 1, build_engine, build_preparer), lambda error: None)
    found = {}
    for group in plan.groups:
        worker.process(group.name, group_block(plan, group))
        records = read_records(opened.store, shard_name(group.name), opened.fingerprint)
        assert records is not None
        found.update({(row["doc_id"], row["question_id"]): (row["status"], row["answer"]) for row in records.to_pylist()})
    worker.close()
    return found


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
def test_short_documents_and_an_over_long_one_are_all_answered(tmp_path: Path) -> None:
    """Every key once, with the answers of a worker that has room enough, although a rank of the group is lost on the way: the group is
    started again, the document is tried again, and its records say so."""
    alone = answers_alone(tmp_path)
    config = values(
        tmp_path, "out", {"kv_tokens": ROOM}, {"context_ranks": 2, "context_step_tokens": 70, "dispatch": "direct", "max_attempts": 3}
    )
    result = run(config, build_group_engine=mortal_group_engine)
    assert (tmp_path / "out" / "killed-once").exists()
    assert {status for status, _ in answers(result).values()} == {"ok"}
    assert answers(result) == alone
    attempts = {row["doc_id"]: row["attempt"] for row in result.to_table().to_pylist()}
    assert attempts["long"] == 2
    assert attempts["a"] == 1
    assert sum(count for name, count in result.usage.items() if name.startswith("sections_")) > 0
    assert result.usage["chosen_by_fit"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_behind_ray_data(tmp_path: Path, ranks: int) -> None:
    """The other dispatcher gives short documents to its own workers first; without groups, the long one is refused."""
    alone = answers_alone(tmp_path)
    together = run(values(tmp_path, "groups", {"kv_tokens": ROOM}, {"context_ranks": ranks}))
    assert answers(together) == alone
    assert {row["attempt"] for row in together.to_table().to_pylist()} == {1}
    without = run(values(tmp_path, "without", {"kv_tokens": ROOM}, {}))
    refused = {doc for (doc, _), (status, _) in answers(without).items() if status == "too_long"}
    assert refused == {"long"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
def test_a_latency_bound_sends_documents_to_groups_that_hand_them_over(tmp_path: Path) -> None:
    """One worker could hold it, but its prefill is to be shared: all ranks prefill, one of them answers."""
    alone = answers_alone(tmp_path)
    bound = {"context_ranks": 2, "context_above_tokens": 100, "context_step_tokens": 37, "dispatch": "direct"}
    result = run(values(tmp_path, "out", {"kv_tokens": 1024}, bound))
    assert answers(result) == alone
    assert result.usage["handed_over_documents"] == 1
    assert result.usage["sections_local"] > 0


def test_long_documents_stand_apart(tmp_path: Path) -> None:
    """Groups of the plan hold short or long documents, never both; without groups of ranks they mix."""
    rows = [{"doc_id": name, "text": words(size)} for name, size in SIZES.items()]
    engine = {"backend": "transformers", "kv_tokens": ROOM, "page_size": 4}
    opened = opened_run(tmp_path, rows, CONTEXT, engine=engine, workers={"context_ranks": 2})
    bound = long_above(opened.config, opened.preparer)
    assert bound == ROOM - 2 - 2 - 3 * 4  # question and answer, and three pages of 4
    plan = make_plan(survey(opened).documents, 1.0, CostModel(), GroupLimits(apart_tokens=bound))
    assert plan.groups[-1].longest_tokens == 180
    assert [group.longest_tokens for group in plan.groups[:-1] if group.longest_tokens > bound] == []
    assert plan.rows(plan.groups[-1]).column("doc_id").to_pylist() == ["long"]
    assert sum(group.stop - group.start for group in plan.groups) == len(SIZES)


BAD = [
    ({"workers": {"context_ranks": 2}}, r"needs engine\.kv_tokens"),
    ({"workers": {"context_above_tokens": 9}}, r"context_above_tokens 9 without workers\.context_ranks"),
    ({"workers": {"context_step_tokens": 9}}, r"context_step_tokens 9 without workers\.context_ranks"),
    ({"workers": {"context_ranks": 2}, "engine": {"kv_tokens": 64, "backend": "fake"}}, "backend"),
    ({"workers": {"context_ranks": 2}, "engine": {"kv_tokens": 64, "layout": "interleaved"}}, "layout"),
    ({"workers": {"context_ranks": 1}}, "greater than or equal to 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_senseless_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    config = {"model": "m", "input": {"uri": "d.jsonl"}, "questions": ["w1"], **changes}
    with pytest.raises(ConfigError, match=message):
        parse_config(config)


def test_the_start_up_measurement_takes_what_fits() -> None:
    assert start_up_cells(100) == []
    assert start_up_cells(256) == [(16, 0), (16, 96), (128, 0), (128, 96)]
    assert len(start_up_cells(1 << 20)) == 9


def test_a_bound_without_room_for_a_document_is_refused(tmp_path: Path) -> None:
    engine = {"backend": "transformers", "kv_tokens": 16, "page_size": 4}
    opened = opened_run(tmp_path, [{"doc_id": "a", "text": "w1"}], CONTEXT, engine=engine, workers={"context_ranks": 2})
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens 16 leaves no room .* 16 tokens"):
        long_above(opened.config, opened.preparer)


def test_groups_take_the_devices_of_the_single_workers() -> None:
    assert size_groups(Pool(8, 1.0, 1.0), 4) == Pool(2, 1.0, 1.0)
    assert size_groups(Pool(1, 2.0, 0.0), 4) == Pool(1, 0.5, 0.0)
    with pytest.raises(ConfigError, match=r"context_ranks 4: the run has 2 workers"):
        size_groups(Pool(2, 1.0, 1.0), 4)
