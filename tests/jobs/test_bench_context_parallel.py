"""The context-parallel benchmark on two CPU processes with tiny shapes: every section, right before timed, table last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from askmany.jobs import tables_context
from askmany.jobs.bench_context_attention import crossover_row
from askmany.jobs.bench_context_parallel import SECTIONS, Options, main
from askmany.jobs.bench_context_table import COLUMNS, modelled, printed
from askmany.kernels.ring_choice import FITTED, Heads, Rules
from tests.helpers.source import ROOT


@pytest.mark.timeout(400)
def test_the_small_programme_fills_every_section(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["--small", "--out", str(tmp_path / "record.json"), "--commit", "abc"])
    record = json.loads((tmp_path / "record.json").read_text())
    table = record["table"]
    assert set(table) == {*SECTIONS, "rules", "by_ranks"} == set(COLUMNS)
    for row in (*table["prefill"], *table["crossover"]):
        assert max(row[f"{way}_error"] for way in FITTED) < 1e-5
        assert min(row[f"{way}_ms"] for way in FITTED) > 0
    assert min(table["prefill"][0][name] for name in ("alone_ms", "attention_ms", "exchange_ms", "efficiency")) > 0
    assert [row["rule"] for row in table["crossover"]] == ["fit"] * 3
    assert table["streams"][0]["group_ms"] > 0
    assert table["streams"][0]["speed_up_graph"] is None  # no GPU, no graph
    (model,) = table["model"]
    assert model["same_first_tokens"] == 1.0
    assert model["group"]["answered"] == model["streams"] == 3
    assert model["prefill_efficiency"] > 0
    assert model["alone"]["prefill_s"] == min(model["alone"]["own_prefill_s"], model["alone"]["ring_prefill_s"])
    (over_long,) = table["over_long"]
    assert over_long["refused_by_one_gpu"] is True
    assert over_long["group"]["answered"] == 2
    assert {row["ranks"] for row in table["by_ranks"]} == {2, 4, 8, 16}
    readme = tmp_path / "README.md"
    readme.write_text("before <!-- context --> <!-- /context --> after")
    assert tables_context.main([str(readme), str(tmp_path / "record.json")]) == 0
    assert tables_context.main([str(readme), str(tmp_path / "record.json"), "--check"]) == 0
    text = readme.read_text()
    for words in (
        "2 x cpu;",
        "| Tiny | 2 | 130 | 64 | 3 |",
        "of 3 cells",
        "2 of 2 questions answered by the group",
        "A model, not a measurement",
        "commit abc",
    ):
        assert words in text
    shown = capfd.readouterr().out
    assert shown.rstrip().endswith("60 to 71 ms on 2 to 4")
    assert "a model, not measured" in shown


def test_the_readme_says_what_was_measured() -> None:
    measured = ROOT / "jobs/measurements/context-parallel-h200x2.json"
    assert tables_context.main([str(ROOT / "README.md"), str(measured), "--check"]) == 0
    assert tables_context.markdown(None) == tables_context.markdown({"table": {}}) == "Not measured yet."


def test_cells_are_chosen_by_their_labels_and_added_to_the_file(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    out.write_text(json.dumps({"table": {"prefill": [{"label": "Tiny/96", "stale": True}, {"label": "Other/1", "shape": "Other"}]}}))
    asked = Options(True, ("prefill",), ("Tiny/9",), (), out, True, "")
    assert asked.asks_for("prefill", "Tiny/96")
    assert not asked.asks_for("prefill", "Other/96")
    assert not asked.asks_for("streams", "Tiny/96")


def test_a_wrong_way_has_no_time_and_is_not_the_best() -> None:
    row = {"new_tokens": 10, "cached_tokens": 990, "pass_kv_ms": 4.0, "gather_kv_ms": None, "pass_q_ms": None, "gather_q_ms": 3.0}
    judged = crossover_row(Rules(Heads(4, 2, 16, 4), 2, gather_bytes=0), row)
    assert judged["chosen"] == "pass_q"
    assert judged["chosen_over_best"] is None


def test_the_model_agrees_with_what_it_is_made_from() -> None:
    """Hidden exchange: the time of one GPU over N; exposed: what the hops take longer than the steps, added."""
    row = {"shape": "s", "new_tokens": 1, "ranks": 2, "attention_ms": 50.0, "exchange_ms": 10.0, "alone_ms": 100.0}
    two, four, *_ = modelled([row])
    assert (two["ms"], two["efficiency"]) == (50.0, 1.0)
    assert four["ms"] == 25.0
    slow = modelled([row | {"exchange_ms": 40.0}])[0]
    assert slow["ms"] == 50.0 + (40.0 - 25.0)
    assert "by_ranks (a model" in printed({"ranks": 2, "device": "d", "date": "t", "commit": "c", "table": {"by_ranks": [two]}})
