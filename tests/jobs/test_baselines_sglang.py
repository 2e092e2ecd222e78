"""How stock SGLang is named and prepared; its engine itself runs on the GPU machine alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from askmany.engine.errors import ConfigError
from askmany.jobs.baselines_sglang import KEPT_TOKENS, LEAST_CONTEXT, StockContender, Variant, _others, context_length
from askmany.jobs.bench_cells import Drawn
from tests.helpers.word_model import word_model


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("fa3", Variant("fa3")),
        ("flashinfer-lpm", Variant("flashinfer", "lpm")),
        ("triton-512", Variant("triton", most_rows=512)),
        ("fa3-lpm-1024", Variant("fa3", "lpm", 1024)),
    ],
)
def test_a_name_says_what_differs_from_the_defaults(name: str, variant: Variant) -> None:
    assert Variant.parse(name) == variant


@pytest.mark.parametrize("name", ["fa4", "fa3-fcfs", "fa3-512-lpm", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="none of fa3, flashinfer, triton"):
        Variant.parse(name)


def test_what_is_asked_before_the_clock_shares_the_documents_alone() -> None:
    drawn = Drawn([[5, 6, 7], [8, 9]], [[[0, 3], [4, 4]], [[7]]], [[1, 1], [1]])
    timed = [ids + tail for ids, tails in zip(drawn.documents, drawn.tails, strict=True) for tail in tails]
    others = _others(drawn)
    assert [len(ids) for ids in others] == [len(ids) for ids in timed]
    for other, ids, document in zip(others, timed, (3, 3, 2), strict=True):
        assert other[:document] == ids[:document]
        assert other[document] != ids[document]
        assert min(other) >= 0


def test_sglang_is_given_no_more_context_than_the_model_has(tmp_path: Path) -> None:
    """It would not start with 8,200 for a model of 8,192."""
    small, large = word_model(tmp_path / "small", 8192), word_model(tmp_path / "large", 32768)
    assert [context_length(small, tokens) for tokens in (100, 8192 - KEPT_TOKENS)] == [8192, 8192]
    assert [context_length(large, tokens) for tokens in (100, 20_000)] == [LEAST_CONTEXT, 20_000 + KEPT_TOKENS]
    with pytest.raises(ConfigError, match=r"small: its context has 8192 tokens; prompt and answer take 8185, and stock SGLang keeps 8$"):
        context_length(small, 8193 - KEPT_TOKENS)
    with pytest.raises(ConfigError, match="prompt and answer take 8185"):
        StockContender(small, "triton", 1, 8193 - KEPT_TOKENS, False)


def test_an_answer_that_sglang_cuts_is_no_answer() -> None:
    """It would pass for one that differs from the others."""

    def output(*token_ids: int, reason: str = "length") -> dict[str, Any]:
        logprobs = [(-0.5, token, None) for token in token_ids]
        tops = [[(-0.5, token, None), (-1.25, 0, None)] for token in token_ids]
        return {"meta_info": {"output_token_logprobs": logprobs, "output_top_logprobs": tops, "finish_reason": {"type": reason}}}

    def answers(*outputs: dict[str, Any]) -> list[dict[str, Any]]:
        contender = object.__new__(StockContender)
        contender._engine = SimpleNamespace(generate=lambda **asked: list(outputs))
        return contender.answers([[1]] * len(outputs), 2)

    assert answers(output(4, 5)) == [{"token_ids": [4, 5], "logprobs": [-0.5, -0.5], "gaps": [0.75, 0.75]}]
    with pytest.raises(RuntimeError, match=r"sglang gave 1 of 2 answer tokens for prompt 1: .*abort"):
        answers(output(4, 5), output(4, reason="abort"))
