"""The comparison of answers: between this engine and plain Transformers on a tiny model, and its rules on made-up traces."""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.jobs import verify
from askmany.jobs.verify import Trace, compare, complaints, divergence
from askmany.jobs.verify_chance import Chance, chance, paired_interval
from askmany.jobs.verify_engines import answers
from tests.helpers.tiny_models import VOCABULARY, tiny_model
from tests.helpers.word_model import word_model

SETUP = '{"page_size": 8, "kv_tokens": 1024, "step_tokens": 64, "max_rows": 8}'


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rng = random.Random(1)
    file = tmp_path / "prompts.jsonl"

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    lines = [{"document": ids(20 + 9 * d), "questions": [ids(3 + q) for q in range(3)]} for d in range(2)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_this_engine_answers_as_plain_transformers(tmp_path: Path, prompts: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama-gqa").save_pretrained(tmp_path / "model")
    setup = json.dumps(json.loads(SETUP) | {"layout": layout})
    options = Namespace(model=str(tmp_path / "model"), prompts=prompts, new_tokens=5, device="cpu", setup=setup)
    traces = {name: answers(name, options) for name in ("ours", "transformers")}
    said = {name: {"traces": [asdict(t) for t in own], "environment": {}} for name, own in traces.items()}
    monkeypatch.setattr(verify, "_in_own_process", lambda name, arguments, most_s: said[name])
    out = tmp_path / "verify.json"
    verify.main(["--model", "m", "--prompts", str(prompts), "--engines", "ours", "transformers", "--out", str(out)])
    (found,) = json.loads(out.read_text())["comparisons"]
    assert (found["prompts"], found["disagreeing"]) == (6, 0)
    assert 0 < found["largest_difference"] < 1e-3
    gaps = [(a, b) for one, other in zip(*traces.values(), strict=True) for a, b in zip(one.gaps, other.gaps, strict=True)]
    assert all(a == pytest.approx(b, abs=1e-3) for a, b in gaps)


def test_prompts_beyond_the_models_context_are_refused(tmp_path: Path, prompts: Path) -> None:
    """By this engine, too, before weights are loaded: its graphs do not look whether a position has a rotary entry."""
    folder = word_model(tmp_path / "model", 32)  # the longest prompt has 34 tokens
    options = Namespace(model=str(folder), prompts=prompts, new_tokens=5, device="cpu", setup=SETUP)
    for name in ("ours", "stock-triton"):
        with pytest.raises(ConfigError, match="its context has 32 tokens; prompt and answer take 39"):
            answers(name, options)


def trace(*token_ids: int, gap: float = 0.5, logprob: float = -1.0) -> Trace:
    return Trace(list(token_ids), [logprob] * len(token_ids), [gap] * len(token_ids))


def test_a_divergence_is_found_with_its_gap() -> None:
    found = compare("a", "b", [trace(1, 2, 3), trace(4, 5), trace(1)], [trace(1, 2, 9, gap=0.1, logprob=-1.25), trace(4, 5), trace(1, 2)])
    assert found.divergences == [(0, 2, 0.1), (2, 1, 0.0)]
    assert (found.disagreeing, found.first_divergence, found.widest_gap) == (2, 1, 0.1)
    assert found.largest_difference == pytest.approx(0.25)
    assert found.rate == pytest.approx(2 / 3)
    assert divergence([1, 2], [1, 2]) is None


def test_ours_may_not_part_more_often_or_wider_than_stock_does() -> None:
    same, near, wide = [trace(1, 2)] * 2, [trace(1, 3, gap=0.1), trace(1, 2, logprob=-1.2)], [trace(1, 3, gap=3.0)] * 2
    yardstick = compare("stock-a", "stock-b", same, near)
    assert complaints([compare("ours", "stock-a", same, same), yardstick]) == []
    broken = complaints([compare("ours", "stock-a", wide, [trace(1, 2, gap=2.0)] * 2), yardstick])
    assert broken == [
        "ours and stock-a disagree on 100.0% of the prompts, stock backends on 50.0%",
        "ours and stock-a part at a gap of 2, stock backends differ by at most 0.2",
    ]
    assert complaints([compare("ours", "stock-a", wide, same)]) == []


def test_answers_to_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="a has 1 answers, b has 2"):
        compare("a", "b", [trace(1)], [trace(1), trace(2)])


SAID = """echo loading; echo 'BENCH {"traces": [{"token_ids": [4], "logprobs": [-1.0], "gaps": [0.5]}], "environment": {"gpu": "G"}}'"""


def played_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """A shell script in the place of every engine's process; `$name` is the engine, arguments lie in `ran`."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/ran\nfor name in "$@"; do :; done\n{script}\n')
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def test_an_engine_in_its_own_process_says_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played_by(monkeypatch, tmp_path, f"{SAID}; echo 'BENCH END'")
    found = verify._in_own_process("ours", ["--model", "m"], 60)
    assert found == {"traces": [{"token_ids": [4], "logprobs": [-1.0], "gaps": [0.5]}], "environment": {"gpu": "G"}}
    assert (tmp_path / "ran").read_text() == "-m askmany.jobs.verify --model m --only ours\n"


def test_what_an_engine_leaves_running_does_not_keep_the_command(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler in the background that holds the output open."""
    played_by(monkeypatch, tmp_path, f"(sleep 300) & {SAID}; echo 'BENCH END'")
    began_s = time.monotonic()
    verify.main(["--model", "m", "--prompts", str(prompts), "--engines", "ours", "stock-a"])
    assert time.monotonic() - began_s < 60
    assert "not judged" in capsys.readouterr().out, "one stock backend is no yardstick"


def test_one_engine_that_fails_and_one_that_hangs_leave_the_others_answers(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is missing is asked for again with `--add`, and nothing else is."""
    script = f"""case $name in *bad) echo no such device >&2; exit 1;; *slow) exec sleep 300;; esac; {SAID}; echo 'BENCH END'"""
    played_by(monkeypatch, tmp_path, script)
    out, names = tmp_path / "verify.json", ["ours", "stock-bad", "stock-slow", "stock-a"]
    command = ["--model", "m", "--prompts", str(prompts), "--engines", *names, "--limit-s", "5", "--out", str(out)]
    with pytest.raises(SystemExit):
        verify.main(command)
    said = capsys.readouterr().out
    assert "FAILED stock-bad after 0 lines (exit code 1): no such device" in said
    assert "STOPPED stock-slow after 5 s" in said
    assert "MISSING: stock-slow gave no answers" in said
    record = json.loads(out.read_text())
    assert ([c["disagreeing"] for c in record["comparisons"]], record["missing"]) == ([0], ["stock-bad", "stock-slow"])
    assert record["environments"] == {"ours": {"gpu": "G"}, "stock-a": {"gpu": "G"}}
    played_by(monkeypatch, tmp_path, f"{SAID}; echo 'BENCH END'")
    (tmp_path / "ran").unlink()
    verify.main([*command, "--add"])
    assert [line.split()[-1] for line in (tmp_path / "ran").read_text().splitlines()] == ["stock-bad", "stock-slow"]
    assert json.loads(out.read_text())["missing"] == []
    assert "those two: holds" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="answers something else"):
        verify.main([*command, "--add", "--new-tokens", "9"])


def test_all_engines_end_within_the_call(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process of its own would outlive a call that is killed, and keep the device's memory."""
    played_by(monkeypatch, tmp_path, f"case $name in *slow) exec sleep 300;; esac; {SAID}; echo 'BENCH END'")
    names = ["ours", "stock-slow", "stock-a"]
    with pytest.raises(SystemExit):
        verify.main(["--model", "m", "--prompts", str(prompts), "--engines", *names, "--total-s", "5"])
    said = capsys.readouterr().out
    assert "STOPPED stock-slow after" in said
    assert "MISSING: stock-a gave no answers" in said
    assert [line.split()[-1] for line in (tmp_path / "ran").read_text().splitlines()] == ["ours", "stock-slow"]


