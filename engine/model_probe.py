"""Questions put to a model while it is loaded: what do its layers ask of attention, and are its logits right with ours?

A probe is a short prompt, run once with an attention that only takes notes, and then for real, alone and behind copies of itself. Knows no
library of models; whoever loads one turns the answers into a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from askmany.engine.batch import StepBatch
from askmany.kernels.layout import PrivateItem, SplitBatch

TOKENS = 12
COPIES = 3
MANY_COPIES = 12  # more rows than one block of a matrix product has
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the logits' norm; a wrong attention is off by O(1)
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "chunk_size", "attention_chunk_size")  # arguments, when they are not None
VARYING_ROPE = {"dynamic", "longrope"}
_WIDTHS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # of a kind of layer, in the config


@dataclass(slots=True)
class Notes:
    """An attention that notes what the layers ask for and returns zeros. A window as wide as the context is none."""

    context_tokens: int
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by layer: (KV heads, head dim)
    asked: set[str] = field(default_factory=set)  # what our attention does not do

    def note_arguments(self, arguments: Mapping[str, Any]) -> None:
        """What a layer hands to its attention beside q, k and v."""
        self.asked.update(name for name in UNSUPPORTED if arguments.get(name) is not None)
        self._note_width("sliding_attention", arguments.get("sliding_window"))

    def note_config(self, config: Any) -> None:
        """Kinds of layer that the config names and whose masks our attention does not make; rotary tables that change with the batch."""
        kinds = _values_of(getattr(config, "rope_parameters", None) or {}, "rope_type")
        self.asked.update(f"rope type {kind}, whose angles depend on the longest text in a step" for kind in kinds & VARYING_ROPE)
        for kind in set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
            if kind in _WIDTHS:
                self._note_width(kind, getattr(config, _WIDTHS[kind], None))
            else:
                self.asked.add(str(kind))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `StepAttention.attend`."""
        if k.shape != v.shape:
            self.asked.add(f"keys {tuple(k.shape[1:])} and values {tuple(v.shape[1:])} of different shapes")
        self.shapes[layer] = tuple(k.shape[1:])
        return torch.zeros_like(q)

    def complaint(self, layers: int) -> str | None:
        """Why a model of so many layers cannot be run, in a phrase; None if it can."""
        if self.asked:
            return f"its attention asks for {', '.join(sorted(self.asked))}"
        if len(self.shapes) != layers:
            return f"{len(self.shapes)} of its {layers} layers are plain attention"
        if len(set(self.shapes.values())) != 1:
            return f"its layers differ in (KV heads, head dim): {sorted(set(self.shapes.values()))}"
        return None

    def _note_width(self, kind: str, tokens: int | None) -> None:
        if tokens is not None and tokens < self.context_tokens:
            self.asked.add(f"{kind} over {tokens} tokens (the context is {self.context_tokens})")


class OwnValues:
    """An attention in which a row sees itself alone: whatever logits then depend on, it is not attention."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `StepAttention.attend`."""
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def experts(config: Any) -> int:
    """Experts that a layer of the model chooses from, by its config; 0 where layers are dense."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max(int(getattr(config, name, None) or 0) for name in names)


def rows_complaint(few: Sequence[Tensor], copies: Tensor) -> str | None:
    """What is wrong with the logits of `OwnValues`: `copies` [N * TOKENS, V] of probes side by side, `few` those of fewer of these rows."""
    parts = torch.split(copies, TOKENS)
    same = all(torch.equal(part, parts[0]) for part in parts) and all(torch.equal(logits, copies[: len(logits)]) for logits in few)
    return None if same else "deterministic mode does not make its logits independent of the rows around them"


def _values_of(tree: Mapping[str, Any], key: str) -> set[str]:
    """Every value under `key` in nested dicts."""
    below = [_values_of(value, key) for value in tree.values() if isinstance(value, Mapping)]
    return {str(tree[key])}.union(*below) if key in tree else set().union(*below)


def probe_ids(vocabulary: int) -> Tensor:
    """[TOKENS] int64, spread over the vocabulary."""
    return torch.arange(TOKENS) * 7919 % vocabulary


def probe_batch(vocabulary: int, copies: int) -> StepBatch:
    """A step of `copies` probes side by side, each over slots of its own; the logits of the last are asked for."""
    slots = torch.arange(copies * TOKENS)
    items = tuple(PrivateItem(int(own[0]), TOKENS, own) for own in torch.split(slots, TOKENS))
    return StepBatch(
        token_ids=probe_ids(vocabulary).repeat(copies),
        positions=torch.arange(TOKENS).repeat(copies),
        store_slots=slots,
        attention=SplitBatch((), items),
        sampled_rows=slots[-TOKENS:],
        sampled_streams=(),
    )


def logits_complaint(expected: Tensor, alone: Tensor, among_copies: Tensor, dtype: torch.dtype, deterministic: bool) -> str | None:
    """What is wrong with the probe's logits [TOKENS, V] beside the ones of the model's own attention; None if nothing is. `dtype`: that
    of the activations, whatever the logits come in."""
    for logits in (alone, among_copies):
        error = float((logits - expected).float().norm() / expected.float().norm())
        if not error <= TOLERANCE.get(dtype, 1e-3):
            return f"its logits are off by {error:.2g} (relative) from its own attention's"
    if deterministic and not torch.equal(alone, among_copies):
        return "deterministic mode does not make its logits independent of the rows around them"
    return None
