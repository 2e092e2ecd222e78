"""Records of several engine benchmarks as one file, the README's table and the plots from it; all figures are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from askmany.jobs import bench_gpu, bench_merge, tables_engine
from askmany.jobs.bench_cells import Cell, suites
from askmany.jobs.bench_merge import merged
from askmany.jobs.bench_ratios import geometric_mean, interval

ENVIRONMENT = {"gpu": "Some GPU", "versions": {"torch": "2.11", "sglang": "0.5"}, "commit": "abcdef0123456789", "date": "2026-01-01"}
ROOT = Path(__file__).parents[2]


def record(
    cells: list[Cell],
    seconds: dict[str, list[float]],
    model: str = "qwen2.5-7b",
    commit: str = "abcdef0123456789",
    pairs: Sequence[tuple[int, int]] = ((0, 0), (1, 0)),
    **values: Any,
) -> dict[str, Any]:
    """What `bench_gpu` writes when each contender took `seconds` for each cell, a little more in a later pass, for (pass, seed)."""
    times: Any = {
        name: {i: [(number, seed, own * (1 + 0.01 * number)) for number, seed in pairs] for i, own in enumerate(found)}
        for name, found in seconds.items()
    }
    labels = {"model": model, "setup": values.pop("setup", {})}
    made = bench_gpu.summarise(cells, times, labels) | labels | {"shape": model, "scouting": False, "notes": {"split": {"steps": 7}}}
    return json.loads(json.dumps(made | {"environment": ENVIRONMENT | {"commit": commit}} | values))


def grid(ratios: list[float], **values: Any) -> dict[str, Any]:
    """The grid's first cells, where ours take a second each."""
    cells = suites()["grid"][: len(ratios)]
    return record(cells, {"stock-fa3": ratios, "stock-triton": [9.0 * r for r in ratios], "split": [1.0] * len(ratios)}, **values)


def test_rows_are_replaced_by_what_was_measured_later_and_keep_their_source() -> None:
    first = merged(None, [("a", grid([2.0, 4.0]))])
    assert [row["ratio"] for row in first["table"]] == pytest.approx([2.0, 4.0])
    again = grid([3.0], commit="fff")
    second = merged(first, [("b", again)])
    assert [(row["ratio"], row["commit"]) for row in second["table"]] == [
        (pytest.approx(3.0), "fff"),
        (pytest.approx(4.0), first["table"][1]["commit"]),
    ]
    assert {source["file"] for source in second["sources"].values()} == {"a", "b"}
    (mean,) = second["means"]
    assert (mean["cells"], mean["ratio"]) == (2, pytest.approx(geometric_mean([3.0, 4.0])))
    third = merged(second, [("c", grid([5.0, 6.0]))])
    assert {source["file"] for source in third["sources"].values()} == {"c"}, "a source of no row is kept"
    assert next(iter(third["sources"].values()))["notes"] == {"split": {"steps": 7}}


def test_merging_the_same_file_twice_changes_nothing() -> None:
    first = merged(None, [("a", grid([2.0]))])
    assert merged(first, [("a", grid([2.0]))]) == first
    assert merged(json.loads(json.dumps(first)), []) == first


