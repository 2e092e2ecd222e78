"""From a model's name to a folder and the facts that planning needs, before anything is loaded.

A name is a known name (`smollm2`), a local folder, a folder in a bucket (`s3://...`), or a hub id; every refusal is one `ConfigError` line.
Reads JSON files only: a driver without a GPU resolves a model too. Knows neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from askmany.engine.bucket_model import is_bucket, obtain_from_bucket
from askmany.engine.errors import ConfigError
from askmany.engine.known_models import KNOWN_MODELS, default_cache, obtain
from askmany.engine.model_hash import SMALL_FILES, WEIGHT_FILES, model_hash, opener

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_SANE_TOKENS = 1 << 40  # a tokenizer without a limit writes 1e30


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine's disk. `revision` is a hash: the hub's commit, the known model's file, or the folder's contents.

    `dtype` is the dtype the weights are stored in, as the config names it (`bfloat16`); `eos_token_ids` end an answer; `quantization` names
    how weights are packed (`fp8`, `awq`), None where they are plain numbers.
    """

    name: str
    folder: Path
    revision: str
    model_type: str
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    quantization: str | None = None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """K and V of one token over all layers, for a cache of `dtype_bytes` bytes an element."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def resolve_model(name: str, revision: str | None = None, cache_dir: Path | None = None, weights: bool = True) -> ResolvedModel:
    """Find (or fetch) the model called `name` and read its facts.

    `revision`: a hub branch, tag or commit; for any other name it must be the hash that a former run recorded. `cache_dir`: where known
    models and those of buckets lie (default: `ASKMANY_CACHE`, else ~/.cache/askmany); the hub keeps its own. Without `weights` those of
    a hub or bucket are checked for, not fetched. Raises `ConfigError` for a model that is missing, gated, incomplete or no decoder.
    """
    folder, found = _locate(name, revision, cache_dir or default_cache(), weights)
    if revision is not None and found != revision and not _is_hub_id(name):
        raise ConfigError(f"model {name}: model_revision is {revision}, but what lies in {folder} is {found}")
    return _facts(name, folder, found)


def _is_hub_id(name: str) -> bool:
    return name not in KNOWN_MODELS and not _is_folder(name)


def _is_folder(name: str) -> bool:
    return bool(name) and Path(name).expanduser().is_dir()


def _locate(name: str, revision: str | None, cache: Path, weights: bool) -> tuple[Path, str]:
    if name in KNOWN_MODELS:
        model = KNOWN_MODELS[name]
        if revision not in (None, model.sha256):
            raise ConfigError(f"model {name}: model_revision is {revision}, the known one is {model.sha256}")
        return obtain(model, cache), model.sha256
    if is_bucket(name):
        folder, found = obtain_from_bucket(name, revision, cache, weights)
        _require_files(name, folder, weights)
        return folder, found
    if _is_folder(name):
        folder = Path(name).expanduser().resolve()
        _require_files(name, folder, weights=True)
        return folder, folder_hash(folder)
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {name!r}: no such folder (known names: {', '.join(KNOWN_MODELS)})")
    folder = _from_hub(name, revision, weights)
    _require_files(name, folder, weights)
    return folder, folder.name


def _from_hub(name: str, revision: str | None, weights: bool) -> Path:
    """The snapshot folder of a hub model; its name is the commit."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    patterns = [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
        if not weights and not _present(folder, WEIGHT_FILES):
            _require_listed_weights(name, hub.list_repo_files(name, revision=folder.name))
    except errors.GatedRepoError as error:
        raise ConfigError(f"model {name}: gated on the hub; accept its terms there and log in (hf auth login, or HF_TOKEN)") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"model {name}: the hub has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(f"model {name}: neither a known name, nor a folder, nor on the hub (or private: set HF_TOKEN)") from error
    except errors.HFValidationError as error:
        raise ConfigError(f"model {name!r}: neither a known name ({', '.join(KNOWN_MODELS)}), nor a folder, nor a hub id") from error
    except Exception as error:  # the hub's client raises errors of three libraries when there is no network
        raise ConfigError(
            f"model {name}: no such folder, not a known name ({', '.join(KNOWN_MODELS)}), "
            f"and the hub cannot be reached ({type(error).__name__}: {_first_line(error)})"
        ) from error
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _require_listed_weights(name: str, files: list[str]) -> None:
    if not any(Path(file).match(pattern) for file in files for pattern in WEIGHT_FILES):
        raise ConfigError(f"model {name}: holds no weights ({' or '.join(WEIGHT_FILES)})")


