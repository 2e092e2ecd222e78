"""Steps through the kernels for a loaded model, as its config wants them: layout, prefill, graphs.

Imports Triton: to be imported where there is a GPU, or an interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from askmany.engine.chunk_pass import ChunkPass
from askmany.engine.config import EngineConfig
from askmany.engine.graphs import CudaCapturer
from askmany.engine.kernel_steps import KernelSteps
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import RowModel
from askmany.engine.space_makers import KernelSetting, MaskedMaker, SplitMaker, processors_of
from askmany.engine.workspaces import WorkRules, workspace_bytes
from askmany.kernels.plan import Chunking
from askmany.kernels.threshold import tuned_threshold
from askmany.kernels.tiles import AttentionShape, Tiles
from askmany.kernels.tune import tuned_tiles
from askmany.kernels.vendor_prefill import best_prefill

logger = logging.getLogger(__name__)
MEASURED_MAJOR = 9  # compute capability whose tiles `kernels/tiles.py` has from measurements


def load_steps(model: RowModel, pool: KVPool, config: EngineConfig, context_tokens: int) -> KernelSteps | None:
    """Steps through the kernels, document chunks by the fastest prefill that is installed; None, with a warning, where they do not serve
    the model's heads or pages. The config must be resolved."""
    kv = pool.shape
    try:
        shape = AttentionShape(model.q_heads, kv.kv_heads, kv.head_dim, config.page_size, kv.dtype)
    except ValueError as error:
        logger.warning("model %s runs in PyTorch's own operations: the kernels do not serve it (%s)", model.name, error)
        return None
    vendor = None if config.deterministic else best_prefill(shape, pool.device)
    setting = KernelSetting(
        model, pool, config.page_size, config.limits, context_tokens,
        chunking=_chunking(shape, config, pool), chunk_pass=ChunkPass(vendor[1]) if vendor else None,
        tiles=_timed_tiles(pool.device) if _unmeasured(pool.device) else None,
    )  # fmt: skip
    logger.info("document chunks of %s are prefilled by %s", model.name, vendor[0] if vendor else "the project's kernels")
    capturer = CudaCapturer(pool.device, model.capture_scope) if pool.device.type == "cuda" else None
    maker = SplitMaker(setting) if config.layout == "split" else MaskedMaker(setting)
    return KernelSteps(model, pool, maker, context_tokens, capturer)


def _timed_tiles(device: torch.device) -> Callable[[AttentionShape, int, int | None], Tiles]:
    return lambda shape, rows, tokens: tuned_tiles(shape, rows, 1, device, node_tokens=tokens)


def _unmeasured(device: torch.device) -> bool:
    """Whether the tile table was not measured on this kind of GPU, so that tiles are worth the seconds that timing them takes."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != MEASURED_MAJOR


def kernel_bytes(model: RowModel, config: EngineConfig, device: torch.device, context_tokens: int) -> int:
    """What `load_steps` will come to take on a GPU beside the pool, at most; 0 where the kernels do not serve the model."""
    kv = model.kv_shape
    try:
        shape = AttentionShape(model.q_heads, kv.kv_heads, kv.head_dim, config.page_size, kv.dtype)
    except ValueError:
        return 0
    chunking = Chunking(deterministic=config.deterministic)
    rules = WorkRules(shape, chunking, context_tokens, config.limits.max_rows, processors_of(device))
    return workspace_bytes(rules, config.limits, config.layout, model.vocabulary)


def _chunking(shape: AttentionShape, config: EngineConfig, pool: KVPool) -> Chunking:
    """The grouping threshold of this GPU, measured once; pinned chunks, and no threshold, in deterministic mode."""
    if config.deterministic:
        return Chunking(deterministic=True)
    if pool.device.type != "cuda" or config.layout != "split":
        return Chunking()
    threshold_bytes = tuned_threshold(shape, pool.device)
    logger.info("a document pass is worth it from %d saved bytes a layer on", threshold_bytes)
    return Chunking(threshold_bytes=threshold_bytes)
