"""A tiny Llama in a GGUF file, written by the `gguf` library with random weights, for tests of the conversion."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, CONTEXT = 64, 4, 2, 16, 96, 2, 512
CHAT_TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


def byte_symbols() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *byte_symbols(), "th", "the", "Ġthe", "12"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]


def permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of q and k rows, row by row: row 2i + h of a head is Hugging Face's row h * D/2 + i."""
    out = np.empty_like(weight)
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            for h in range(2):
                out[head * 2 * half + 2 * i + h] = weight[head * 2 * half + h * half + i]
    return out


def write_tiny(path: Path, seed: int = 0, architecture: str = "llama") -> dict[str, NDArray[np.float32]]:
    """Write the file; returns the weights under Hugging Face's names as a reader should get them back (after quantisation)."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(str(path), architecture)
    _metadata(writer)
    expected: dict[str, NDArray[np.float32]] = {}

    def add(ours: str, theirs: str, shape: tuple[int, ...], heads: int = 0, quantised: bool = False) -> None:
        weight = rng.standard_normal(shape).astype(np.float32)
        if quantised:
            kind = GGMLQuantizationType.Q8_0
            blocks = weight.reshape(-1, 32)
            scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
            weight = (np.round(blocks / scale).clip(-127, 127) * scale).reshape(shape)
            stored = permute(weight, heads) if heads else weight
            writer.add_tensor(ours, quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(ours, permute(weight, heads) if heads else weight)
        expected[theirs] = weight

    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    for i in range(LAYERS):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        add(ours + "attn_norm.weight", theirs + "input_layernorm.weight", (HIDDEN,))
        add(ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight", (HIDDEN,))
        add(ours + "attn_q.weight", theirs + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN), HEADS, quantised=i == 0)
        add(ours + "attn_k.weight", theirs + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS)
        add(ours + "attn_v.weight", theirs + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN))
        add(ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM))
        add(ours + "ffn_gate.weight", theirs + "mlp.gate_proj.weight", (FFN, HIDDEN), quantised=i == 1)
        add(ours + "ffn_up.weight", theirs + "mlp.up_proj.weight", (FFN, HIDDEN))
        add(ours + "ffn_down.weight", theirs + "mlp.down_proj.weight", (HIDDEN, FFN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _metadata(writer: GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
