"""Engines on a CPU whose steps run through the kernels, interpreted, in NaN-poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from askmany.engine.build import build_scheduler
from askmany.engine.chunk_pass import ChunkPass
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.graphs import Capturer
from askmany.engine.kernel_steps import KernelSteps
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import RowModel
from askmany.engine.space_makers import KernelSetting, MaskedMaker, SplitMaker
from askmany.kernels import reference
from askmany.kernels.plan import Chunking
from tests.helpers.interpreter import INTERPRETED, repair
from tests.helpers.tiny_models import VOCABULARY
from tests.helpers.torch_engines import PoisoningExecutor

if INTERPRETED:
    repair()

_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 512}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gqa": LlamaConfig(**(_COMMON | {"num_hidden_layers": 2}), num_attention_heads=6, num_key_value_heads=2, head_dim=16),
    "mqa": Qwen2Config(**(_COMMON | {"hidden_size": 48}), num_attention_heads=3, num_key_value_heads=1),
}
CONTEXT = 512


def kernel_steps(
    model: RowModel, pool: KVPool, config: EngineConfig, capturer: Capturer | None = None, context: int = CONTEXT, **setting: Any
) -> KernelSteps:
    """The kernels for `model`; `setting` as in `KernelSetting`. Every node is shared, however small, unless it says otherwise."""
    chosen = {"chunking": Chunking(threshold_bytes=-1), "nodes": 4} | setting
    made = KernelSetting(model, pool, config.page_size, config.limits, context, **chosen)
    return KernelSteps(model, pool, SplitMaker(made) if config.layout == "split" else MaskedMaker(made), context, capturer)


def kernel_engine(model: Any, config: EngineConfig, capturer: Capturer | None = None, context: int = CONTEXT, **setting: Any) -> Engine:
    """An engine that attends through the kernels. No token ends an answer."""
    scheduler = build_scheduler(config)
    pool = KVPool(model.kv_shape, config.kv_pages * config.page_size, model.device, poisoned=True)
    executor = PoisoningExecutor(model, pool, config.page_size, steps=kernel_steps(model, pool, config, capturer, context, **setting))
    executor.free_pages = scheduler.tree.pool.free_pages
    return Engine(scheduler, executor, FakeDetokenizer())


class ReferencePrefill:
    """What a vendor's prefill kernel does, by the plain reference."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._slots: list[Tensor] = []

    def plan(self, rows: Sequence[int], slots: Sequence[NDArray[np.int32]]) -> None:
        self.rows, self._slots = list(rows), [torch.from_numpy(own).long() for own in slots]

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        outs, start = [], 0
        for rows, slots in zip(self.rows, self._slots, strict=True):
            visible = torch.ones(rows, len(slots), dtype=torch.bool).tril(len(slots) - rows)
            outs.append(reference.attend(q[start : start + rows], k_cache[slots], v_cache[slots], scale, visible)[0])
            start += rows
        return torch.cat(outs)


def reference_chunks() -> ChunkPass:
    return ChunkPass(ReferencePrefill())
