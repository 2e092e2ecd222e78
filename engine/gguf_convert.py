"""A Llama model in a GGUF file, written as the folder that Hugging Face's loaders read: safetensors, config and tokenizer.

Weights are dequantised by the `gguf` library and stored in fp32: a 4-bit value times its fp16 scale plus its fp16 offset fits neither fp16
nor bf16 without loss. Needs no torch. Only the Llama architecture with a byte-level BPE tokenizer of the SmolLM kind is converted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from askmany.engine.errors import ConfigError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types


def convert_llama(file: Path, folder: Path) -> None:
    """Write the model of `file` into the existing, empty `folder`. Raises `ConfigError` for another architecture or tokenizer."""
    reader = GGUFReader(str(file))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise ConfigError(f"{file}: architecture and tokenizer are {kind}, only ('llama', 'gpt2', 'smollm') can be converted")
    weights = {hf_name(t.name): _weight(t, meta) for t in reader.tensors}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod((folder.stat().st_mode & 0o666) | 0o600)  # it comes out readable by its owner alone
    _write(folder / "config.json", _config(meta, tied="lm_head.weight" not in weights))
    _write(folder / "generation_config.json", {f"{name}_token_id": _special_ids(meta)[name] for name in ("bos", "eos", "pad")})
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(meta))


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def _weight(tensor: Any, meta: dict[str, Any]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
    if ".attn_q." in tensor.name:
        values = unpermute(values, meta["llama.attention.head_count"])
    elif ".attn_k." in tensor.name:
        values = unpermute(values, meta["llama.attention.head_count_kv"])
    return np.ascontiguousarray(values)


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads * D, hidden] with each head's rotary rows interleaved (GGUF) -> the two halves one after the other (Hugging Face)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    """The shortest decimal of a number that was stored in fp32: 9.999999747e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    ids = _special_ids(meta)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "vocab_size": meta["llama.vocab_size"],
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(meta["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["pad"],
        "dtype": "float32",
    }


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {kind: int(meta[f"tokenizer.ggml.{name}_token_id"]) for kind, name in names.items()}


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer of the GGUF's metadata, whose name `smollm` alone says that every digit is split off before the byte-level pieces."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{kind}_token": tokens[index] for kind, index in _special_ids(meta).items()},
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
