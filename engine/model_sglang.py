"""Any decoder that SGLang has a class for, with our attention: SGLang's layers compute, our pool keeps K and V, our passes attend.

SGLang publishes the attention backend of a forward pass in a context; ours stands there for the pass and knows the step. SGLang never sees
a KV pool, a request or a schedule. A model whose attention ours does not implement (windows, soft caps, sinks, latent attention, ...) is
refused when it is loaded, by what its layers say of themselves and by a probe of every layer.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from askmany.engine import model_probe
from askmany.engine.batch import StepBatch
from askmany.engine.errors import ConfigError, EngineError
from askmany.engine.invariant_check import settle_products
from askmany.engine.invariant_rows import InvariantRows, whole_blocks
from askmany.engine.kv_pool import KVPool, KVShape
from askmany.engine.memory import step_bytes
from askmany.engine.model import StepRows
from askmany.engine.model_surgery import ROWS
from askmany.engine.sglang_compat import HandedBack, HostedModel, LoadFormat, capture_scope, decode_batch, extend_batch, installed_release
from askmany.engine.sglang_layers import unsupported
from askmany.engine.sglang_rotary import OwnRotary, Turned, own_rotary
from askmany.engine.step_attention import LayerAttention, StepAttention
from askmany.kernels.rotary import Rotary

logger = logging.getLogger(__name__)


class _NoPool:
    """What SGLang finds where it looks for its KV pool: nothing that a layer could write to by itself."""

    dtype = None


class StreamBackend:
    """Stands where SGLang's attention backend would: hands every layer's q, k, v to the step's attention."""

    token_to_kv_pool = _NoPool()
    req_to_token_pool = None

    def __init__(self, attention: LayerAttention) -> None:
        self._attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any) -> Tensor:
        """SGLang's signature: `q` [T, HQ * D], `k`, `v` [T, HKV, D]; returns [T, HQ * D]. Raises RuntimeError on what is not ours."""
        asked = [name for name, value in more.items() if value is not None]
        if asked or k is None or not save_kv_cache:
            raise RuntimeError(f"layer {layer.layer_id} asks for {', '.join(asked) or 'keys that it stores itself'}")
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        out = self._attention.attend(layer.layer_id, q.view(-1, heads, dim), k, v, layer.scaling)
        return out.reshape(-1, heads * dim)

    def get_fused_kv_write_buffers(self, layer: Any, batch: Any) -> None:
        """No buffers that a layer may fill by itself (asked by 0.5.23)."""


@dataclass(slots=True)
class _Lone:
    """The probe's reference: dense causal attention over the step's own rows, no pool. Notes which layers called."""

    layers: list[int] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.layers.append(layer)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)