FORWARD, BACKWARD = ((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (1, 2))


def test_passes_of_several_calls_are_pooled(capsys: pytest.CaptureFixture[str]) -> None:
    cells = suites()["mixed"]
    back = record(cells, {"stock-fa3": [4.0], "run-to-completion": [3.0], "split": [1.0]}, pairs=BACKWARD)
    forth = record(cells, {"stock-fa3": [9.0], "stock-triton": [9.5], "run-to-completion": [3.0], "split": [1.5]}, pairs=FORWARD[:2])
    found = merged(merged(None, [("back", back)]), [("forth", forth)])
    row = next(row for row in found["table"] if row["layout"] == "split")
    assert row["pairs"] == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    assert row["ratios"] == pytest.approx([6.0, 6.0, 4.0, 4.0, 4.0])
    assert row["ratio"] == pytest.approx(geometric_mean(row["ratios"]))
    assert (row["low"], row["high"]) == interval(row["ratios"])
    assert row["ours_s"] == pytest.approx(geometric_mean([1.5, 1.5, 1.01, 1.01, 1.01]))
    assert row["stock_s"] == row["stock_all_s"]["stock-fa3"] == pytest.approx(row["ratio"] * row["ours_s"])
    assert row["stock_all_s"]["stock-triton"] == pytest.approx(9.5)
    assert next(row for row in found["between"] if row["layout"] == "split")["ratios"] == pytest.approx([2.0, 2.0, 3.0, 3.0, 3.0])
    assert {source["file"] for source in found["sources"].values()} == {"back", "forth"}
    assert merged(json.loads(json.dumps(found)), [("forth", forth), ("back", back)]) == found, "a file once more changes nothing"
    assert capsys.readouterr().err == ""


def test_no_row_gives_way_to_fewer_pairs_of_its_commit(capsys: pytest.CaptureFixture[str]) -> None:
    both = merged(None, [("a", grid([2.0], pairs=FORWARD)), ("b", grid([2.0], pairs=BACKWARD))])
    assert merged(both, [("c", grid([5.0], pairs=BACKWARD))]) == both
    told = capsys.readouterr().err
    assert told.startswith("grid, qwen2.5-7b, split, 8192, 1, 64, 128: 3 pairs of c-")
    assert "do not replace 6 of b-" in told
    assert told.endswith("the same commit; not pooled: both have pass 1\n")
    again = merged(both, [("d", grid([5.0], pairs=FORWARD + BACKWARD))])
    assert [row["ratio"] for row in again["table"]] == pytest.approx([5.0])
    assert "6 pairs of d-" in capsys.readouterr().err
    newer = merged(both, [("e", grid([5.0], pairs=FORWARD[:1], commit="fff"))])
    assert [len(row["ratios"]) for row in newer["table"]] == [1]
    assert capsys.readouterr().err == ""


def test_passes_that_were_not_measured_alike_are_not_pooled(capsys: pytest.CaptureFixture[str]) -> None:
    first, cells = ("a", grid([2.0], pairs=FORWARD)), suites()["grid"][:1]
    other_best = record(cells, {"stock-fa3": [2.0], "stock-triton": [1.9], "split": [1.0]}, pairs=BACKWARD)
    updated = grid([2.0], pairs=BACKWARD, environment=ENVIRONMENT | {"versions": {"torch": "2.12", "sglang": "0.5"}})
    old = grid([2.0], pairs=BACKWARD)
    for row in old["table"]:
        del row["pairs"]
    for other, reason in (
        (other_best, "best stock stock-triton and stock-fa3"),
        (updated, "other versions"),
        (old, "does not name its passes"),
    ):
        assert [len(row["ratios"]) for row in merged(None, [first, ("b", other)])["table"]] == [3]
        assert reason in capsys.readouterr().err
    nameless = [(name, grid([2.0], pairs=pairs, commit="")) for name, pairs in (("a", FORWARD), ("b", BACKWARD[:1]))]
    assert [len(row["ratios"]) for row in merged(None, nameless)["table"]] == [1]


def test_models_layouts_and_setups_are_different_rows() -> None:
    cells = suites()["grid"][:1]
    seconds = {"stock-fa3": [2.0], "split": [1.0], "interleaved": [1.5]}
    small = record(cells, {"stock-fa3": [3.0], "split": [1.0]}, setup={"kv_tokens": 20000})
    found = merged(None, [("a", record(cells, seconds)), ("b", record(cells, seconds, "codellama-7b")), ("c", small)])
    assert [(row["model"], row["layout"], row["setup_label"]) for row in found["table"]] == [
        ("codellama-7b", "interleaved", ""), ("codellama-7b", "split", ""),
        ("qwen2.5-7b", "interleaved", ""), ("qwen2.5-7b", "split", ""), ("qwen2.5-7b", "split", "kv_tokens 20000"),
    ]  # fmt: skip
    assert len(found["means"]) == 5


def test_records_of_before_rows_held_their_ratios_are_paired_by_their_seconds() -> None:
    old = grid([2.0])
    for row in old["table"]:
        del row["ratios"], row["model"], row["setup"]
    del old["model"], old["setup"]
    assert merged(None, [("old", old)])["table"][0]["ratios"] == pytest.approx([2.0, 2.0])
    old["seconds"]["split"]["0"].pop()
    with pytest.raises(ValueError, match="old: 2 and 1 timings of cell 0 cannot be paired"):
        merged(None, [("old", old)])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="k is no record of `bench_engine gpu`: it lacks cells, seconds"):
        merged(None, [("k", {"table": [], "environment": {}})])
    with pytest.raises(ValueError, match="s is a scouting pass"):
        merged(None, [("s", grid([2.0], scouting=True))])
    other = grid([2.0], environment=ENVIRONMENT | {"gpu": "Another GPU"})
    with pytest.raises(ValueError, match="these from Another GPU, Some GPU"):
        merged(None, [("a", grid([2.0, 3.0])), ("b", other)])


