"""Which way is chosen, and why: the published thresholds at their edges, and the fit that overrules them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.kernels.ring_choice import (
    MOST_GATHERED_BYTES,
    Heads,
    Link,
    Rules,
    corrected_share,
    hidden_kv_tokens,
    hidden_q_tokens,
)
from askmany.kernels.ring_fit import fit_ways

LLAMA_405B = Heads(128, 8, 128, 2)
CODELLAMA = Heads(32, 32, 128, 2)
LINK = Link(flops=500e12, bytes_per_s=50e9)


def test_message_sizes_alone_decide_without_constants() -> None:
    """Equation 1: 2 * 8 / 128 = 12.5 % for the published model."""
    rules = Rules(LLAMA_405B, 2)
    assert rules.choose(12_800, 115_200).way == "pass_q"
    assert rules.choose(16_384, 114_688).way == "pass_q"  # exactly 12.5 %
    assert rules.choose(16_385, 114_688).way == "pass_kv"
    assert rules.choose(128_000, 0).way == "pass_kv"
    assert "equation 1" in rules.choose(128_000, 0).rule


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_multi_head_attention_always_passes_queries_by_size(new: int, cached: int) -> None:
    assert Rules(CODELLAMA, 4).choose(new, cached).way in ("pass_q", "gather_q")


def test_the_way_home_decides_for_multi_head_attention() -> None:
    """With the all-to-all counted (equation 5), a long prefill passes keys although queries are smaller (T below equation 2's bound)."""
    rules = Rules(CODELLAMA, 2, Link(flops=500e12, bytes_per_s=100e9))
    bound = hidden_kv_tokens(CODELLAMA, 2, rules.link)  # type: ignore[arg-type]
    new = int(bound * 0.9)
    assert new / new <= CODELLAMA.share
    assert rules.choose(new, 0).way == "pass_kv"
    assert rules.choose(new, 0).rule == "equation 5"
    assert rules.choose(new, 100 * new).way == "pass_q"


@given(st.integers(1, 8), st.floats(1e9, 1e12), st.floats(1e12, 1e15))
def test_thresholds_are_where_the_times_meet(ranks: int, bytes_per_s: float, flops: float) -> None:
    """Equations 2, 3 and 5 against the times that they compare, written out for one ring step."""
    heads, link = LLAMA_405B, Link(flops, bytes_per_s)
    size = heads.q_heads * heads.head_dim
    new, cached = hidden_kv_tokens(heads, ranks, link), 12_345.0
    attend_s = 4 * new * (new + cached) * size / ranks**2 / flops
    assert math.isclose(2 * (new + cached) / ranks * heads.kv_heads * heads.head_dim * 2 / bytes_per_s, attend_s, rel_tol=1e-9)
    total, fresh = hidden_q_tokens(heads, ranks, link), 77.0
    assert math.isclose(fresh / ranks * size * 2 / bytes_per_s, 4 * fresh * total * size / ranks**2 / flops, rel_tol=1e-9)
    share = corrected_share(1000, heads, ranks, link)
    if share > 0:
        whole = 1000 / share  # T + C at the bound: N exposed hops of pass-KV take as long as the queries' way home
        hop_s = 2 * whole / ranks * heads.kv_heads * heads.head_dim * 2 / bytes_per_s - 4 * 1000 * whole * size / ranks**2 / flops
        assert math.isclose(ranks * hop_s, 1000 * size * 2 / bytes_per_s, rel_tol=1e-6)


def test_attention_that_hides_the_blocks_passes_keys() -> None:
    rules = Rules(LLAMA_405B, 2, LINK)
    bound = math.ceil(hidden_kv_tokens(LLAMA_405B, 2, LINK))
    assert rules.choose(bound, 10 * bound).rule == "equation 2"
    assert rules.choose(bound, 10 * bound).way == "pass_kv"
    assert rules.choose(bound // 2, 1000 * bound).rule == "equation 5"


def test_short_messages_are_gathered() -> None:
    rules = Rules(CODELLAMA, 2)
    assert rules.choose(64, 131_072).way == "gather_q"  # 256 KB a rank
    assert rules.choose(65, 131_072).way == "pass_q"
    assert Rules(LLAMA_405B, 2).choose(100, 0).way == "gather_kv"
    assert "262144" in rules.choose(64, 131_072).reason


def test_a_fit_passes_through_what_was_measured_and_the_fastest_way_is_chosen() -> None:
    """Planes are found exactly, bent surfaces are met in every cell; the choice is the way whose measured time is least."""
    cells = [(new, cached) for new in (64, 1000, 20_000) for cached in (0, 5000, 100_000)]
    measured = [(new, cached, _times(new, cached)) for new, cached in cells]
    fit = fit_ways(measured)
    rules = Rules(LLAMA_405B, 2, LINK, fit)
    for new, cached, times in measured:
        assert fit.seconds(new, cached) == pytest.approx(times)
        choice = rules.choose(new, cached)
        assert choice.rule == "fit"
        assert choice.way == min(times, key=lambda way: times[way])
        assert f"{1e3 * times[choice.way]:.3g} ms" in choice.reason
    assert fit.seconds(3000, 20_000)["pass_q"] == pytest.approx(_times(3000, 20_000)["pass_q"], rel=1e-6)  # a plane between cells, too
    with pytest.raises(ValueError, match="at least 3 cells"):
        fit_ways(measured[:2] * 2)
    with pytest.raises(ValueError, match="at least 3 cells"):
        fit_ways([cell for cell in measured if cell[1] == 0])  # T = T + C in all of them: no plane


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_is_too_large_is_not_gathered(ranks: int) -> None:
    """By what every rank would hold, however many share it."""
    cheap = {"pass_kv": 2.0, "gather_kv": 1.0, "pass_q": 3.0, "gather_q": 4.0}
    fit = fit_ways([(new, cached, cheap) for new, cached in ((1, 0), (10, 0), (10, 100))])
    rules = Rules(CODELLAMA, ranks, LINK, fit)
    per_token = 2 * CODELLAMA.kv_heads * CODELLAMA.head_dim * CODELLAMA.element_bytes
    most = MOST_GATHERED_BYTES // per_token
    assert rules.choose(10, most - 10).way == "gather_kv"
    assert rules.choose(10, most).way == "pass_kv"


def _times(new: int, cached: int) -> dict[str, float]:
    total = new + cached
    attend, around = 1e-9 * new * total, 1e-7 * new**0.9 * total**0.3
    return {"pass_kv": attend + 1e-7 * total, "gather_kv": 1.5e-7 * total + attend, "pass_q": around, "gather_q": 1e-3}
