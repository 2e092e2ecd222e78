"""How an engine is set up: the user's `engine:` section, and the limits that a scheduler derives from it.

Knows no device and no model: whoever does (the executor's builder) resolves the `auto` values, which returns a new config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

Layout = Literal["split", "interleaved"]
Batching = Literal["continuous", "run_to_completion"]
Auto = Literal["auto"]

DEFAULT_INTERLEAVED_STREAMS = 32  # P of the published method where nothing was calibrated


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and one document may take. All counts are at least 1, and any single unit of work fits `step_tokens`.

    In deterministic mode a step holds one kind of work alone, in pieces whose borders no other stream can move: one chunk of at most
    `prefill_chunk` tokens, or tail pieces of at most `tail_piece` tokens each (`step_tokens` in all), or at most `max_rows` decode rows.
    """

    streams: int  # split: live streams of one document at most; interleaved: P, the streams of one request
    max_rows: int  # live streams of all documents together at most
    step_tokens: int  # tokens of one step at most
    prefill_chunk: int  # tokens of one prefix chunk at most
    tail_piece: int  # deterministic mode: tokens of one piece of a question tail
    deterministic: bool = False
    batching: Batching = "continuous"  # interleaved only

    def __post_init__(self) -> None:
        for name in ("streams", "max_rows", "step_tokens", "prefill_chunk", "tail_piece"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.step_tokens < self.max_rows:
            raise ValueError(f"step_tokens {self.step_tokens} is below max_rows {self.max_rows}: every live stream needs a token a step")
        for name in ("prefill_chunk", "tail_piece"):
            if self.deterministic and self.step_tokens < getattr(self, name):
                raise ValueError(f"step_tokens {self.step_tokens} is below {name} {getattr(self, name)}: a piece is fed whole")

    @property
    def requests(self) -> int:
        """B: interleaved requests that run at once."""
        return max(1, self.max_rows // self.streams)


class EngineConfig(BaseModel):
    """The `engine:` section. Frozen; an unknown key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    layout: Layout = "split"
    """`split`: shared document pages, private stream pages. `interleaved`: the published method, one KV row a request."""
    streams: PositiveInt | Auto = "auto"
    """Live streams of a document at most (split) or of a request (interleaved); `auto`: as many as rows and pages allow."""
    batching: Batching = "continuous"
    """Interleaved only: whether a finished request's place is refilled at once, or when its whole batch is done."""
    backend: Literal["auto", "transformers", "sglang", "fake"] = "auto"
    """What runs the model. `auto`: SGLang on a GPU where it is installed and runs this model, else Transformers; `fake` computes made-up
    answers without a model, to try a pipeline out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. `auto`: float32 on a CPU, the model's own on a GPU."""
    deterministic: bool = False
    """Bitwise equal answers whatever else runs, at some cost in speed."""
    page_size: PositiveInt = 64
    """Tokens of one KV page."""
    kv_tokens: PositiveInt | Auto = "auto"
    """Size of the KV pool in tokens; `auto`: what the device's memory leaves."""
    max_rows: PositiveInt = 256
    """Live streams of all documents together at most."""
    step_tokens: PositiveInt = 2048
    """Tokens of one step at most (decode rows, then question tails, then document chunks)."""
    prefill_chunk: PositiveInt = 2048
    """Tokens of one document chunk at most."""
    tail_piece: PositiveInt = 64
    """Deterministic mode: tokens of one piece of a question tail."""

    @model_validator(mode="after")
    def _together(self) -> EngineConfig:
        if self.batching == "run_to_completion" and self.layout == "split":
            raise ValueError("batching run_to_completion needs layout interleaved, the layout is split")
        if self.kv_tokens != "auto" and self.kv_tokens < self.page_size:
            raise ValueError(f"kv_tokens {self.kv_tokens} is below one page of {self.page_size} tokens")
        if self.backend == "sglang" and self.deterministic and self.device == "cpu":
            raise ValueError("deterministic on a CPU needs backend transformers, the backend is sglang")
        self.limits  # noqa: B018 (its own checks)
        return self

    @property
    def limits(self) -> SchedulerLimits:
        """The scheduler's share of this config, with `streams: auto` resolved."""
        automatic = self.max_rows if self.layout == "split" else min(DEFAULT_INTERLEAVED_STREAMS, self.max_rows)
        streams = automatic if self.streams == "auto" else min(self.streams, self.max_rows)
        return SchedulerLimits(
            streams=streams,
            max_rows=self.max_rows,
            step_tokens=self.step_tokens,
            prefill_chunk=self.prefill_chunk,
            tail_piece=self.tail_piece,
            deterministic=self.deterministic,
            batching=self.batching,
        )

    @property
    def kv_pages(self) -> int:
        """Whole pages of the KV pool; only after `kv_tokens` was resolved."""
        if self.kv_tokens == "auto":
            raise ValueError("kv_tokens is still auto: resolve the config first")
        return self.kv_tokens // self.page_size

    def resolve(self, *, device: Literal["cpu", "cuda"], dtype: Literal["float32", "bfloat16", "float16"], kv_tokens: int) -> EngineConfig:
        """A new config whose `auto` values are the ones given; values that the user set stay."""
        given = self.model_dump()
        offered = {"device": device, "dtype": dtype, "kv_tokens": kv_tokens, "streams": self.limits.streams}
        return EngineConfig.model_validate({key: offered.get(key, value) if value == "auto" else value for key, value in given.items()})
