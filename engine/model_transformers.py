"""Any Hugging Face decoder with our attention: Transformers runs the layers, our pool keeps K and V, our passes attend.

The hook is registered in Transformers' own attention interface and has no state: what a step needs travels through the forward call as a
keyword argument. No Hugging Face cache, no mask, no patched file. Device and dtype are the loader's; nothing here knows requests.
A model whose attention ours does not implement (windows, soft caps, sinks, linear layers, ...) is refused when it is loaded: by what its
config and its layers ask for, and by comparing a short prompt's logits with Transformers' eager attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from askmany.engine.batch import StepBatch
from askmany.engine.errors import ConfigError
from askmany.engine.kv_pool import KVPool, KVShape
from askmany.engine.model_surgery import ROWS, in_row_blocks, lay_out_weights
from askmany.kernels.dense import MAX_SCORES
from askmany.kernels.layout import PrivateItem, SplitBatch
from askmany.kernels.passes import AttentionPlan, Run, as_run, plan_masked, plan_split, to_device
from askmany.kernels.torch_attention import planned_attention

ATTENTION = "askmany"
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "chunk_size", "attention_chunk_size")
PROBE_TOKENS = 12
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the logits' norm; a wrong attention is off by O(1)


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What a layer needs to attend in one step; handed through the forward call."""

    pool: KVPool
    store_slots: Run
    plan: AttentionPlan

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store `k`, `v` [T, HKV, D], then attend with `q` [T, HQ, D]; output [T, HQ, D] in `q`'s dtype."""
        self.pool.store(layer, self.store_slots, k, v)
        out, _ = planned_attention(q, self.pool.k[layer], self.pool.v[layer], self.plan, scale)
        return out.to(q.dtype)


@dataclass(slots=True)
class _Recorder:
    """Stands in for `StepAttention` in the first probe: notes what the layers ask for. A window as wide as the context is none."""

    context_tokens: int
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def note(self, arguments: dict[str, Any]) -> None:
        self.asked.update(name for name in UNSUPPORTED if arguments.get(name) is not None)
        window = arguments.get("sliding_window")
        if window is not None and window < self.context_tokens:
            self.asked.add(f"a sliding window of {window} tokens (the context is {self.context_tokens})")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if k.shape != v.shape:
            self.asked.add(f"keys {tuple(k.shape[1:])} and values {tuple(v.shape[1:])} of different shapes")
        self.shapes[layer] = tuple(k.shape[1:])
        return torch.zeros_like(q)


