"""The conversion of a GGUF file, on a tiny random model whose weights are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from askmany.engine.errors import ConfigError
from askmany.engine.gguf_convert import convert_llama, unpermute
from tests.helpers import tiny_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("tiny")
    expected = tiny_gguf.write_tiny(folder / "tiny.gguf", seed=7)
    (folder / "out").mkdir()
    convert_llama(folder / "tiny.gguf", folder / "out")
    return folder / "out", expected


def test_every_weight_comes_back_under_its_name(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, expected = converted
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 4), (2, 64)])
def test_unpermute_undoes_the_order_of_rows(heads: int, dim: int) -> None:
    weight = np.random.default_rng(heads).standard_normal((heads * dim, 5)).astype(np.float32)
    stored = tiny_gguf.permute(weight, heads)
    np.testing.assert_array_equal(unpermute(stored, heads), weight)
    if dim > 2:
        assert not np.array_equal(stored, weight)


def test_config(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rms_norm_eps"], config["rope_theta"], config["max_position_embeddings"]) == (1e-5, 10000.0, 512)
    assert config["tie_word_embeddings"] is True
    generation = json.loads((converted[0] / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokenizer = json.loads((converted[0] / "tokenizer_config.json").read_text())
    assert (tokenizer["model_max_length"], tokenizer["eos_token"], tokenizer["bos_token"]) == (512, "<|im_end|>", "<|im_start|>")
    assert tokenizer["chat_template"] == tiny_gguf.CHAT_TEMPLATE


def test_tokenizer_splits_digits_and_knows_its_specials(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    ids = {token: index for index, token in enumerate(tiny_gguf.TOKENS)}
    assert tokenizer.encode("12 the").ids == [ids["1"], ids["2"], ids["Ġthe"]]  # "12" is in the vocabulary, and never made
    assert tokenizer.encode("<|im_start|>the<|im_end|>").ids == [1, ids["the"], 2]
    text = "Größe 12 東京 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    tiny_gguf.write_tiny(tmp_path / "other.gguf", architecture="gemma")
    with pytest.raises(ConfigError, match=r"other\.gguf: architecture and tokenizer are \('gemma'"):
        convert_llama(tmp_path / "other.gguf", tmp_path)
