"""The plain baseline, the labelling benchmark and the audit command, on a tiny model or the fake engine."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from askmany.engine.build import build_engine
from askmany.engine.config import EngineConfig
from askmany.engine.errors import ConfigError
from askmany.engine.models import ResolvedModel, resolve_model
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.engine.request import Document, Question, Sampling
from askmany.jobs import audit, bench_labels
from askmany.jobs.baselines_transformers import PlainBaseline
from askmany.pipeline.config_file import load_config
from askmany.pipeline.run import run
from askmany.pipeline.storage import ObjectStore
from tests.helpers.hand_models import CHATML, byte_level, write_folder
from tests.helpers.runs import run_values, write_jsonl
from tests.helpers.tiny_models import tiny_model
from tests.helpers.word_model import words

ROWS = [
    {
        "doc_id": f"d{i}",
        "text": "The mayor said no. " * (i + 2),
        "questions": [{"qid": f"{i}-{j}", "question": f"Who said {'it ' * j}?", "answers": ["the mayor"]} for j in range(3)],
    }
    for i in range(4)
]


@pytest.fixture
def tiny(tmp_path: Path) -> ResolvedModel:
    tokenizer = byte_level()
    model = tiny_model("llama-gqa", vocabulary=tokenizer.get_vocab_size())
    model.save_pretrained(write_folder(tmp_path / "tiny", tokenizer, CHATML))
    return resolve_model(str(tmp_path / "tiny"))


def test_the_plain_baseline_answers_what_the_engine_answers(tiny: ResolvedModel) -> None:
    prompts = PromptBuilder(tiny.folder, PromptConfig())
    engine = build_engine(tiny, EngineConfig(dtype="float32", kv_tokens=4096))
    for row in ROWS:
        questions = tuple(Question(q["qid"], prompts.tail(q["question"]), Sampling(9, stop=("e",))) for q in row["questions"])  # type: ignore[index]
        engine.submit(Document(str(row["doc_id"]), prompts.segments(str(row["text"])), questions))
    ours = {result.question_id: result.text for result in engine.drain()}
    done = PlainBaseline(tiny, prompts, 9, ("e",)).answer(ROWS)
    assert {item.key[1]: item.answer for item in done.items} == ours
    assert len(ours) == 12
    assert done.seconds > 0
    assert all(item.references == ("the mayor",) for item in done.items)


def test_a_plain_baseline_that_was_stopped_goes_on(tiny: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PromptBuilder(tiny.folder, PromptConfig())
    store = ObjectStore(str(tmp_path / "kept"), {})
    whole = PlainBaseline(tiny, prompts, 5).answer(ROWS)
    PlainBaseline(tiny, prompts, 5, kept=store).answer(ROWS[:2])
    generated: list[str] = []
    plain = PlainBaseline._generate
    monkeypatch.setattr(PlainBaseline, "_generate", lambda self, row: generated.append(row["doc_id"]) or plain(self, row))
    assert PlainBaseline(tiny, prompts, 5, kept=store).answer(ROWS).items == whole.items
    assert generated == ["d2", "d3"]
    assert PlainBaseline(tiny, prompts, 6, kept=store).answer(ROWS[:1]).items  # another length is another answer
    assert generated == ["d2", "d3", "d0"]


def test_the_labelling_benchmark_ends_with_its_figures(tiny: ResolvedModel, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", ROWS)
    app = typer.Typer()
    app.command()(bench_labels.main)
    arguments = [str(data), "--model", str(tiny.folder), "--articles", "3", "--questions", "4", "--max-tokens", "256", "--threads", "1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["documents"], figures["answers"]) == (3, 12)
    assert figures["labels"]["decode_tokens"] == 0
    assert figures["alone"]["decode_tokens"] == figures["together"]["decode_tokens"] > 0
    assert figures["together_agrees_with_alone"] == 1.0
    assert 0 <= figures["labels_agree_with_decoding"] <= 1
    assert figures["labels"]["steps"] < figures["together"]["steps"] < figures["alone"]["steps"]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_session")
def test_a_run_is_audited_and_the_report_lies_beside_its_answers(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"doc_id": f"d{i}", "text": words(20 + i)} for i in range(3)])
    config = tmp_path / "c.yaml"
    config.write_text(
        json.dumps(run_values(tmp_path, questions=["w1", {"id": "c", "question": "w2", "type": "choice", "options": ["w3", "w4"]}]))
    )
    with pytest.raises(ConfigError, match=r"."):
        audit.main(config, (), 10, 0, Console(quiet=True))
    run(config)
    answers = {path: path.read_bytes() for path in (tmp_path / "out/answers").iterdir()}
    console = Console(file=io.StringIO(), width=200)
    assert audit.main(config, (), 10, 0, console) == 0
    report = json.loads((tmp_path / "out" / audit.REPORT).read_text())
    assert report["sample"] == 6
    assert report["independence"]["agreement"] == 1.0
    assert report["truncation"]["whole"]["asked"] == 6
    assert "asked again alone: 100.0 % of 6 answers stay" in console.file.getvalue()  # type: ignore[attr-defined]
    assert {path: path.read_bytes() for path in (tmp_path / "out/answers").iterdir()} == answers
    edited = ("questions=[w1]",)
    with pytest.raises(ConfigError, match=r"question 'c' of doc_id 'd[0-2]' is not asked any more; run first"):
        audit.main(config, edited, 10, 0, Console(quiet=True))
    run(load_config(config, edited))
    assert audit.main(config, edited, 10, 0, Console(quiet=True)) == 0
