import pytest
from pydantic import ValidationError

from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig, SchedulerLimits
from askmany.engine.interleaved import InterleavedScheduler
from askmany.engine.scheduler import SplitScheduler


def make_limits(**changes: object) -> SchedulerLimits:
    given = {"streams": 4, "max_rows": 8, "step_tokens": 16, "prefill_chunk": 8, "tail_piece": 2} | changes
    return SchedulerLimits(**given)  # type: ignore[arg-type]


def test_the_defaults_hold_together() -> None:
    config = EngineConfig()
    assert (config.layout, config.streams, config.device, config.deterministic) == ("split", "auto", "auto", False)
    assert config.limits == SchedulerLimits(streams=256, max_rows=256, step_tokens=2048, prefill_chunk=2048, tail_piece=64)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"layuot": "split"}, "layuot"),
        ({"layout": "woven"}, "layout"),
        ({"streams": 0}, "streams"),
        ({"streams": True}, "streams"),
        ({"streams": "many"}, "streams"),
        ({"page_size": -1}, "page_size"),
        ({"deterministic": "perhaps"}, "deterministic"),
        ({"batching": "run_to_completion"}, "needs layout interleaved, the layout is split"),
        ({"kv_tokens": 10}, "kv_tokens 10 is below one page of 64 tokens"),
        ({"max_rows": 300, "step_tokens": 299}, "step_tokens 299 is below max_rows 300"),
        ({"deterministic": True, "max_rows": 1, "step_tokens": 100}, "step_tokens 100 is below prefill_chunk 2048"),
        ({"deterministic": True, "max_rows": 1, "step_tokens": 9, "prefill_chunk": 9, "tail_piece": 10}, "below tail_piece 10"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        EngineConfig.model_validate(given)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EngineConfig().page_size = 8


@pytest.mark.parametrize(
    ("layout", "streams", "max_rows", "resolved", "requests"),
    [
        ("split", "auto", 100, 100, 1),
        ("split", 7, 100, 7, 14),
        ("split", 700, 100, 100, 1),
        ("interleaved", "auto", 100, 32, 3),
        ("interleaved", "auto", 20, 20, 1),
        ("interleaved", 8, 20, 8, 2),
    ],
)
def test_streams_are_resolved_by_layout(layout: str, streams: int | str, max_rows: int, resolved: int, requests: int) -> None:
    limits = EngineConfig.model_validate({"layout": layout, "streams": streams, "max_rows": max_rows}).limits
    assert (limits.streams, limits.requests) == (resolved, requests)


def test_resolving_returns_a_new_config_and_keeps_what_was_set() -> None:
    config = EngineConfig(dtype="float16", page_size=8)
    resolved = config.resolve(device="cpu", dtype="float32", kv_tokens=100)
    assert (config.device, config.kv_tokens) == ("auto", "auto")
    assert (resolved.device, resolved.dtype, resolved.kv_tokens, resolved.streams) == ("cpu", "float16", 100, 256)
    assert resolved.kv_pages == 12
    assert resolved.resolve(device="cuda", dtype="bfloat16", kv_tokens=5) == resolved
    with pytest.raises(ValueError, match="kv_tokens is still auto"):
        _ = config.kv_pages


def test_limits_check_themselves() -> None:
    assert make_limits().requests == 2
    assert make_limits(streams=9).requests == 1
    for name in ("streams", "max_rows", "step_tokens", "prefill_chunk", "tail_piece"):
        with pytest.raises(ValueError, match=f"{name} is 0, it must be at least 1"):
            make_limits(**{name: 0})


def test_the_layout_chooses_the_scheduler() -> None:
    split = build_scheduler(EngineConfig(kv_tokens=160, page_size=16))
    assert isinstance(split, SplitScheduler)
    assert (split.pool.page_count, split.pool.page_size) == (10, 16)
    assert isinstance(build_scheduler(EngineConfig(kv_tokens=160, page_size=16, layout="interleaved")), InterleavedScheduler)
