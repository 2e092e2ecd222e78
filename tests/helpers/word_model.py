"""A model folder whose tokenizer makes one token of every word: lengths can be counted by eye. Its weights are an empty file."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 997


def word_model(folder: Path, context_tokens: int = 64) -> Path:
    """Write the folder; `w0` to `w996` are words, every other word is `[unk]`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {"[unk]": 0, **{f"w{i}": i + 1 for i in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "max_position_embeddings": context_tokens,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": len(vocab),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def words(count: int, start: int = 0) -> str:
    """`count` words of the vocabulary."""
    return " ".join(f"w{(start + i) % WORDS}" for i in range(count))
