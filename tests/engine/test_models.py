"""A model's name becomes a folder and facts, or one line that says why not."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import pytest
from huggingface_hub import errors

from askmany.engine.errors import ConfigError
from askmany.engine.models import ResolvedModel, folder_hash, resolve_model

CONFIG = {
    "model_type": "qwen2",
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "eos_token_id": 5,
    "dtype": "bfloat16",
}
TOKENIZER = {"added_tokens": [{"id": 7, "content": "<|end|>"}, {"id": 8, "content": "<|other|>"}]}


def write_model(folder: Path, **files: Any) -> Path:
    """A folder with the JSON files of a model; a name given as None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"config": CONFIG, "tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": "<|end|>"}, **files}
    for name, value in contents.items():
        if value is not None:
            (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_facts_of_a_folder(tmp_path: Path) -> None:
    found = resolve_model(str(write_model(tmp_path / "m", generation_config={"eos_token_id": [5, 6]})))
    assert (found.layers, found.query_heads, found.kv_heads, found.head_dim, found.vocab_size) == (3, 8, 2, 32, 1000)
    assert (found.context_tokens, found.model_type, found.dtype) == (4096, "qwen2", "bfloat16")
    assert found.eos_token_ids == (5, 6, 7)
    assert found.kv_bytes_per_token(2) == 2 * 3 * 2 * 32 * 2
    assert found.folder == tmp_path / "m"
    assert len(found.revision) == 64


@pytest.mark.parametrize(("limit", "context"), [(1e30, 4096), (2048, 2048), (2048.0, 2048), (131072, 4096), (None, 4096), (-1, 4096)])
def test_context_is_the_smaller_of_config_and_sane_tokenizer(tmp_path: Path, limit: float | None, context: int) -> None:
    assert resolve_model(str(write_model(tmp_path, tokenizer_config={"model_max_length": limit}))).context_tokens == context


def test_older_names_nested_configs_and_missing_heads(tmp_path: Path) -> None:
    old = {"n_positions": 1024, "n_head": 4, "n_embd": 64, "n_layer": 2, "vocab_size": 99}
    found = resolve_model(str(write_model(tmp_path / "old", config=old, tokenizer_config={"eos_token": {"content": "<|other|>"}})))
    assert (found.context_tokens, found.kv_heads, found.head_dim, found.dtype) == (1024, 4, 16, "float32")
    assert found.eos_token_ids == (8,)
    nested = {"model_type": "wrapper", "text_config": {**CONFIG, "head_dim": 64, "eos_token_id": [1]}, "eos_token_id": 9}
    found = resolve_model(str(write_model(tmp_path / "nested", config=nested, tokenizer_config=None)))
    assert (found.head_dim, found.eos_token_ids) == (64, (1, 9))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": None}, "holds no config.json"),
        ({"tokenizer": None}, "holds no tokenizer.json"),
        ({"config": "{not json"}, "config.json: not readable as JSON"),
        ({"config": "[1]"}, "expected a JSON object, found list"),
        ({"config": {**CONFIG, "max_position_embeddings": None}}, "gives no positive max_position_embeddings or n_positions"),
        ({"config": {**CONFIG, "vocab_size": 0}}, "gives no positive vocab_size"),
        ({"config": {**CONFIG, "is_encoder_decoder": True}}, "is an encoder-decoder"),
        ({"model.safetensors.index": {"weight_map": {"a": "gone-1.safetensors", "b": "model.safetensors"}}}, "1 are not there: gone-1"),
    ],
)
def test_an_incomplete_folder_is_refused_in_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(str(write_model(tmp_path, **files)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        resolve_model(str(tmp_path))


def test_revision_of_a_folder_is_its_contents(tmp_path: Path) -> None:
    first = resolve_model(str(write_model(tmp_path / "a"))).revision
    assert resolve_model(str(write_model(tmp_path / "b"))).revision == first
    assert resolve_model(str(tmp_path / "a"), revision=first).revision == first
    (tmp_path / "b" / "model.safetensors").write_bytes(b"weighty")
    assert folder_hash(tmp_path / "b") != first
    with pytest.raises(ConfigError, match=f"model_revision is {first}, but what lies in "):
        resolve_model(str(tmp_path / "b"), revision=first)


def test_a_known_model_has_one_revision() -> None:
    with pytest.raises(ConfigError, match="model_revision is main, the known one is "):
        resolve_model("smollm2", revision="main")


@pytest.mark.parametrize("name", ["./gone", "/gone/away", "~/gone", "a/b/c", ""])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(name)


def _hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Exception | Path) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def snapshot(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return calls


def _error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "gated on the hub"),
        (errors.RevisionNotFoundError, "the hub has no revision 'v9'"),
        (errors.RepositoryNotFoundError, "nor on the hub"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached"),
        (errors.HFValidationError, "nor a hub id"),
        (OSError, "the hub cannot be reached"),
        (ConnectionError, "the hub cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str) -> None:
    _hub_answers(monkeypatch, _error(kind))
    with pytest.raises(ConfigError) as caught:
        resolve_model("org/model", revision="v9")
    assert message in str(caught.value)
    assert "org/model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_named_by_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = _hub_answers(monkeypatch, write_model(tmp_path / "snapshots" / "abc123"))
    found = resolve_model("org/model", revision="main")
    assert (found.revision, found.name) == ("abc123", "org/model")
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert calls[0]["revision"] == "main"


def test_a_driver_fetches_no_weights_but_sees_that_there_are_some(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "abc123")
    (folder / "model.safetensors").unlink()
    calls = _hub_answers(monkeypatch, folder)
    monkeypatch.setattr(hub, "list_repo_files", lambda name, revision: ["config.json", "model-1.safetensors"])
    assert resolve_model("org/model", weights=False).revision == "abc123"
    assert "*.safetensors" not in calls[0]["allow_patterns"]
    monkeypatch.setattr(hub, "list_repo_files", lambda name, revision: ["config.json", "model.gguf"])
    with pytest.raises(ConfigError, match="holds no weights"):
        resolve_model("org/model", weights=False)


def test_smollm2(smollm2: ResolvedModel) -> None:
    assert (smollm2.layers, smollm2.query_heads, smollm2.kv_heads, smollm2.head_dim) == (30, 9, 3, 64)
    assert (smollm2.context_tokens, smollm2.eos_token_ids, smollm2.vocab_size) == (8192, (2,), 49152)
    assert smollm2.kv_bytes_per_token(4) == 46080
