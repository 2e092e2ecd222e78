"""What a run is told: frozen, checked when made, unknown keys refused.

One class a section of the YAML file; `RunConfig` is the whole. Reading files and command-line overrides is `config_file`'s business.
Everything here is the same on the driver and on every worker.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from askmany.engine.config import EngineConfig
from askmany.engine.fit import FitPolicy
from askmany.engine.prompts import PromptConfig
from askmany.engine.request import Sampling


class Section(BaseModel):
    """A part of the configuration: frozen, and no key it does not know; numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class InputConfig(Section):
    """Where documents come from and which columns mean what."""

    uri: str | tuple[str, ...]
    format: Literal["auto", "jsonl", "parquet", "csv", "txt", "md", "html"] = "auto"
    id: str = "doc_id"
    text: str = "text"
    questions: str | None = None
    keep: tuple[str, ...] = ()
    max_questions: Annotated[int, Field(ge=1)] | None = None
    only: tuple[str, ...] = ()
    limit: Annotated[int, Field(ge=1)] | None = None
    strict: bool = False
    storage_options: dict[str, Any] = Field(default_factory=dict)

    @property
    def uris(self) -> tuple[str, ...]:
        return (self.uri,) if isinstance(self.uri, str) else self.uri

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns that are read."""
        own = (self.questions,) if self.questions else ()
        return tuple(dict.fromkeys((self.id, self.text, *own, *self.keep)))

    @field_validator("uri")
    @classmethod
    def _uri_is_given(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or "" in value if isinstance(value, tuple) else not value:
            raise ValueError("a file, folder, glob or URI is needed")
        return value

    @field_validator("keep")
    @classmethod
    def _keep_is_a_set(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in value if value.count(name) > 1})
        if twice:
            raise ValueError(f"column {twice[0]!r} is named twice")
        return value


class OutputConfig(Section):
    """Where answers go. Parquet shards are always written, being the record of what is done; `jsonl` and `both` add answers.jsonl.

    A shard holds the answers of at most `shard_documents` documents, and about `shard_records` records at most; its rows are in order of
    key. With `sort`, answers.jsonl is in that order over all shards. Files of a run are written below `uri` alone.
    """

    uri: str = "out/"
    format: Literal["parquet", "jsonl", "both"] = "parquet"
    shard_documents: Annotated[int, Field(ge=1)] = 1024
    shard_records: Annotated[int, Field(ge=1)] = 50_000
    sort: bool = False
    storage_options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("uri")
    @classmethod
    def _uri_is_given(cls, value: str) -> str:
        if not value:
            raise ValueError("a folder or URI is needed")
        return value


class SamplingConfig(Section):
    """How answers are drawn; a question may set each key for itself. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 cut nothing."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 32
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every answer at once")
        return value

    def to_engine(self, seed: int) -> Sampling:
        """The engine's form, with the seed of one stream."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )


class LongDocumentsConfig(Section):
    """What happens to a document that does not fit the context beside its questions; every cut is flagged on its records.

    Under `split` it is answered in chunks of at most `chunk_tokens` (`auto`: what the context leaves), each beginning `overlap_tokens`
    before the end of the one before; a document longer than `chunk_tokens` is split though the whole might fit.
    """

    policy: FitPolicy | Literal["split"] = "error"
    chunk_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    overlap_tokens: Annotated[int, Field(ge=0)] = 128

    @model_validator(mode="after")
    def _chunks_go_on(self) -> LongDocumentsConfig:
        if self.chunk_tokens == "auto":
            return self
        if self.policy != "split":
            raise ValueError(f"chunk_tokens is for policy split, not {self.policy}")
        if self.chunk_tokens < 2 * self.overlap_tokens:
            raise ValueError(f"overlap_tokens is {self.overlap_tokens}, more than half of chunk_tokens ({self.chunk_tokens})")
        return self


class WorkersConfig(Section):
    """The actors that hold engines. `auto`: one for each GPU of the cluster, or one with every core of this machine.

    `count` is how many are wanted: nodes that join later give those that could not be had at first. Each takes `cpus`, `gpus` and custom
    `resources` of a node whose labels are as `labels` says (Ray's selectors: a value, `!value`, `in(a,b)`, `!in(a,b)`).

    `max_attempts` worker processes may end with a document in them before it is given up. A worker without a token for `watchdog_s`
    seconds is ended. At SIGTERM, finished answers are kept within `stop_window_s` seconds.

    With `context_ranks`, documents of more than `context_above_tokens` tokens (prompt and answer; `auto`: engine.kv_tokens) are not given
    to one worker but to a context-parallel group of so many, which holds their KV together; all others are answered first. A step of
    the group feeds `context_step_tokens` of a document (`auto`: on GPUs as many as hide the exchange between them, else
    engine.prefill_chunk).
    """

    count: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    cpus: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    max_attempts: Annotated[int, Field(ge=1)] = 3
    dispatch: Literal["ray_data", "direct"] = "ray_data"
    watchdog_s: Annotated[float, Field(gt=0)] | None = 600.0
    stop_window_s: Annotated[float, Field(gt=0)] = 2.0
    address: str | None = None
    context_ranks: Annotated[int, Field(ge=2)] | None = None
    context_above_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    context_step_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"


class ErrorsConfig(Section):
    """When errors count as failure: the share of records with status `error` above which a finished run's exit code is 3.

    A run ends early once more than `stop_fraction` of at least `stop_sample` records are errors.
    """

    max_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    stop_sample: Annotated[int, Field(ge=1)] = 500


class MetricsConfig(Section):
    """Figures for others: a Prometheus endpoint of the driver at `host`:`port` (none when null), a heartbeat in the output every
    `heartbeat_s` seconds, events as JSON lines on stderr with `json_log`."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    host: str = "127.0.0.1"
    heartbeat_s: Annotated[float, Field(gt=0)] = 10.0
    json_log: bool = False


class RunConfig(Section):
    """One run: a model, documents, questions, and where the answers go.

    `context_tokens` narrows the model's own limit. `date` is what a chat template that prints the date sees; when not given, the moment
    at which the run first began, also where it is resumed later.
    """

    model: Annotated[str, Field(min_length=1)]
    model_revision: str | None = None
    context_tokens: Annotated[int, Field(ge=1)] | None = None
    date: datetime | None = None
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    input: InputConfig
    questions: str | tuple[Any, ...] | None = None
    output: OutputConfig = Field(default_factory=OutputConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    long_documents: LongDocumentsConfig = Field(default_factory=LongDocumentsConfig)
    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    errors: ErrorsConfig = Field(default_factory=ErrorsConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)

    @model_validator(mode="after")
    def _some_questions(self) -> RunConfig:
        if not self.questions and self.input.questions is None:
            raise ValueError("questions: none given; name a question file, list questions, or name a column in input.questions")
        return self

    @model_validator(mode="after")
    def _groups_are_possible(self) -> RunConfig:
        workers, engine = self.workers, self.engine
        if workers.context_ranks is None:
            if workers.context_above_tokens != "auto":
                raise ValueError(f"workers.context_above_tokens {workers.context_above_tokens} without workers.context_ranks")
            if workers.context_step_tokens != "auto":
                raise ValueError(f"workers.context_step_tokens {workers.context_step_tokens} without workers.context_ranks")
            return self
        if workers.context_above_tokens == "auto" and engine.kv_tokens == "auto":
            raise ValueError("workers.context_ranks needs engine.kv_tokens or workers.context_above_tokens: which documents are long?")
        if engine.layout != "split" or engine.deterministic or engine.backend in ("sglang", "fake"):
            raise ValueError("workers.context_ranks needs engine.layout split, backend transformers or auto, and not deterministic")
        return self
