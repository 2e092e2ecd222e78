"""Model shapes of the published comparisons, as folders that hold a config and no weights: for speed, weights may be random.

The numbers are the models' own published configurations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32016, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 32768, "attention_bias": False,
}  # fmt: skip
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 32768, "use_sliding_window": False,
}  # fmt: skip


def _dims(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "codellama-7b": _LLAMA | _dims(4096, 11008, 32, 32, 32),
    "codellama-13b": _LLAMA | _dims(5120, 13824, 40, 40, 40),
    "qwen2.5-1.5b": _QWEN | _dims(1536, 8960, 28, 12, 2) | {"vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-7b": _QWEN | _dims(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _QWEN | _dims(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _QWEN | _dims(5120, 27648, 64, 40, 8),
    "tiny": _LLAMA | _dims(64, 96, 2, 4, 2) | {"vocab_size": 128},
}


def shape_folder(name: str, parent: Path) -> Path:
    """A folder below `parent` with the config of shape `name`. Raises KeyError for an unknown name."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name] | {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def vocabulary(name: str) -> int:
    return int(SHAPES[name]["vocab_size"])