def test_the_record_is_there_after_every_engine(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seen = tmp_path / "verify.json", []

    def answer(name: str, arguments: list[str], most_s: float) -> Any:
        if name == "stock-b":
            seen.append((json.loads(out.read_text())["missing"], sorted(path.name for path in tmp_path.glob("verify*"))))
            raise KeyboardInterrupt
        return {"traces": [asdict(trace(1, 2))], "environment": {}}

    monkeypatch.setattr(verify, "_in_own_process", answer)
    with pytest.raises(KeyboardInterrupt):
        verify.main(["--model", "m", "--prompts", str(prompts), "--engines", "ours", "stock-a", "stock-b", "--out", str(out)])
    assert seen == [(["stock-b"], ["verify.answers.json", "verify.json"])]


def test_beside_the_verdict_stands_what_chance_may_do(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two more of 40 prompts break the rule, and may be chance; all of them are more."""

    def answer(name: str, arguments: list[str], most_s: float) -> Any:
        own = {"stock-b": 3, "ours": 5, "ours-broken": 40}.get(name, 0)
        traces = [trace(1, 3 if prompt < own else 2, gap=0.0) for prompt in range(40)]
        return {"traces": [asdict(t) for t in traces], "environment": {}}

    monkeypatch.setattr(verify, "_in_own_process", answer)
    command = ["--model", "m", "--prompts", str(prompts), "--out", str(tmp_path / "o.json"), "--engines"]
    with pytest.raises(SystemExit):
        verify.main([*command, "ours", "stock-a", "stock-b"])
    said = capsys.readouterr().out
    assert f"{verify.RULE}: BROKEN\nBROKEN: ours and stock-a disagree on 12.5% of the prompts, stock backends on 7.5%\n" in said
    low, high = paired_interval(3, 2, 0, 40)
    assert low < 0 < high
    counts = (
        f"ours and stock-a disagree on 5 of 40 prompts, the stock backends on 3: +5.0% (95 %: {low:+.1%} to {high:+.1%}), may be chance"
    )
    assert counts in said
    assert json.loads((tmp_path / "o.json").read_text())["chances"]["ours and stock-a"] == asdict(Chance(40, 5, 3, low, high))
    assert verify.beside("a and b", chance(40, range(40), range(3))).endswith("more than chance")


def test_intervals_are_newcombes() -> None:
    """The published example of 21 children (Fagerland and others, Statistics in Medicine 33:2850, 2014), and plain cases."""
    assert paired_interval(1, 1, 7, 21) == pytest.approx((-0.507, -0.026), abs=5e-4)
    low, high = paired_interval(0, 0, 0, 40)
    assert low == pytest.approx(-high)
    assert 0.05 < high < 0.1, "no disagreement at all still has a width"
    swapped = paired_interval(2, 6, 1, 50)
    assert paired_interval(2, 1, 6, 50) == pytest.approx((-swapped[1], -swapped[0]))
    with pytest.raises(ValueError, match="no prompt"):
        chance(0, [], [])
