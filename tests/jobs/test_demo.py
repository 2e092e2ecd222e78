"""The demo's documents and configuration: what `make demo` promises to label on a small machine."""

import json
from typing import Any

import yaml

from askmany.engine.models import ResolvedModel
from askmany.engine.prompts import PromptBuilder
from askmany.engine.truncate import document_tokens
from askmany.pipeline.config import RunConfig
from tests.helpers.source import ROOT

CONFIG = RunConfig.model_validate(yaml.safe_load((ROOT / "jobs/demo/config.yaml").read_text(encoding="utf-8")))


def documents() -> list[dict[str, Any]]:
    lines = (ROOT / str(CONFIG.input.uri)).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_documents_are_of_a_size_a_small_machine_reads_in_a_minute() -> None:
    found = documents()
    assert 3 <= len(found) <= 5
    assert len({document["doc_id"] for document in found}) == len(found)
    for document in found:
        assert 1000 <= len(document["text"].split()) <= 2500
        assert 12 <= len(document["questions"]) <= 20
        assert len({question["qid"] for question in document["questions"]}) == len(document["questions"])


def test_texts_are_odd_enough_to_show_something() -> None:
    for document in documents():
        text = document["text"]
        assert any(ord(char) > 0x1F000 for char in text), "an emoji"
        assert any(0x370 <= ord(char) < 0x2000 or 0x3000 <= ord(char) < 0xF000 for char in text), "another script"
        assert "\n| " in text, "a table"


def test_every_prompt_is_exact_and_fits(smollm2: ResolvedModel) -> None:
    builder = PromptBuilder(smollm2.folder, CONFIG.prompt)
    assert CONFIG.sampling.max_new_tokens is not None
    for document in documents():
        questions = [question["question"] for question in document["questions"]]
        builder.check(questions)
        for question in questions:
            builder.check_document(document["text"], question)
            whole = len(builder.instruction_ids) + document_tokens(builder, document["text"]) + len(builder.tail(question))
            assert whole == len(builder.reference_ids(document["text"], question))
            assert whole + CONFIG.sampling.max_new_tokens <= smollm2.context_tokens
