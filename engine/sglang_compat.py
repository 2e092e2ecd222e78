"""Everything about SGLang that differs between its releases, or that has to be done around it: the only module that knows its internals.

Of SGLang, the ModelRunner is built for its model alone: no scheduler process, no tokenizer manager, no KV pool, no attention backend, no
graph runner, and no file of SGLang's changed. Releases are told apart by what their functions take, not by their number. Tried with
0.5.15.post1 and 0.5.23. SGLang's config and process groups are globals of the process: one model at a time, after `close` the next.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

STOCK_BACKEND = {"cpu": "torch_native", "cuda": "triton"}  # named in SGLang's arguments, never built: attention is ours
MEMORY_FRACTION = 0.9  # of SGLang's own pool, which is never made
UNUSED_PORT = 1  # process groups meet in a file
CAST_OF_LOGITS = "_copy_logits_to_buffer"  # LogitsProcessor's step that widens to fp32

LoadFormat = Literal["auto", "dummy"]


def installed_release() -> str | None:
    """The installed release of SGLang; None where there is none. Imports nothing of it."""
    if importlib.util.find_spec("sglang") is None:
        return None
    return importlib.metadata.version("sglang")


@dataclass(frozen=True, slots=True)
class HandedBack:
    """A call of a rotary module that turned nothing: `positions` [T], `q` and `k` as they came."""

    positions: Tensor
    q: Tensor
    k: Tensor


class HostedModel:
    """A decoder of SGLang's with the weights of a folder, in this process.

    `runner` is SGLang's ModelRunner, `model` its module, `config` its ModelConfig, `dtype` that of the activations.
    """

    def __init__(
        self, folder: str | Path, device: torch.device, dtype: str = "auto", load_format: LoadFormat = "auto", invariant: bool = False
    ) -> None:
        """`load_format` dummy: weights are drawn at random and only the config is read. `invariant`: linear layers multiply by PyTorch's
        operations alone, which `InvariantRows` sees (SGLang's own batch-invariant mode stays off). Raises whatever SGLang raises.
        """
        _prepare_process(device)
        self._rendezvous = tempfile.TemporaryDirectory(prefix="askmany-sglang-")
        arguments = _server_arguments(folder, device, dtype, load_format, invariant)
        gpu = device.index or 0
        with _clean_on_failure(self.close), _environment(SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE=f"file://{self._rendezvous.name}/groups"):
            self.runner = _build_runner(arguments, gpu)
        self.model = self.runner.model
        self.config = self.runner.model_config
        self.dtype: torch.dtype = self.runner.dtype

    @property
    def attention_layers(self) -> list[Any]:
        """SGLang's RadixAttention modules, in the model's order."""
        from sglang.srt.layers.radix_attention import RadixAttention

        return [module for module in self.model.modules() if isinstance(module, RadixAttention)]

    @property
    def rotary_modules(self) -> list[Any]:
        """The modules with a rotary table, each once, however many layers share it."""
        return [module for module in self.model.modules() if isinstance(getattr(module, "cos_sin_cache", None), Tensor)]

    @property
    def rope_rows(self) -> int | None:
        """Positions for which every rotary table has an entry; None without such tables."""
        return min((len(module.cos_sin_cache) for module in self.rotary_modules), default=None)

    def run(self, attention: Any, batch: Any) -> Tensor:
        """One forward pass under `attention` (see `StreamBackend` in model_sglang): logits [N, V] of the rows that `batch` keeps."""
        model = self.model
        if hasattr(model, "prepare_for_forward"):  # 0.5.23
            model.prepare_for_forward(batch)
        with self._scope(attention, batch):
            logits: Tensor = model.forward(batch.input_ids, batch.positions, batch).next_token_logits
        return logits

    @contextmanager
    def unrotated(self, rotary: Any, kept: list[HandedBack] | None = None) -> Iterator[None]:
        """Within, the rotary module hands queries and keys back as they came, and notes each such call in `kept`.

        An attribute of the one module shadows its method for that time.
        """
        before = vars(rotary).get("forward")

        def hand_back(positions: Tensor, query: Tensor, key: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            if any(value is not None for value in (*more, *named.values())):
                raise RuntimeError("a layer asks its rotary embedding for more than turning queries and keys")
            if kept is not None:
                kept.append(HandedBack(positions, query.clone(), key.clone()))
            return query, key

        rotary.forward = hand_back
        try:
            yield
        finally:
            del rotary.forward
            if before is not None:
                rotary.forward = before

    def leave_logits_in_their_dtype(self) -> Callable[[], None] | None:
        """From now on logits come in the dtype of their product, uncast: they are the largest tensor of a step, and whoever draws from them
        widens what it reads. Returns what undoes it; None where SGLang does more to them than casting."""
        from sglang.srt.layers.logits_processor import LogitsProcessor

        found = [module for module in self.model.modules() if isinstance(module, LogitsProcessor)]
        if len(found) != 1 or not hasattr(found[0], CAST_OF_LOGITS) or getattr(found[0], "final_logit_softcapping", None):
            return None
        width = self.config.vocab_size
        setattr(found[0], CAST_OF_LOGITS, lambda logits, *more, **named: logits[:, :width])
        return lambda: delattr(found[0], CAST_OF_LOGITS)

    def close(self) -> None:
        """Take SGLang's process groups down, so that another model can be hosted. The model itself can still be run."""
        from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
        self._rendezvous.cleanup()

    @contextmanager
    def _scope(self, attention: Any, batch: Any) -> Iterator[None]:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        named = {"forward_batch": batch} if "forward_batch" in inspect.signature(forward_context).parameters else {}
        with ExitStack() as stack:
            if getattr(self.model, "shared_experts_config", None) is not None:  # 0.5.23
                from sglang.srt.runtime_context import get_model

                stack.enter_context(get_model().override(shared_experts=self.model.shared_experts_config))
            stack.enter_context(forward_context(ForwardContext(attn_backend=attention), **named))
            yield


def decode_batch(token_ids: Tensor, positions: Tensor, slots: Tensor) -> Any:
    """A ForwardBatch of T rows that all keep their logits. All tensors [T] int64, on the model's device."""
    return _forward_batch("DECODE", token_ids, positions, slots, len(token_ids))


def extend_batch(token_ids: Tensor, positions: Tensor, slots: Tensor, run_lengths: Tensor) -> Any:
    """A ForwardBatch of T rows in consecutive runs of `run_lengths` [N] int32 (their sum is T); each run keeps its last row's logits."""
    return _forward_batch("EXTEND", token_ids, positions, slots, len(run_lengths), extend_seq_lens=run_lengths)


@contextmanager
def capture_scope() -> Iterator[None]:
    """To be held around the warm-up and capture of a CUDA graph: SGLang's layers then avoid what cannot be recorded."""
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    with model_capture_mode():
        yield


def _forward_batch(mode: str, token_ids: Tensor, positions: Tensor, slots: Tensor, sequences: int, **more: Tensor) -> Any:
    """All the fields that a decoder-only text model reads when attention is ours; the rest has defaults or may be None."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    return ForwardBatch(
        forward_mode=getattr(ForwardMode, mode),
        batch_size=sequences,
        input_ids=token_ids,
        positions=positions,
        out_cache_loc=slots,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        req_pool_indices=None,
        seq_lens=None,
        seq_lens_sum=None,
        **more,
    )


def _prepare_process(device: torch.device) -> None:
    """What must be so before SGLang is imported: it asks the environment whether it runs on a CPU, and warns of much that is no fault."""
    if device.type == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    logging.getLogger("sglang").setLevel(logging.ERROR)


def _server_arguments(folder: str | Path, device: torch.device, dtype: str, load_format: LoadFormat, invariant: bool) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(folder),
        device=device.type,
        dtype=dtype,
        load_format=load_format,
        attention_backend=STOCK_BACKEND[device.type],
        skip_tokenizer_init=True,
        page_size=1,
        chunked_prefill_size=-1,
        mem_fraction_static=MEMORY_FRACTION,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        log_level="error",
        random_seed=0,
        **_plain_products(invariant),
    )


def _plain_products(wanted: bool) -> dict[str, str]:
    """The argument that keeps SGLang's own kernels for bf16 products out, which choose by the row count; 0.5.15 has none where they are
    not asked for."""
    if not wanted:
        return {}
    from sglang.srt.layers.quantization.unquant import Bf16GemmBackend

    return {"bf16_gemm_backend": "torch"} if "torch" in {backend.value for backend in Bf16GemmBackend} else {}


def _build_runner(arguments: Any, gpu: int) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

    if "tp_rank" not in inspect.signature(ModelRunner.__init__).parameters:  # 0.5.23: ranks are published, groups are built before
        return _bootstrap_runner(arguments, gpu)
    for configure in _gemm_configurations():
        configure(arguments)
    ranks = {"tp_rank": 0, "tp_size": 1, "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1}
    return ModelRunner(
        model_config=ModelConfig.from_server_args(arguments),
        mem_fraction_static=MEMORY_FRACTION,
        gpu_id=gpu,
        nccl_port=UNUSED_PORT,
        server_args=arguments,
        **ranks,
    )


def _bootstrap_runner(arguments: Any, gpu: int) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish

    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=gpu))
    for configure in _gemm_configurations():
        configure()
    config = ModelConfig.from_server_args(arguments)
    bootstrap.init_parallel_runtime(server_args=arguments, device=get_device().device, dist_port=UNUSED_PORT)
    bootstrap.init_layer_runtime(model_config=config)
    return ModelRunner(model_config=config, mem_fraction_static=MEMORY_FRACTION, gpu_id=gpu, nccl_port=UNUSED_PORT, server_args=arguments)


def _gemm_configurations() -> tuple[Callable[..., None], ...]:
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config

    return initialize_moe_config, initialize_fp8_gemm_config, initialize_bf16_gemm_config, initialize_fp4_gemm_config


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for the time of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _clean_on_failure(close: Callable[[], None]) -> Iterator[None]:
    """A construction that fails leaves a changed default dtype and half-built groups behind: undo both."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    except BaseException:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        close()
        raise
