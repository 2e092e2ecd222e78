"""The parts of SGLang that askmany leans on, as text, so that a change shows."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

SEAMS = (
    "sglang.srt.server_args:ServerArgs",
    "sglang.srt.configs.model_config:ModelConfig.from_server_args",
    "sglang.srt.model_executor.model_runner:ModelRunner.__init__",
    "sglang.srt.model_executor.forward_context:forward_context",
    "sglang.srt.model_executor.forward_context:ForwardContext",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode",
    "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode",
    "sglang.srt.model_executor.runner_utils.capture_mode:model_capture_mode",
    "sglang.srt.layers.radix_attention:RadixAttention.__init__",
    "sglang.srt.layers.radix_attention:RadixAttention.forward",
    "sglang.srt.layers.rotary_embedding:RotaryEmbedding.__init__",
    "sglang.srt.layers.rotary_embedding:RotaryEmbedding.forward",
    "sglang.srt.layers.rotary_embedding:RotaryEmbedding.forward_cuda",
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward",
    "sglang.srt.layers.attention.attention_registry:register_attention_backend",
    "sglang.srt.layers.logits_processor:LogitsProcessor.forward",
    "sglang.srt.layers.logits_processor:LogitsProcessor._copy_logits_to_buffer",
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput",
    "sglang.srt.layers.moe:initialize_moe_config",
    "sglang.srt.layers.quantization.fp4_utils:initialize_fp4_gemm_config",
    "sglang.srt.layers.quantization.fp8_utils:initialize_fp8_gemm_config",
    "sglang.srt.layers.quantization.unquant:initialize_bf16_gemm_config",
    "sglang.srt.distributed.parallel_state:destroy_model_parallel",
    "sglang.srt.distributed.parallel_state:destroy_distributed_environment",
    "sglang.srt.distributed.bootstrap:init_parallel_runtime",
    "sglang.srt.distributed.bootstrap:init_layer_runtime",
    "sglang.srt.runtime_context:publish",
    "sglang.srt.runtime_context:SpawnRanks",
    "sglang.srt.runtime_context:get_model",
)
SNAPSHOTS = Path(__file__).parents[1] / "engine" / "sglang"
ENGINE = Path(__file__).parents[2] / "engine"
READERS = ("model_sglang.py", "sglang_layers.py")  # of attention layers
ABSENT = "absent"


def seams() -> dict[str, str]:
    """Parameters (or members, or fields) of every seam, names only with their kinds of default; `absent` where a release lacks it."""
    return {name: _describe(name) for name in SEAMS}


def snapshot(release: str) -> dict[str, Any]:
    """What is known of a release: its `seams` and the `fields` of ForwardBatch that a pass reads. Empty for another release."""
    file = SNAPSHOTS / f"seams-{release}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def layer_attributes() -> set[str]:
    """Everything that is read of an attention layer, found in the source."""
    found = set()
    for node in (node for name in READERS for node in ast.walk(ast.parse((ENGINE / name).read_text()))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "layer":
            found.add(node.attr)
    return found


def _describe(name: str) -> str:
    module, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return ABSENT
    if inspect.isclass(target) and hasattr(target, "__members__"):
        return " ".join(sorted(target.__members__))
    if inspect.isclass(target) and len(inspect.signature(target).parameters) > 20:  # hundreds of options: those that we name
        return " ".join(sorted(_named_by_us() & set(inspect.signature(target).parameters)))
    return " ".join(_parameter(p) for p in inspect.signature(target).parameters.values())


def _parameter(parameter: inspect.Parameter) -> str:
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    optional = parameter.default is not inspect.Parameter.empty
    return marks.get(parameter.kind, "") + parameter.name + ("?" if optional else "")


def _named_by_us() -> set[str]:
    """Every keyword argument in `sglang_compat`."""
    source = (ENGINE / "sglang_compat.py").read_text()
    return {node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword) and node.arg}
