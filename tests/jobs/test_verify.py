"""The comparison of answers: between this engine and plain Transformers on a tiny model, and its rules on made-up traces."""

from __future__ import annotations

import json
import random
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from askmany.jobs import verify
from askmany.jobs.verify import Trace, compare, complaints, divergence
from askmany.jobs.verify_engines import answers
from tests.helpers.tiny_models import VOCABULARY, tiny_model

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
    monkeypatch.setattr(verify, "_in_own_process", lambda name, arguments: traces[name])
    out = tmp_path / "verify.json"
    verify.main(["--model", "m", "--prompts", str(prompts), "--engines", "ours", "transformers", "--out", str(out)])
    (found,) = json.loads(out.read_text())["comparisons"]
    assert (found["prompts"], found["disagreeing"]) == (6, 0)
    assert 0 < found["largest_difference"] < 1e-3
    gaps = [(a, b) for one, other in zip(*traces.values(), strict=True) for a, b in zip(one.gaps, other.gaps, strict=True)]
    assert all(a == pytest.approx(b, abs=1e-3) for a, b in gaps)


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


def test_a_failing_engine_ends_the_command(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **how: subprocess.CompletedProcess(command, 1, "", "no such device"))
    with pytest.raises(SystemExit, match=r"^ours failed: no such device$"):
        verify.main(["--model", "m", "--prompts", str(prompts), "--engines", "ours"])


def test_an_engine_in_its_own_process_prints_its_traces(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, 'loading\n[{"token_ids": [4], "logprobs": [-1.0], "gaps": [0.5]}]\n', "")

    monkeypatch.setattr(subprocess, "run", run)
    assert verify._in_own_process("ours", ["--model", "m"]) == [Trace([4], [-1.0], [0.5])]
    assert ran[0][1:] == ["-m", "askmany.jobs.verify", "--model", "m", "--only", "ours"]
