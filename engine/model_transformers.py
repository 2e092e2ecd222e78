"""Any Hugging Face decoder with our attention: Transformers runs the layers, our pool keeps K and V, our passes attend.

The hook is registered in Transformers' own attention interface and has no state: what a step needs travels through the forward call as a
keyword argument. No Hugging Face cache, no mask, no patched file. Device and dtype are the loader's; nothing here knows requests.
A model whose attention ours does not implement (windows, soft caps, sinks, linear layers, ...) is refused when it is loaded.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from askmany.engine import model_probe
from askmany.engine.batch import StepBatch
from askmany.engine.errors import ConfigError
from askmany.engine.invariant_check import settle_products
from askmany.engine.invariant_rows import InvariantRows, whole_blocks
from askmany.engine.kv_pool import KVPool, KVShape
from askmany.engine.memory import step_bytes
from askmany.engine.model import StepRows
from askmany.engine.model_surgery import ROWS, in_row_blocks, lay_out_weights
from askmany.engine.step_attention import LayerAttention, StepAttention

ATTENTION = "askmany"


def _attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    askmany: LayerAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: `query` [1, HQ, T, D], `key`, `value` [1, HKV, T, D]; returns [1, T, HQ, D]."""
    assert askmany is not None, "the model was called without askmany's step"
    if isinstance(askmany, model_probe.Notes):
        askmany.note_arguments(kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return askmany.attend(layer, q, k, v, scale)[None], None


class TransformersModel:
    """A loaded decoder: `forward` a step over a KV pool of `kv_shape`."""

    def __init__(self, model: PreTrainedModel, deterministic: bool = False, context_tokens: int | None = None) -> None:
        """Takes `model` over: sets its attention and lays out its layers. Raises ConfigError if it is not supported.

        `context_tokens`: the longest text it will be given (default: the model's own limit).
        """
        AttentionInterface.register(ATTENTION, _attention_hook)
        self._model = model.train(False)
        self._row_block = ROWS if deterministic else None
        self._alone: InvariantRows | None = None
        self._config = model.config.get_text_config()
        self.name = str(model.config.name_or_path) or type(model).__name__
        self.vocabulary = int(self._config.vocab_size)
        with torch.inference_mode():
            expected = self._own_logits()
            self._model.set_attn_implementation(ATTENTION)
            self.kv_shape = self._probed_shape(context_tokens or int(getattr(self._config, "max_position_embeddings", sys.maxsize)))
            if self.device.type == "cpu":
                lay_out_weights(self._model)
            if deterministic:
                self._settle_rows()
            self._check_logits(expected)

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device, dtype: torch.dtype, deterministic: bool = False, context_tokens: int | None = None
    ) -> TransformersModel:
        """Load a folder of config and safetensors weights. Raises ConfigError in one line."""
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
        except Exception as error:  # files of strangers, read by several libraries: any error means that they cannot be loaded
            raise ConfigError(f"model {folder} cannot be loaded: {_one_line(error)}") from error
        model, report = loaded
        absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        if absent:
            raise ConfigError(f"model {folder}: {len(absent)} weights are missing from its files or of another shape, first {absent[0]}")
        return cls(model.to(device), deterministic, context_tokens)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def q_heads(self) -> int:
        """Query heads of a layer."""
        return int(self._config.num_attention_heads)

    @property
    def rotary(self) -> None:
        """Its layers rotate by themselves."""
        return None

    def step_bytes(self, step_tokens: int, rows: int) -> int:
        """An upper estimate of what a step of `step_tokens`, of which `rows` are sampled, needs beside weights and pool."""
        counts = (step_tokens, rows) if self._alone is None else (whole_blocks(step_tokens), whole_blocks(rows))
        return step_bytes(self._config, self.kv_shape.head_dim, self.vocabulary, *counts)

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """Run one step: stores the rows' K and V in `pool`, returns the logits [N, V] of the batch's sampled rows."""
        return self.run(batch, StepAttention.of(batch, pool, self.device, self._row_block))

    def run_rows(self, rows: StepRows, attention: LayerAttention) -> Tensor:
        """Logits [W, V] of the wanted rows. Raises RuntimeError if they shall come unrotated."""
        if rows.unrotated:
            raise RuntimeError(f"model {self.name} turns queries and keys by itself")
        kept = 0 if rows.wanted is None else rows.wanted.rows  # 0 means all
        return self._pass(rows.token_ids, rows.positions, kept, attention)

    def capture_scope(self) -> AbstractContextManager[None]:
        """Nothing needs to be held."""
        return nullcontext()

    def run(self, batch: StepBatch, attention: LayerAttention) -> Tensor:
        """The same with an attention of the caller's, which also stores K and V; `batch.attention` and `store_slots` are not looked at."""
        ids, positions, rows = (
            tensor.to(self.device, non_blocking=True) for tensor in (batch.token_ids, batch.positions, batch.sampled_rows)
        )
        return self._pass(ids, positions, rows, attention)

    def _pass(self, ids: Tensor, positions: Tensor, kept: Tensor | int, attention: LayerAttention) -> Tensor:
        """Logits [N, V] of the rows `kept`, of all T where it is 0."""
        ids, positions = ids[None], positions[None]
        with self._alone or nullcontext():
            output = self._model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept, askmany=attention)
        logits: Tensor = output.logits
        return logits[0]

    def _settle_rows(self) -> None:
        """Make every row's bits its own: on a GPU by products in blocks, on a CPU, where activations need it too, module by module."""
        if model_probe.experts(self._config):
            raise self._refusal("its experts do not run with deterministic mode")
        if self.device.type == "cpu":
            in_row_blocks(self._model)
            return
        self._alone = InvariantRows()
        probe = model_probe.probe_batch(self.vocabulary, 1)
        settle_products(self._alone, lambda: self.run(probe, model_probe.OwnValues()), self.name)

    def _own_logits(self) -> Tensor:
        """The probe's logits by Transformers' own attention."""
        ids = model_probe.probe_ids(self.vocabulary)[None].to(self.device)
        try:
            self._model.set_attn_implementation("eager")
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise self._refusal(f"it does not run as a plain decoder ({_one_line(error)})") from error
        return logits[0]

    def _probed_shape(self, context_tokens: int) -> KVShape:
        notes = model_probe.Notes(context_tokens)
        notes.note_config(self._config)
        try:
            self.run(model_probe.probe_batch(self.vocabulary, 1), notes)
        except (ValueError, KeyError, TypeError, RuntimeError, AssertionError, AttributeError) as error:
            raise self._refusal(f"it does not run through Transformers' attention interface ({_one_line(error)})") from error
        layers = int(self._config.num_hidden_layers)
        complaint = notes.complaint(layers)
        if complaint:
            raise self._refusal(complaint)
        kv_heads, head_dim = notes.shapes[0]
        return KVShape(layers, kv_heads, head_dim, self._model.dtype)

    def _check_logits(self, expected: Tensor) -> None:
        pool = KVPool(self.kv_shape, model_probe.COPIES * model_probe.TOKENS, self.device)
        batches = [model_probe.probe_batch(self.vocabulary, copies) for copies in (1, model_probe.COPIES)]
        try:
            alone, among_copies = (self.forward(batch, pool) for batch in batches)
        except (ValueError, TypeError, RuntimeError) as error:
            mode = "deterministic mode" if self._row_block else "this attention"
            raise self._refusal(f"its layers do not run with {mode} ({_one_line(error)})") from error
        complaint = model_probe.logits_complaint(expected, alone, among_copies, self._model.dtype, self._row_block is not None)
        if complaint:
            raise self._refusal(complaint)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"model {self.name} ({self._model.config.model_type}) is not supported: {reason}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
