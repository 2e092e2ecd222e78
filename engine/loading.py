"""From a resolved model and config to an executor: device, dtype, weights, and a KV pool of the size that fits.

The only module that resolves `auto` values of the engine's config. Everything that cannot be run is refused here, as a ConfigError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from askmany.engine import memory
from askmany.engine.config import EngineConfig
from askmany.engine.constraints import Constraints
from askmany.engine.context_parallel_memory import block_bytes, message_bytes
from askmany.engine.errors import ConfigError
from askmany.engine.executor import TorchExecutor
from askmany.engine.grammar import GrammarCompiler
from askmany.engine.host_threads import keep_host_work_in_one_thread
from askmany.engine.invariant_rows import InvariantRows
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import LoadedModel
from askmany.engine.model_sglang import SglangModel
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.models import ResolvedModel
from askmany.engine.sglang_compat import installed_release

if TYPE_CHECKING:
    from askmany.engine.kernel_steps import KernelSteps

ModelLoader = Callable[[ResolvedModel, EngineConfig, torch.device, torch.dtype, int], LoadedModel]
"""From model, config, device, dtype and the context in tokens to the model with its weights on the device."""

logger = logging.getLogger(__name__)
PACKED = ("fp8", "awq")  # kinds of packed weights that SGLang's layers run


def load_model(model: ResolvedModel, config: EngineConfig, device: torch.device, dtype: torch.dtype, context_tokens: int) -> LoadedModel:
    """The model by the backend of the config; `auto` takes Transformers, with a warning, where SGLang refuses the model."""
    if config.backend == "sglang" or (config.backend == "auto" and _prefers_sglang(device)):
        try:
            return SglangModel.load(model.folder, device, dtype, context_tokens, deterministic=config.deterministic)
        except ConfigError as error:
            if config.backend == "sglang" or model.quantization:
                raise
            logger.warning("%s; Transformers runs it instead", error)
    return TransformersModel.load(model.folder, device, dtype, config.deterministic, context_tokens)


def load_executor(
    model: ResolvedModel, config: EngineConfig, context_tokens: int, load: ModelLoader = load_model
) -> tuple[TorchExecutor, EngineConfig]:
    """The executor for `model` under `config`, and the config with its `auto` values resolved. Raises ConfigError."""
    device = torch.device(_device(config))
    check_deterministic(config, device)
    check_quantization(model, config, device)
    dtype = _dtype(model, config, device)
    memory.check_weights(model.name, _weight_bytes(model, dtype), device, memory.free_bytes(device))
    loaded = load(model, config, device, getattr(torch, dtype), context_tokens)
    keep_host_work_in_one_thread(device)
    need = memory.PoolNeed(
        model=model.name,
        token_bytes=loaded.kv_shape.token_bytes,
        page_size=config.page_size,
        context_tokens=context_tokens,
        step_bytes=loaded.step_bytes(config.step_tokens, config.max_rows) + _kernel_bytes(loaded, config, device, context_tokens),
    )
    free = memory.free_bytes(device)
    if config.kv_tokens == "auto":
        kv_tokens = memory.auto_tokens(need, device, free)
    else:
        kv_tokens = config.kv_tokens
        memory.check_tokens(need, kv_tokens, device, free)
    resolved = config.resolve(device=_device(config), dtype=dtype, kv_tokens=kv_tokens)
    pool = KVPool(loaded.kv_shape, resolved.kv_pages * resolved.page_size, device)
    constraints = Constraints(partial(GrammarCompiler.load, model.folder, loaded.vocabulary, model.eos_token_ids))
    steps = _load_steps(loaded, pool, resolved, context_tokens) if device.type == "cuda" else None
    return TorchExecutor(loaded, pool, resolved.page_size, constraints, steps, InvariantRows() if config.deterministic else None), resolved


def _load_steps(model: LoadedModel, pool: KVPool, config: EngineConfig, context_tokens: int) -> KernelSteps | None:
    from askmany.engine.kernel_loading import load_steps  # Triton is there only where a GPU is

    return load_steps(model, pool, config, context_tokens)


def load_rank(model: ResolvedModel, config: EngineConfig, context_tokens: int, ranks: int) -> tuple[TransformersModel, int, EngineConfig]:
    """For one of `ranks` ranks that share a context: the model, the tokens of KV this rank has room for, the resolved config.

    `kv_tokens` of the config is each rank's; `auto` must leave room for an even share of the context. Raises ConfigError.
    """
    device = torch.device(_device(config))
    dtype = _dtype(model, config, device)
    memory.check_weights(model.name, _weight_bytes(model, dtype), device, memory.free_bytes(device))
    loaded = TransformersModel.load(model.folder, device, getattr(torch, dtype), context_tokens=context_tokens)
    kv = loaded.kv_shape
    step_bytes = loaded.step_bytes(config.step_tokens, config.max_rows) + _kernel_bytes(loaded, config, device, context_tokens)
    if device.type == "cuda":
        step_bytes += message_bytes(loaded.q_heads, kv.head_dim, config.step_tokens)
    need = memory.PoolNeed(
        model=model.name,
        token_bytes=kv.token_bytes + block_bytes(kv, ranks),
        page_size=config.page_size,
        context_tokens=-(-context_tokens // ranks) + config.page_size,
        step_bytes=step_bytes,
    )
    free = memory.free_bytes(device)
    kv_tokens = memory.auto_tokens(need, device, free) if config.kv_tokens == "auto" else config.kv_tokens
    memory.check_tokens(need, kv_tokens, device, free)
    return loaded, kv_tokens, config.resolve(device=_device(config), dtype=dtype, kv_tokens=kv_tokens)


def _kernel_bytes(model: LoadedModel, config: EngineConfig, device: torch.device, context_tokens: int) -> int:
    if device.type != "cuda":
        return 0
    from askmany.engine.kernel_loading import kernel_bytes

    return kernel_bytes(model, config, device, context_tokens)


def check_deterministic(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError for the interleaved layout on a GPU: its kernel cuts keys by the requests of a step, which moves last bits."""
    if config.deterministic and config.layout == "interleaved" and device.type == "cuda":
        raise ConfigError("engine.deterministic: on a GPU it needs layout split, the layout is interleaved")