def test_layouts_are_compared_with_run_to_completion() -> None:
    cells = suites()["mixed"]
    seconds = {"stock-fa3": [4.0], "run-to-completion": [3.0], "interleaved": [2.0], "split": [1.0]}
    found = merged(None, [("m", record(cells, seconds))])
    assert {row["layout"]: row["ratio"] for row in found["between"]} == pytest.approx({"interleaved": 1.5, "split": 3.0})
    assert {row["layout"] for row in found["table"]} == {"run-to-completion", "interleaved", "split"}
    text = tables_engine.markdown(found)
    assert "| interleaved | interleaved, run-to-completion | 16 x 4,096 tokens, 64 questions, 46 new | 1.50x | - | 1.22x |" in text
    alone = {"run-to-completion": [3.0], "split": [1.0]}  # no stock in the call
    assert [row["ratio"] for row in merged(None, [("m", record(cells, alone))])["between"]] == pytest.approx([3.0])


def test_the_readme_follows_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme, out = tmp_path / "README.md", tmp_path / "engine.json"
    readme.write_text("before\n<!-- engine -->\nold\n<!-- /engine -->\nafter\n")
    assert tables_engine.main([str(readme), str(out)]) == 0
    assert readme.read_text() == "before\n<!-- engine -->\nNot measured yet.\n<!-- /engine -->\nafter\n"
    files = []
    for name, made in {"a": grid([2.0, 0.9]), "b": record([Cell("worst", 512, 1, 16)], {"stock-fa3": [0.97], "split": [1.0]})}.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(made))
    arguments = ["--out", str(out), "--readme", str(readme)]
    assert bench_merge.main([*map(str, files), *arguments]) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- engine -->\nSome GPU; torch 2.11, sglang 0.5; commit abcdef012345 (2026-01-01).\n\n")
    assert "| grid | qwen2.5-7b | split | 2 | 1.34x | - | 0.90x (8,192 tokens, 128 questions, 128 new) | 1.32x |" in text
    assert "| worst | qwen2.5-7b | split | 1 | 0.97x | - | 0.97x (512 tokens, 1 questions, 16 new) | worst cell 0.93x |" in text
    assert text.index("| grid |") < text.index("| worst |")
    losses = text[text.index("`split`: slower than") : text.index("<details>")]
    assert losses.startswith("`split`: slower than the best stock backend in 2 of 3 cells:")
    assert "- grid, qwen2.5-7b, split, 8,192 tokens, 128 questions, 128 new: 0.90x (0.90 to 0.90), the whole interval" in losses
    assert text[text.index("<details>") :].count("\n| ") == 1 + 3
    assert tables_engine.main([str(readme), str(out), "--check"]) == 0
    assert bench_merge.main(arguments) == 0
    assert readme.read_text() == text
    readme.write_text(text.replace("0.90x", "1.90x"))
    assert tables_engine.main([str(readme), str(out), "--check"]) == 1
    assert bench_merge.main([str(readme.with_name("a.json")), str(out), *arguments]) == 2
    assert "engine is no record of `bench_engine gpu`" in capsys.readouterr().out
    assert json.loads(out.read_text())["gpu"] == "Some GPU", "a refused merge wrote its output"