def _present(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _require_files(name: str, folder: Path, weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {name}: {folder} holds no config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model {name}: {folder} holds no tokenizer.json; other tokenizer files must be converted to it first")
    if not weights:
        return
    if not _present(folder, WEIGHT_FILES):
        raise ConfigError(f"model {name}: {folder} holds no weights ({' or '.join(WEIGHT_FILES)})")
    for index in sorted(folder.glob("*.index.json")):
        shards = set(_read(index, required=True).get("weight_map", {}).values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ConfigError(f"model {name}: {index} names {len(shards)} weight files, {len(missing)} are not there: {missing[0]}")


def folder_hash(folder: Path) -> str:
    """SHA-256 over the names, sizes and contents of a model folder's files; of a file over 64 MiB, its first and last MiB."""
    return model_hash((path.name, path.stat().st_size, opener(path)) for path in folder.iterdir() if path.is_file())


def _read(path: Path, required: bool = False) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({_first_line(error)})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def context_limit(folder: Path) -> int:
    """The longest text in tokens, an answer included, that the model in `folder` is made for. ConfigError where its config tells none."""
    return _context(str(folder), _of_text(_read(folder / "config.json", required=True)), folder)


def _of_text(whole: dict[str, Any]) -> dict[str, Any]:
    """What a config says of the language model, where it describes others beside it."""
    return {**whole, **whole["text_config"]} if isinstance(whole.get("text_config"), dict) else whole


def _facts(name: str, folder: Path, revision: str) -> ResolvedModel:
    whole = _read(folder / "config.json", required=True)
    config = _of_text(whole)
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"model {name}: {config.get('model_type')} is an encoder-decoder; askmany runs decoders")
    query_heads = _integer(name, config, "num_attention_heads", "n_head")
    head_dim = config.get("head_dim") or _integer(name, config, "hidden_size", "n_embd") // query_heads
    return ResolvedModel(
        name=name,
        folder=folder,
        revision=revision,
        model_type=str(config.get("model_type", "unknown")),
        context_tokens=_context(name, config, folder),
        eos_token_ids=_eos_token_ids(folder, config, whole),
        layers=_integer(name, config, "num_hidden_layers", "n_layer"),
        query_heads=query_heads,
        kv_heads=config.get("num_key_value_heads") or query_heads,
        head_dim=head_dim,
        vocab_size=_integer(name, config, "vocab_size"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        quantization=_quantization(whole) or _quantization(config),
    )


def _quantization(config: dict[str, Any]) -> str | None:
    packed = config.get("quantization_config")
    return str(packed.get("quant_method", "unknown")).lower() if isinstance(packed, dict) else None


def _integer(name: str, config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ConfigError(f"model {name}: config.json gives no positive {' or '.join(keys)}")


def _context(name: str, config: dict[str, Any], folder: Path) -> int:
    """The config's context, or the tokenizer's where that one is smaller (and not the mark for 'no limit')."""
    context = _integer(name, config, *_CONTEXT_KEYS)
    limit = _read(folder / "tokenizer_config.json").get("model_max_length")
    return min(context, int(limit)) if isinstance(limit, int | float) and 0 < limit < _SANE_TOKENS else context


def _eos_token_ids(folder: Path, *configs: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends a turn: generation_config's and config's `eos_token_id` (a number or a list), and the tokenizer's eos token."""
    found: set[int] = set()
    for config in (_read(folder / "generation_config.json"), *configs):
        value = config.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None:
        found.update(entry["id"] for entry in _read(folder / "tokenizer.json").get("added_tokens", ()) if entry["content"] == content)
    return tuple(sorted(found))
