"""Whole models over the ranks of a group: time to the first token, time of a decode step, one GPU against all, through the engine itself.

For `bench_context_parallel`. Random weights of a real shape. One GPU is at its best: this project's engine with kernels and graphs, and,
for the prefill alone, a group of one rank, whichever is faster. Every engine first answers a shorter document.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig
from askmany.engine.context_parallel import Groups, follow
from askmany.engine.context_parallel_build import ContextParallelEngine, build_rank, leader_engine
from askmany.engine.engine import Engine
from askmany.engine.errors import DocumentError
from askmany.engine.executor import TorchExecutor
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.request import Document, Question, Sampling
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Heads, Rules

ANSWER_TOKENS = 24
OWN_PAGE = 64  # slots, on one GPU: what its kernels are fastest with
SETTLED = 6  # decode steps before those that are timed
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
    """A document of `document` tokens, `streams` questions, the first `layers` layers, steps of `chunk` tokens. `alone`: what stands for
    one GPU, the engine's `own` way, a `ring` of one rank, or the better of both."""

    shape: Shape
    layers: int
    document: int
    streams: int
    chunk: int
    alone: tuple[str, ...] = ("own", "ring")

    @property
    def rank_tokens(self) -> int:
        """What one GPU needs to hold everything."""
        own = self.streams * (len(QUESTION) + ANSWER_TOKENS + 16)
        return -(-(self.document + own + 64) // 16) * 16

    @property
    def label(self) -> str:
        return f"{self.shape.name}/{self.layers}L/{self.document}/{self.streams}"

    def asked(self, streams: int | None = None, tokens: int | None = None, salt: int = 0) -> Document:
        """The document, or its first `tokens`; `streams` of its questions. Another `salt` is another text."""
        count = tokens or self.document
        ids = tuple(1 + ((i + salt) * 7919) % (self.shape.vocabulary - 2) for i in range(count))
        questions = tuple(Question(f"q{i}", (*QUESTION, 9 + i % 50), Sampling(ANSWER_TOKENS)) for i in range(streams or self.streams))
        return Document(f"{self.shape.name}{salt}", (ids,), questions)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where models are measured. Of a cell's `alone` only what is named here; without `graphs` the group's decode steps run eagerly."""

    groups: Groups
    device: torch.device
    alone: tuple[str, ...] = ("own", "ring")
    graphs: bool = True


def model_cell(cell: ModelCell, model: TransformersModel, rules: Rules, bench: Bench, fits_one: bool) -> dict[str, Any] | None:
    """Collective; rank 0 gets the row. Without `fits_one` the document is not tried on one GPU, whose pool then refuses it."""
    row: dict[str, Any] = {"model": cell.shape.name, "layers": cell.layers, "document_tokens": cell.document, "streams": cell.streams}
    row["step_tokens"] = cell.chunk
    groups, device = bench.groups, bench.device
    single = Groups(*(_single() for _ in range(2)))
    leads = groups.data.rank == 0
    if fits_one and leads:
        row["alone"] = _alone(cell, model, single, bench)
    groups.control.agree([0.0])
    ranks = groups.data.size
    each = -(-cell.rank_tokens * 5 // (ranks * 4 * 16)) * 16
    if not leads:
        rank = build_rank(model, each, _config(cell, each, device), groups, rules=rules)
        rank.decode = rank.decode if bench.graphs else None
        follow(rank)
        del rank
        _free(device)
        return None
    if not fits_one:
        row["refused_by_one_gpu"] = _is_refused(_leader(model, cell, each, single, None), cell)
        _free(device)
    engine = _leader(model, cell, each, groups, rules, bench.graphs)
    row["group"] = _measured(engine, cell, device)
    engine.close()
    row["reasons"] = {f"{way}, {rule}": reason for (way, rule), reason in engine.reasons.items()}
    del engine
    _free(device)
    if fits_one:
        row |= _compared(row["alone"], row["group"], ranks)
    row["group"].pop("first")
    return row


def _compared(one: dict[str, Any], many: dict[str, Any], ranks: int) -> dict[str, Any]:
    found = {"prefill_efficiency": one["prefill_s"] / (ranks * many["prefill_s"])}
    if "decode_ms" in one:
        found["decode_speed_up"] = one["decode_ms"] / many["decode_ms"]
        same = [a == b for a, b in zip(one.pop("first"), many["first"], strict=True)]
        found["same_first_tokens"] = sum(same) / len(same)
    return found


def _alone(cell: ModelCell, model: TransformersModel, single: Groups, bench: Bench) -> dict[str, Any]:
    """One GPU: the engine's own figures, with the faster prefill of the two."""
    found: dict[str, Any] = {}
    asked = set(bench.alone) & set(cell.alone)
    if "own" in asked:
        engine = _own_engine(model, cell)
        found = _measured(engine, cell, bench.device)
        found["own_prefill_s"] = found["prefill_s"]
        del engine
        _free(bench.device)
    if "ring" in asked:
        engine = _leader(model, cell, cell.rank_tokens, single, None)
        found["ring_prefill_s"] = _measured(engine, cell, bench.device, streams=1)["prefill_s"]
        found["prefill_s"] = min(found["ring_prefill_s"], found.get("own_prefill_s", math.inf))
        del engine
        _free(bench.device)
    return found


def _measured(engine: Engine, cell: ModelCell, device: torch.device, streams: int | None = None) -> dict[str, Any]:
    """Seconds of the document's prefill and to the first token, milliseconds of a step in which all streams decode. The device is waited
    for at the ends of what is timed only."""
    count = streams or cell.streams
    engine.submit(cell.asked(count, min(cell.document, 2 * cell.chunk), salt=1))
    list(engine.drain())
    engine.scheduler.tree.clear()
    engine.submit(cell.asked(count))
    start = engine.metrics
    times: dict[str, float] = {}
    steps: list[tuple[float, bool]] = []  # seconds; whether every stream decoded and nothing else was done
    results = []
    _wait(device)
    started = time.perf_counter()
    while engine.has_work:
        before, at = engine.metrics, time.perf_counter()
        results += engine.step()
        after = engine.metrics
        for name, reached in (
            ("prefill_s", after.prefill_tokens - start.prefill_tokens >= cell.document),
            ("first_token_s", after.tail_tokens - start.tail_tokens >= count * (len(QUESTION) + 1)),
        ):
            if reached and name not in times:
                _wait(device)
                times[name] = time.perf_counter() - started
        decoded = after.decode_tokens - before.decode_tokens == count and after.tail_tokens == before.tail_tokens
        steps.append((time.perf_counter() - at, decoded))
    decoding = [seconds for seconds, decoded in steps if decoded][SETTLED:]
    answers = {result.question_id: result.answer_token_ids for result in results}
    return times | {
        "decode_ms": 1e3 * statistics.median(decoding),
        "decode_steps": len(decoding),
        "answered": sum(len(ids) == ANSWER_TOKENS for ids in answers.values()),
        "first": [answers[f"q{i}"][0] for i in range(count)],
    }


def _own_engine(model: TransformersModel, cell: ModelCell) -> Engine:
    """This project's engine on one device, with kernels and graphs on a GPU."""
    page = OWN_PAGE if model.device.type == "cuda" else 16
    pages = -(-cell.document // page) + cell.streams * -(-(len(QUESTION) + 1 + ANSWER_TOKENS) // page) + 1
    config = _config(cell, pages * page, model.device).model_copy(update={"page_size": page})
    pool = KVPool(model.kv_shape, config.kv_pages * config.page_size, model.device)
    if model.device.type != "cuda":
        return Engine(build_scheduler(config), TorchExecutor(model, pool, config.page_size), FakeDetokenizer())
    from askmany.engine.kernel_loading import load_steps

    steps = load_steps(model, pool, config, cell.document + 1024)
    return PipelinedEngine(build_scheduler(config), TorchExecutor(model, pool, config.page_size, steps=steps), FakeDetokenizer())


def _leader(
    model: TransformersModel, cell: ModelCell, kv_tokens: int, groups: Groups, rules: Rules | None, graphs: bool = True
) -> ContextParallelEngine:
    config = _config(cell, kv_tokens, model.device)
    rank = build_rank(model, kv_tokens, config, groups, rules=rules)
    rank.decode = rank.decode if graphs else None
    return leader_engine(rank, config, FakeDetokenizer(), (), None)


def _is_refused(engine: ContextParallelEngine, cell: ModelCell) -> bool:
    try:
        engine.submit(cell.asked())
    except DocumentError:
        return True
    return False


def _config(cell: ModelCell, kv_tokens: int, device: torch.device) -> EngineConfig:
    values: dict[str, Any] = {"device": device.type, "kv_tokens": kv_tokens, "max_rows": cell.streams, "dtype": "auto"}
    tokens = max(cell.chunk, cell.streams * (len(QUESTION) + 1))
    return EngineConfig(**values, step_tokens=tokens, prefill_chunk=cell.chunk)


def random_model(shape: Shape, layers: int, context_tokens: int, device: torch.device, dtype: torch.dtype) -> TransformersModel:
    """The first `layers` layers with random weights, the same on every rank, made on the device."""
    torch.manual_seed(0)
    with device:
        made = AutoModelForCausalLM.from_config(shape.config(layers, context_tokens), dtype=dtype, attn_implementation="eager")  # type: ignore[no-untyped-call]
    return TransformersModel(made.to(device), context_tokens=context_tokens)


def _single() -> RankGroup:
    """A group of this process alone; made by all at once."""
    found: RankGroup | None = None
    for rank in range(dist.get_world_size()):
        made = dist.new_group([rank], backend="gloo")
        if rank == dist.get_rank():
            found = RankGroup([rank], made)
    assert found is not None
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
