"""Tiny random decoders of every tested family, as Transformers modules in fp32."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

VOCABULARY = 97
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "max_position_embeddings": 512}
CONFIGS = {
    "llama-mha": LlamaConfig(**_COMMON, num_attention_heads=4, num_key_value_heads=4),
    "llama-gqa": LlamaConfig(**_COMMON, num_attention_heads=6, num_key_value_heads=2),
    "qwen2": Qwen2Config(**_COMMON, num_attention_heads=6, num_key_value_heads=1),
    "qwen3": Qwen3Config(**_COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=20),
}


def tiny_model(name: str, seed: int = 0, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """One of `CONFIGS` with random weights."""
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size = vocabulary
    return random_model(config, seed)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Random weights, wide enough that logits differ by O(1) between tokens. Takes `config` over."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2) if parameter.ndim > 1 else parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
