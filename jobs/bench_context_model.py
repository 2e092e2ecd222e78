"""Whole models over the ranks of a group: time to the first token, time of a decode step, one GPU against all, through the engine itself.

For `bench_context_parallel`. Random weights of a real shape; the engine that a run uses, with one rank or with all.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from askmany.engine.config import EngineConfig
from askmany.engine.context_parallel import Groups, follow
from askmany.engine.context_parallel_build import ContextParallelEngine, build_rank, leader_engine
from askmany.engine.errors import DocumentError
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.request import Document, Question, Sampling
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Heads, Rules

ANSWER_TOKENS = 9
QUESTION = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape: its heads of `head_dim`, widths, and all of its layers."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int

    def heads(self, dtype: torch.dtype) -> Heads:
        return Heads(self.q_heads, self.kv_heads, self.head_dim, dtype.itemsize)

    def config(self, layers: int, context_tokens: int) -> PreTrainedConfig:
        kind = Qwen2Config if self.name.lower().startswith("qwen") else LlamaConfig
        return kind(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.inner, num_hidden_layers=layers,
            num_attention_heads=self.q_heads, num_key_value_heads=self.kv_heads, max_position_embeddings=context_tokens,
        )  # fmt: skip


CODELLAMA = Shape("CodeLlama-7B", 32, 32, 128, 4096, 11008, 32, 32016)
QWEN = Shape("Qwen2.5-7B", 28, 4, 128, 3584, 18944, 28, 152064)


@dataclass(frozen=True, slots=True)
class ModelCell:
    """A document of `document` tokens, `streams` questions, the first `layers` layers, steps of `chunk` tokens."""

    shape: Shape
    layers: int
    document: int
    streams: int
    chunk: int

    @property
    def rank_tokens(self) -> int:
        """What one GPU needs to hold everything."""
        own = self.streams * (len(QUESTION) + ANSWER_TOKENS + 16)
        return -(-(self.document + own + 64) // 16) * 16

    def documents(self) -> Document:
        tokens = tuple(1 + (i * 7919) % (self.shape.vocabulary - 2) for i in range(self.document))
        asked = tuple(Question(f"q{i}", (*QUESTION, 9 + i % 50), Sampling(ANSWER_TOKENS)) for i in range(self.streams))
        return Document(self.shape.name, (tokens,), asked)


def model_cell(
    cell: ModelCell, groups: Groups, rules: Rules, device: torch.device, dtype: torch.dtype, fits_one: bool
) -> dict[str, Any] | None:
    """Collective; rank 0 gets the row. Without `fits_one` the document is not tried on one GPU, whose pool then refuses it."""
    row: dict[str, Any] = {"model": cell.shape.name, "layers": cell.layers, "document_tokens": cell.document, "streams": cell.streams}
    model = _model(cell, device, dtype)
    single = Groups(*(_single() for _ in range(2)))
    if fits_one and groups.data.rank == 0:
        row["alone"] = _measured(_leader(model, cell, cell.rank_tokens, single, None), cell, device)
        _free(device)
    groups.control.agree([0.0])
    ranks = groups.data.size
    each = cell.rank_tokens if fits_one else -(-cell.rank_tokens * 5 // (ranks * 4 * 16)) * 16
    if groups.data.rank:
        follow(build_rank(model, each, _config(cell, each, device), groups, rules=rules))
        _free(device)
        return None
    if not fits_one:
        row["refused_by_one_gpu"] = _is_refused(_leader(model, cell, each, single, None), cell)
    engine = _leader(model, cell, each, groups, rules)
    row["group"] = _measured(engine, cell, device)
    engine.close()
    row["reasons"] = {f"{way}, {rule}": reason for (way, rule), reason in engine.reasons.items()}
    del engine
    _free(device)
    if fits_one:
        one, many = row["alone"], row["group"]
        row["prefill_efficiency"] = one["prefill_s"] / (ranks * many["prefill_s"])
        row["decode_speed_up"] = one["decode_ms"] / many["decode_ms"]
        row["same_first_tokens"] = sum(a == b for a, b in zip(one.pop("first"), many.pop("first"), strict=True)) / cell.streams
    return row


def _measured(engine: ContextParallelEngine, cell: ModelCell, device: torch.device) -> dict[str, Any]:
    """Seconds of the document's prefill and to the first token, milliseconds of a step in which all streams decode."""
    steps: list[tuple[float, int, int]] = []  # seconds, prefix tokens, decoded tokens
    started = time.perf_counter()
    first_s = None
    engine.submit(cell.documents())
    results = []
    while engine.has_work:
        before, at = engine.metrics, time.perf_counter()
        results += engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        after, now = engine.metrics, time.perf_counter()
        steps.append((now - at, after.prefill_tokens - before.prefill_tokens, after.decode_tokens - before.decode_tokens))
        if first_s is None and after.tail_tokens >= cell.streams * (len(QUESTION) + 1):
            first_s = now - started
    decoding = [seconds for seconds, prefix, decoded in steps if not prefix and decoded == cell.streams]
    answers = {result.question_id: result.answer_token_ids for result in results}
    return {
        "prefill_s": sum(seconds for seconds, prefix, _ in steps if prefix),
        "first_token_s": first_s,
        "decode_ms": 1e3 * statistics.median(decoding),
        "decode_steps": len(decoding),
        "answered": sum(len(ids) == ANSWER_TOKENS for ids in answers.values()),
        "first": [answers[f"q{i}"][0] for i in range(cell.streams)],
    }


def _leader(model: TransformersModel, cell: ModelCell, kv_tokens: int, groups: Groups, rules: Rules | None) -> ContextParallelEngine:
    config = _config(cell, kv_tokens, model.device)
    rank = build_rank(model, kv_tokens, config, groups, rules=rules)
    return leader_engine(rank, config, FakeDetokenizer(), (), None)


def _is_refused(engine: ContextParallelEngine, cell: ModelCell) -> bool:
    try:
        engine.submit(cell.documents())
    except DocumentError:
        return True
    return False


def _config(cell: ModelCell, kv_tokens: int, device: torch.device) -> EngineConfig:
    values: dict[str, Any] = {"device": device.type, "kv_tokens": kv_tokens, "max_rows": cell.streams, "dtype": "auto"}
    tokens = max(cell.chunk, cell.streams * (len(QUESTION) + 1))
    return EngineConfig(**values, step_tokens=tokens, prefill_chunk=cell.chunk)


def _model(cell: ModelCell, device: torch.device, dtype: torch.dtype) -> TransformersModel:
    torch.manual_seed(0)  # the same weights on every rank
    config = cell.shape.config(cell.layers, cell.document + 1024)
    with device:
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")  # type: ignore[no-untyped-call]
    return TransformersModel(made.to(device), context_tokens=cell.document + 1024)


def _single() -> RankGroup:
    """A group of this process alone; made by all at once."""
    found: RankGroup | None = None
    for rank in range(dist.get_world_size()):
        made = dist.new_group([rank], backend="gloo")
        if rank == dist.get_rank():
            found = RankGroup([rank], made)
    assert found is not None
    return found


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