def check_quantization(model: ResolvedModel, config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError for packed weights that this engine does not run: all but some of SGLang's kinds, and those on a GPU alone."""
    packed = model.quantization
    if packed is None:
        return
    if packed not in PACKED:
        raise ConfigError(
            f"model {model.name}: weights packed as {packed!r} are not supported ({', '.join(PACKED)} are, by SGLang on a GPU)"
        )
    if device.type != "cuda" or config.backend == "transformers" or installed_release() is None:
        raise ConfigError(f"model {model.name}: weights packed as {packed!r} need engine.backend sglang on a GPU, the device is {device}")
    if config.deterministic:
        raise ConfigError(f"model {model.name}: deterministic needs plain weights, these are packed as {packed!r}")


def _prefers_sglang(device: torch.device) -> bool:
    return device.type == "cuda" and installed_release() is not None


def _device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device cuda: PyTorch sees no CUDA device on this machine")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _dtype(model: ResolvedModel, config: EngineConfig, device: torch.device) -> Literal["float32", "bfloat16", "float16"]:
    """`auto`: fp32 on a CPU (16-bit products are slow and erratic there), the checkpoint's own on a GPU."""
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu" or model.dtype == "float32":
        return "float32"
    return "float16" if model.dtype == "float16" else "bfloat16"


def _weight_bytes(model: ResolvedModel, dtype: str) -> int:
    """What the weights will take, from the size of their files."""
    files = [*model.folder.glob("*.safetensors")] or [*model.folder.glob("pytorch_model*.bin")]
    stored = getattr(torch, model.dtype, torch.float32)
    plain = isinstance(stored, torch.dtype) and model.quantization is None
    scale = getattr(torch, dtype).itemsize / stored.itemsize if plain else 1.0
    return int(sum(file.stat().st_size for file in files) * scale)
