"""The least seconds that a decode step can take on a machine with given peaks: operation by operation, what must be moved and multiplied.

Each operation takes the longer of its bytes at full bandwidth and its floating-point operations at full speed, and they follow one another.
An operation reads its inputs once and writes its outputs once, whatever a cache might have kept. Biases, page tables and the step's indices
are left out, and the few operations of element-wise work, which its bytes outweigh: what is left out makes the floor lower, never higher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Mapping[str, Any])
WORK = "decode step"  # of a row in a benchmark's table
OVER = "floor"  # what stands there in the place of a stock backend


def apart(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """A table's rows that compare engines, and those that compare a step with its floor."""
    kept = list(rows)
    return [row for row in kept if row.get("work") != WORK], [row for row in kept if row.get("work") == WORK]


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a machine can do at best."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder's sizes: Llama's kind of layer, with a gated inner product."""

    hidden: int
    inner: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Decoder:
        """From the values of a model's config."""
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return cls(
            hidden, int(config["intermediate_size"]), int(config["num_hidden_layers"]), heads, int(config["num_key_value_heads"]),
            int(config.get("head_dim") or hidden // heads), int(config["vocab_size"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """`rows` streams, all decoding, over `documents` of `document_tokens`, as many at each. `private_tokens`: a stream's own keys on
    average, its newest included. `element_bytes`: of a weight, an activation, a key."""

    rows: int
    documents: int
    document_tokens: int
    private_tokens: float
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, run `count` times in a step; bytes and floating-point operations of one time."""

    name: str
    count: int
    bytes: float
    flops: float = 0.0

    def floor_s(self, peaks: Peaks) -> float:
        """Of all its times."""
        return self.count * max(self.bytes / peaks.bytes_per_s, self.flops / peaks.flop_per_s)


def floor_s(operations: Iterable[Operation], peaks: Peaks) -> float:
    """Of a step of these operations."""
    return sum(operation.floor_s(peaks) for operation in operations)


def operations(model: Decoder, step: DecodeStep) -> list[Operation]:
    """A whole step, from token ids to the next token ids."""
    hidden, inner, layers = model.hidden, model.inner, model.layers
    queries, keys = model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    return [
        _moves("embedding", 1, step, 2 * hidden),
        _moves("first norm", 1, step, 2 * hidden, weights=hidden),
        _product("query, key and value", layers, step, hidden, queries + 2 * keys),
        _moves("rotary", layers, step, 2 * (queries + keys) + model.head_dim),  # the row of its table has sines and cosines
        _moves("storing keys and values", layers, step, 4 * keys),
        _attention(layers, step, queries, keys),
        _product("attention's output", layers, step, queries, hidden),
        _moves("norms with the residual", 2 * layers - 1, step, 4 * hidden, weights=hidden),  # both in, both out
        _product("gate and up", layers, step, hidden, 2 * inner),
        _moves("activation", layers, step, 3 * inner),
        _product("down", layers, step, inner, hidden),
        _moves("last norm", 1, step, 3 * hidden, weights=hidden),
        _product("output layer", 1, step, hidden, model.vocabulary),
        _moves("picking tokens", 1, step, model.vocabulary),
    ]


def _moves(name: str, count: int, step: DecodeStep, elements: int, weights: int = 0) -> Operation:
    """`elements` read or written for each row, and weights read once."""
    return Operation(name, count, step.element_bytes * (step.rows * elements + weights))


def _product(name: str, count: int, step: DecodeStep, inputs: int, outputs: int) -> Operation:
    moved = step.element_bytes * (inputs * outputs + step.rows * (inputs + outputs))
    return Operation(name, count, moved, 2 * step.rows * inputs * outputs)


def _attention(count: int, step: DecodeStep, queries: int, keys: int) -> Operation:
    """The document's keys and values once a document, each stream's own once, queries in, outputs out."""
    stored = step.documents * step.document_tokens + step.rows * step.private_tokens
    moved = step.element_bytes * (2 * keys * stored + 2 * step.rows * queries)
    return Operation("attention", count, moved, 4 * step.rows * queries * (step.document_tokens + step.private_tokens))