class SglangModel:
    """A loaded decoder: `forward` a step over a KV pool of `kv_shape`."""

    def __init__(
        self, hosted: HostedModel, name: str, device: torch.device, context_tokens: int | None = None, deterministic: bool = False
    ) -> None:
        """`context_tokens`: the longest text it will be given (default: the model's own limit). `deterministic`: `hosted` was made
        `invariant`, and every row's bits shall be its own.

        Raises ConfigError if the model's attention is not ours, or if its rows are not by themselves.
        """
        self._alone = InvariantRows() if deterministic else None
        self._hosted = hosted
        self.name = name
        self.device = device
        self.vocabulary = int(hosted.config.vocab_size)
        self.context_tokens = min(context_tokens or int(hosted.config.context_len), int(hosted.config.context_len))
        self.kv_shape = self._shape()
        with torch.inference_mode():
            self._settle_rows()
            expected = self._check_logits()
            self._own_rotary = self._left_rotary(expected)
            self._leave_logits(expected)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        context_tokens: int | None = None,
        load_format: LoadFormat = "auto",
        deterministic: bool = False,
    ) -> SglangModel:
        """Load a folder of config and weights. `dtype` None keeps the checkpoint's; `load_format` dummy reads no weights; `deterministic`
        makes every row's bits its own (on a CPU for small layers alone: a large activation's elements are shared out to threads).

        Raises ConfigError in one line. A process holds one model of SGLang's at a time: `close` the one before.
        """
        if installed_release() is None:
            raise ConfigError("engine.backend sglang: the package sglang is not installed")
        named = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        try:
            hosted = HostedModel(folder, device, named, load_format, deterministic)
        except Exception as error:  # files of strangers, read by several libraries: any error means that they cannot be loaded
            raise ConfigError(f"model {folder} cannot be loaded by sglang {installed_release()}: {_one_line(error)}") from error
        try:
            return cls(hosted, str(folder), device, context_tokens, deterministic)
        except BaseException:
            hosted.close()
            raise

    def close(self) -> None:
        """Free what SGLang holds in this process beside the weights."""
        self._hosted.close()

    @property
    def q_heads(self) -> int:
        """Query heads of a layer."""
        return int(self._hosted.config.hf_text_config.num_attention_heads)

    @property
    def rotary(self) -> Rotary | None:
        """See `RowModel`."""
        return None if self._own_rotary is None else self._own_rotary.rotary

    def step_bytes(self, step_tokens: int, rows: int) -> int:
        """An upper estimate of what a step of `step_tokens`, of which `rows` are sampled, needs beside weights and pool."""
        counts = (step_tokens, rows) if self._alone is None else (whole_blocks(step_tokens), whole_blocks(rows))
        return step_bytes(self._hosted.config.hf_text_config, self.kv_shape.head_dim, self.vocabulary, *counts)

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """Run one step: stores the rows' K and V in `pool`, returns the logits [N, V] of the batch's sampled rows, in their order.

        Raises EngineError when a position lies beyond the context.
        """
        last = int(batch.positions.max())
        if last >= self.context_tokens:
            raise EngineError(f"model {self.name}: position {last} lies beyond its context of {self.context_tokens} tokens")
        return self._run(batch, StepAttention.of(batch, pool, self.device, None if self._alone is None else ROWS))

    def run_rows(self, rows: StepRows, attention: LayerAttention) -> Tensor:
        """Logits [W, V] of the wanted rows; nothing of it waits for the device. Positions must lie in the context."""
        at = (rows.token_ids, rows.positions, rows.slots)
        batch = decode_batch(*at) if rows.wanted is None else extend_batch(*at, rows.wanted.lengths)
        with self._unrotated(rows.unrotated):
            return self._pass(StreamBackend(attention), batch)

    def capture_scope(self) -> AbstractContextManager[None]:
        """SGLang's own, in which its layers avoid what cannot be captured."""
        return capture_scope()

    def _run(self, batch: StepBatch, attention: LayerAttention) -> Tensor:
        backend = StreamBackend(attention)
        ids, positions, slots = (x.to(self.device, non_blocking=True) for x in (batch.token_ids, batch.positions, batch.store_slots))
        wanted = batch.sampled_rows
        if len(wanted) == len(ids) and bool((wanted == torch.arange(len(wanted))).all()):
            return self._pass(backend, decode_batch(ids, positions, slots))
        ordered, order = torch.sort(wanted)
        runs = run_lengths(ordered, len(ids))
        logits = self._pass(backend, extend_batch(ids, positions, slots, runs.to(self.device, non_blocking=True)))
        return logits[torch.argsort(order).to(self.device, non_blocking=True)]

    def _pass(self, backend: StreamBackend, batch: Any) -> Tensor:
        with self._alone or nullcontext():
            return self._hosted.run(backend, batch)

    def _settle_rows(self) -> None:
        """In deterministic mode: try its products on this machine, then the whole forward pass but attention, in few and many rows."""
        if self._alone is None:
            return
        if model_probe.experts(self._hosted.config.hf_text_config):
            raise self._refusal("its experts do not run with deterministic mode")
        settle_products(self._alone, lambda: self._lone_rows(model_probe.TOKENS), self.name)
        most = model_probe.MANY_COPIES * model_probe.TOKENS
        if complaint := model_probe.rows_complaint([self._lone_rows(rows) for rows in (1, model_probe.TOKENS)], self._lone_rows(most)):
            raise self._refusal(complaint)

    def _lone_rows(self, count: int) -> Tensor:
        """Logits [count, V] of the first rows of many probes, each row by itself."""
        batch = model_probe.probe_batch(self.vocabulary, model_probe.MANY_COPIES)
        ids, positions, slots = (x[:count] for x in (batch.token_ids, batch.positions, batch.store_slots))
        rows = replace(batch, token_ids=ids, positions=positions, store_slots=slots, sampled_rows=torch.arange(count))
        return self._probed(rows, model_probe.OwnValues()).clone()

    def _shape(self) -> KVShape:
        hosted = self._hosted
        if not type(hosted.model).__module__.startswith("sglang.srt.models.") or "Transformers" in type(hosted.model).__name__:
            raise self._refusal("SGLang has no class of its own for it")
        if hosted.rope_rows is not None and hosted.rope_rows < self.context_tokens:
            raise self._refusal(f"its rotary tables have {hosted.rope_rows} rows for a context of {self.context_tokens} tokens")
        count = int(hosted.config.num_hidden_layers)
        notes = model_probe.Notes(self.context_tokens)
        notes.note_config(hosted.config.hf_text_config)
        notes.asked.update(unsupported(hosted.attention_layers, hosted.config.hf_text_config, self.context_tokens))
        if not notes.asked:
            with torch.inference_mode():
                self._probed(model_probe.probe_batch(self.vocabulary, 1), notes)
        if complaint := notes.complaint(count):
            raise self._refusal(complaint)
        kv_heads, head_dim = notes.shapes[0]
        return KVShape(count, kv_heads, head_dim, hosted.dtype)

    def _unrotated(self, wanted: bool) -> AbstractContextManager[object]:
        if not wanted:
            return nullcontext()
        if self._own_rotary is None:
            raise RuntimeError(f"model {self.name} turns queries and keys by itself")
        return self._hosted.unrotated(self._own_rotary.module)

    def _left_rotary(self, expected: Tensor) -> OwnRotary | None:
        """What its layers can leave to our attention, every layer once and with the probe's logits `expected` [TOKENS, V] unchanged."""
        own = own_rotary(self._hosted, self.kv_shape, self.q_heads)
        reason = "it has no rotary embedding of the plain kind" if own is None else self._rotary_complaint(own, expected)
        if reason:
            logger.info("model %s: SGLang turns queries and keys: %s", self.name, reason)
            return None
        return own

    def _rotary_complaint(self, own: OwnRotary, expected: Tensor) -> str | None:
        """Why its layers cannot leave their rotary embedding to our attention; None if they can."""
        batch, kept = model_probe.probe_batch(self.vocabulary, 1), list[HandedBack]()
        turned = Turned(own.rotary, batch.positions.to(self.device), _Lone(), kept)
        try:
            with self._hosted.unrotated(own.module, kept):
                logits = self._run(batch, turned)
        except Exception as error:  # of strangers' layers, asked for what they may not do: SGLang then turns by itself
            return _one_line(error)
        if turned.layers != list(range(self.kv_shape.layers)):
            return f"a forward pass attends in the layers {turned.layers}"
        return model_probe.logits_complaint(expected, logits, logits, self._hosted.dtype, False)

    def _leave_logits(self, expected: Tensor) -> None:
        """Save the widening of logits, if the probe's stay what they are to the last bit."""
        undo = self._hosted.leave_logits_in_their_dtype()
        if undo is None:
            return
        try:
            right = torch.equal(self._run(model_probe.probe_batch(self.vocabulary, 1), _Lone()).to(expected.dtype), expected)
        except Exception:  # of strangers' code: SGLang then widens them as ever
            right = False
        if not right:
            logger.info("model %s: SGLang widens logits, since they would not be the same without", self.name)
            undo()

    def _check_logits(self) -> Tensor:
        """Every layer must attend once, in order, and the logits through the pool must be those of plain causal attention: [TOKENS, V]."""
        lone = _Lone()
        expected = self._probed(model_probe.probe_batch(self.vocabulary, 1), lone).clone()
        if lone.layers != list(range(self.kv_shape.layers)):
            raise self._refusal(f"a forward pass attends in the layers {lone.layers}")
        pool = KVPool(self.kv_shape, model_probe.COPIES * model_probe.TOKENS, self.device)
        batches = [model_probe.probe_batch(self.vocabulary, copies) for copies in (1, model_probe.COPIES)]
        alone, among_copies = (self._probed(batch, StepAttention.of(batch, pool, self.device, None)).clone() for batch in batches)
        if complaint := model_probe.logits_complaint(expected, alone, among_copies, self._hosted.dtype, False):
            raise self._refusal(complaint)
        return expected

    def _probed(self, batch: StepBatch, attention: LayerAttention) -> Tensor:
        try:
            return self._run(batch, attention)
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            raise self._refusal(f"its layers do not run with this attention ({_one_line(error)})") from error

    def _refusal(self, reason: str) -> ConfigError:
        architecture = type(self._hosted.model).__name__
        return ConfigError(f"model {self.name} ({architecture}) is not supported on sglang {installed_release()}: {reason}")


def run_lengths(rows: Tensor, count: int) -> Tensor:
    """Lengths [N or N + 1] int32 of consecutive runs over `count` rows that end at each of `rows` (ascending); the last takes the rest."""
    ends = torch.cat([rows + 1, torch.tensor([count])])
    lengths = torch.diff(ends, prepend=torch.tensor([0]))
    return (lengths if int(lengths[-1]) else lengths[:-1]).to(torch.int32)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
