"""How stock SGLang is named and prepared; its engine itself runs on the GPU machine alone."""

from __future__ import annotations

import pytest

from askmany.engine.errors import ConfigError
from askmany.jobs.baselines_sglang import Variant, _others
from askmany.jobs.bench_cells import Drawn


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