def _attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    askmany: StepAttention | _Recorder | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: `query` [1, HQ, T, D], `key`, `value` [1, HKV, T, D]; returns [1, T, HQ, D]."""
    assert askmany is not None, "the model was called without askmany's step"
    if isinstance(askmany, _Recorder):
        askmany.note(kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return askmany.attend(layer, q, k, v, scale)[None], None


class TransformersModel:
    """A loaded decoder: `forward` a step over a KV pool of `kv_shape`."""

    def __init__(self, model: PreTrainedModel, deterministic: bool = False) -> None:
        """Takes `model` over: sets its attention, and its layers in deterministic mode. Raises ConfigError if it is not supported."""
        AttentionInterface.register(ATTENTION, _attention_hook)
        self._model = model.train(False)
        self._row_block = ROWS if deterministic else None
        self.name = str(model.config.name_or_path) or type(model).__name__
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.context_tokens = int(model.config.get_text_config().max_position_embeddings)
        with torch.inference_mode():
            expected = self._eager_logits()
            self._model.set_attn_implementation(ATTENTION)
            self.kv_shape = self._probe_shape()
            if self.device.type == "cpu":
                lay_out_weights(self._model)
            if deterministic:
                in_row_blocks(self._model)
            self._check_logits(expected)

    @classmethod
    def load(cls, folder: str | Path, device: torch.device, dtype: torch.dtype | None, deterministic: bool = False) -> TransformersModel:
        """Load a folder of config and safetensors weights. `dtype` None keeps the checkpoint's. Raises ConfigError in one line."""
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # files of strangers, read by several libraries: any error means that they cannot be loaded
            raise ConfigError(f"model {folder} cannot be loaded: {_one_line(error)}") from error
        absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        if absent:
            raise ConfigError(f"model {folder}: {len(absent)} weights are missing from its files or of another shape, first {absent[0]}")
        model.to(device)  # type: ignore[arg-type]
        return cls(model, deterministic)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def step_bytes(self, step_tokens: int, rows: int) -> int:
        """An upper estimate of what a step of `step_tokens`, of which `rows` are sampled, needs beside weights and pool."""
        config = self._model.config.get_text_config()
        widths = 12 * int(config.hidden_size) + 3 * int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        heads = 6 * int(config.num_attention_heads) * self.kv_shape.head_dim
        sampling = 4 * rows * self.vocabulary * 4
        return step_tokens * (widths + heads) * 4 + sampling + MAX_SCORES * 4

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """Run one step: stores the rows' K and V in `pool`, returns the logits [N, V] of the batch's sampled rows."""
        plan_of = plan_split if isinstance(batch.attention, SplitBatch) else plan_masked
        plan = to_device(plan_of(batch.attention, self._row_block), self.device)  # type: ignore[arg-type]
        slots = as_run(batch.store_slots)
        step = StepAttention(pool, slots if isinstance(slots, slice) else slots.to(self.device, non_blocking=True), plan)
        return self._run(batch.token_ids, batch.positions, batch.sampled_rows, step)

    def _run(self, token_ids: Tensor, positions: Tensor, sampled_rows: Tensor, step: StepAttention | _Recorder) -> Tensor:
        ids, places, rows = (x.to(self.device, non_blocking=True) for x in (token_ids, positions, sampled_rows))
        output = self._model(input_ids=ids[None], position_ids=places[None], use_cache=False, logits_to_keep=rows, askmany=step)
        logits: Tensor = output.logits
        return logits[0]

    def _probe_ids(self) -> Tensor:
        return torch.arange(PROBE_TOKENS) * 7919 % self.vocabulary

    def _eager_logits(self) -> Tensor:
        """Logits [PROBE_TOKENS, V] of the probe prompt by Transformers' own attention."""
        try:
            self._model.set_attn_implementation("eager")
            logits: Tensor = self._model(input_ids=self._probe_ids()[None].to(self.device), use_cache=False).logits
            return logits[0]
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigError(f"model {self.name} cannot be run as a plain decoder: {_one_line(error)}") from error

    def _probe_shape(self) -> KVShape:
        recorder = _Recorder(self.context_tokens)
        rows = torch.arange(PROBE_TOKENS)
        try:
            self._run(self._probe_ids(), rows, rows[-1:], recorder)
        except (ValueError, KeyError, TypeError, RuntimeError, AssertionError, AttributeError) as error:
            raise self._refusal(f"its attention does not go through Transformers' attention interface ({_one_line(error)})") from error
        layers = int(self._model.config.get_text_config().num_hidden_layers)
        if recorder.asked:
            raise self._refusal(f"its attention asks for {', '.join(sorted(recorder.asked))}")
        if len(recorder.shapes) != layers or len(set(recorder.shapes.values())) != 1:
            raise self._refusal(f"{len(recorder.shapes)} of its {layers} layers are plain attention, with KV shapes {recorder.shapes}")
        kv_heads, head_dim = recorder.shapes[0]
        return KVShape(layers, kv_heads, head_dim, self._model.dtype)

    def _check_logits(self, expected: Tensor) -> None:
        """Our logits of the probe prompt must be the ones of Transformers' own attention."""
        logits = self._probe_logits(1)
        error = float((logits - expected).float().norm() / expected.float().norm())
        if not error <= TOLERANCE.get(self.kv_shape.dtype, 1e-3):
            raise self._refusal(f"its logits are off by {error:.2g} (relative) from its own attention's")
        if self._row_block and not torch.equal(logits, self._probe_logits(3)):
            raise self._refusal("deterministic mode does not make its logits independent of the rows around them")

    def _probe_logits(self, copies: int) -> Tensor:
        """Our logits [PROBE_TOKENS, V] of the probe prompt, the last of `copies` prompts in one step."""
        count = copies * PROBE_TOKENS
        ids, positions = self._probe_ids().repeat(copies), torch.arange(PROBE_TOKENS).repeat(copies)
        slots = torch.arange(count)
        items = tuple(PrivateItem(start, PROBE_TOKENS, slots[start : start + PROBE_TOKENS]) for start in range(0, count, PROBE_TOKENS))
        batch = StepBatch(ids, positions, slots, SplitBatch((), items), slots[-PROBE_TOKENS:], ())
        return self.forward(batch, KVPool(self.kv_shape, count, self.device))

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"model {self.name} ({self._model.config.model_type}) is not supported: {reason}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