def test_no_loss_is_said_too() -> None:
    assert "`split`: no cell of 1 is slower than the best stock backend." in tables_engine.markdown(merged(None, [("a", grid([2.0]))]))


def test_losses_of_the_baselines_are_not_those_of_the_product() -> None:
    seconds = {"stock-fa3": [2.0, 2.0], "interleaved": [4.0, 1.0], "run-to-completion": [5.0, 1.0], "split": [1.0, 2.5]}
    text = tables_engine.markdown(merged(None, [("a", record(suites()["grid"][:2], seconds))]))
    own, others = text[text.index("`split`: slower") :].split("\n\n<details>")[0].split("Interleaved modes: ")
    assert own.startswith("`split`: slower than the best stock backend in 1 of 2 cells:")
    assert [line.split(", ")[2] for line in own.splitlines() if line.startswith("- ")] == ["split"]
    assert others.startswith("slower than the best stock backend in 2 of 4 cells:")
    assert "- grid, qwen2.5-7b, interleaved, 8,192 tokens, 64 questions, 128 new: 0.50x" in others
    alone = merged(None, [("a", record(suites()["grid"][:1], {"stock-fa3": [2.0], "interleaved": [1.0]}))])
    assert "slower than" not in tables_engine.markdown(alone)


def test_plots_are_those_of_the_published_evaluation(tmp_path: Path) -> None:
    cells = [*suites()["grid"], *suites()["long"], *suites()["batch"], *suites()["worst"]]
    seconds = {"stock-fa3": [3.0] * len(cells), "split": [0.5 + 0.01 * cell.questions for cell in cells]}
    files = [("a", record(cells, seconds)), ("b", record(cells, seconds, "codellama-7b"))]
    paths = [tmp_path / f"{name}.json" for name, _ in files]
    for path, (_, made) in zip(paths, files, strict=True):
        path.write_text(json.dumps(made))
    assert bench_merge.main([*map(str, paths), "--out", str(tmp_path / "engine.json"), "--plots", str(tmp_path / "plots")]) == 0
    names = {"speedup-document_tokens.svg", "speedup-questions.svg", "speedup-new_tokens.svg", "speedup-documents.svg"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names | {"seconds-streams.svg", "throughput-streams.svg"}
    assert all(path.stat().st_size > 10_000 for path in (tmp_path / "plots").iterdir())


def test_a_sweep_over_p_is_a_curve_with_its_fit(tmp_path: Path) -> None:
    cell = Cell("sweep", 8192, 256, 128)
    files = []
    for streams, ours_s in ((8, 9.0), (16, 6.0), (32, 4.0), (64, 5.0)):
        made = record([cell], {"stock-fa3": [12.0], "interleaved": [ours_s]}, setup={"streams": streams})
        files.append(tmp_path / f"p{streams}.json")
        files[-1].write_text(json.dumps(made))
    out, folder = tmp_path / "engine.json", tmp_path / "plots"
    assert bench_merge.main([*map(str, files), "--out", str(out), "--plots", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"seconds-requests.svg", "throughput-streams.svg"}
    (found,) = json.loads(out.read_text())["fits"]
    assert [(b, p) for b, p, *_ in found["points"]] == [(4, 64), (8, 32), (16, 16), (32, 8)]
    assert 20 < found["best_streams"] < 60
    assert f"| {found['best_streams']:.0f} |" in tables_engine.markdown(json.loads(out.read_text()))


def test_the_repositorys_readme_is_made_from_its_own_measurements() -> None:
    assert tables_engine.main([str(ROOT / "README.md"), str(ROOT / "jobs/measurements/engine-h200.json"), "--check"]) == 0
