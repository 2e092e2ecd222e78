"""Matrix products and reductions whose bits for a row are the row's own, however many rows ride along: for deterministic mode.

A library picks its kernel by the shape of a product, so a row's last bits change with the row count. Inside an `InvariantRows` every
product of rows with a matrix is computed in blocks of exactly `BLOCK` rows (zeros fill the last), so that the library sees one shape a
weight; reductions along a row likewise, in blocks of `REDUCED` rows. Whether a block's kernel treats all its rows alike is not known but
tried (`invariant_check`); where it does not, the weight's products have a fixed order of their own.

What a forward pass does besides needs no such care on a GPU, and stays as it is:
- fused norms (SGLang's, FlashInfer's): one program a row, whose size depends on the row's width and dtype alone. SGLang's own
  batch-invariant mode would take them apart into a dozen launches; it is never switched on, being a switch of the whole process.
- activations, rotary embeddings, residual sums, casts: every element is computed by itself, by the same instructions wherever it lies.
- this project's kernels (attention by pinned chunks, store, merge, the likeliest token): sizes by the model's shape, not by a step's.

The mode is one of PyTorch's dispatch, of the thread that entered it and for as long: eager passes and captures of graphs alike. A product
inside an operation that PyTorch shows as one (a grouped product) cannot be seen; the known ones are refused.

Letters: T rows, K wide, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 128  # rows of a product
REDUCED = 32  # rows of a reduction: rows are wide where they are few (logits)
ALIGNMENT = 256  # bytes; libraries look at how their operands lie, too
REFUSED = frozenset({"aten::_grouped_mm", "aten::_scaled_mm", "aten::linear.out", "aten::matmul.out", "sglang::bf16_gemm_dispatch"})

aten = torch.ops.aten
Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""From rows [M, K], weight [K, N] and bias [N] or None to out [M, N], which is filled."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What a library may choose its kernel by, the row count aside."""

    k: int
    n: int
    strides: tuple[int, ...]  # of the weight [K, N]
    dtype: torch.dtype
    out_dtype: torch.dtype
    biased: bool


@dataclass(frozen=True, slots=True)
class Product:
    """`x` [..., K] times `weight` [K, N], plus `bias` [N], in `dtype` (None: that of `x`)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> ProductShape:
        k, n = self.weight.shape
        return ProductShape(k, n, self.weight.stride(), self.x.dtype, self.out_dtype, self.bias is not None)

    @property
    def out_dtype(self) -> torch.dtype:
        return self.dtype or self.x.dtype


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """A `Multiply`: the library's."""
    if bias is not None:
        torch.addmm(bias, rows, weight, out=out)
    elif out.dtype != rows.dtype:
        torch.mm(rows, weight, out_dtype=out.dtype, out=out)
    else:
        torch.mm(rows, weight, out=out)


def multiply_in_order(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """A `Multiply` that is invariant by construction, and slow: on a GPU one kernel with fixed tiles; on a CPU every row alone."""
    if rows.is_cuda:
        from askmany.kernels.ordered import ordered_product  # Triton is there only where a GPU is

        ordered_product(rows, weight, bias, out)
        return
    for row in range(len(rows)):
        multiply(rows[row : row + 1], weight, bias, out[row : row + 1])


class InvariantRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered around a forward pass, any number of times, but not within itself. `slow` holds the shapes that `in_order` computes."""

    def __init__(self, by_library: Multiply = multiply, in_order: Multiply = multiply_in_order) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_library, self.in_order = by_library, in_order
        self.slow: set[ProductShape] = set()
        self._met: dict[ProductShape, Product] | None = None

    @contextmanager
    def meeting(self) -> Iterator[dict[ProductShape, Product]]:
        """Within, the first product of each shape that the mode computes is noted."""
        met: dict[ProductShape, Product] = {}
        self._met = met
        try:
            yield met
        finally:
            self._met = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        named = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            done = rule(self, func, args, named)
            if done is not None:
                return done
        elif func.name() in REFUSED:
            raise RuntimeError(f"deterministic mode has no rule for {func.name()}")
        return func(*args, **named)

    def product(self, asked: Product) -> Tensor:
        """[..., N], in memory of its own. A row's bits do not depend on the other rows."""
        shape = asked.shape
        if self._met is not None:
            self._met.setdefault(shape, asked)
        rows = _dense(asked.x.reshape(-1, shape.k))
        if shape in self.slow:
            out = rows.new_empty(len(rows), shape.n, dtype=shape.out_dtype)
            self.in_order(rows, asked.weight, asked.bias, out)
        else:
            out = multiply_in_blocks(self.by_library, rows, asked.weight, asked.bias, shape.out_dtype)
        return out.view(*asked.x.shape[:-1], shape.n)


def multiply_in_blocks(by: Multiply, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[T, N] in `dtype` from dense `rows` [T, K], BLOCK at a time; the first rows of whole blocks."""
    count = len(rows)
    out = rows.new_empty(whole_blocks(count), weight.shape[1], dtype=dtype)
    for start in range(0, count, BLOCK):
        block = rows[start : start + BLOCK]
        by(block if len(block) == BLOCK else _filled(block, BLOCK), weight, bias, out[start : start + BLOCK])
    return out[:count]


def whole_blocks(rows: int) -> int:
    """`rows`, rounded up to whole blocks."""
    return -(-rows // BLOCK) * BLOCK


def in_blocks(apply: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """`apply`, which maps each row by itself, over `rows` [T, ...] in blocks of exactly `size`; zeros fill the last."""
    filled = _filled(rows, -(-len(rows) // size) * size)
    return torch.cat([apply(block) for block in torch.split(filled, size)])[: len(rows)]


def _dense(rows: Tensor) -> Tensor:
    """The same rows, lying as memory of their own would."""
    return rows if rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0 else rows.clone(memory_format=torch.contiguous_format)


def _filled(rows: Tensor, count: int) -> Tensor:
    filled = rows.new_zeros(count, *rows.shape[1:])
    filled[: len(rows)] = rows
    return filled


def _linear(mode: InvariantRows, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    x, weight, bias = (*args, None)[:3]
    return mode.product(Product(x, weight.t(), named.get("bias", bias))) if weight.ndim == 2 else None


def _matmul(mode: InvariantRows, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """`mm` as well. Products of batches of matrices are attention's, and left alone."""
    x, weight = args[:2]
    if weight.ndim != 2:
        return None
    done = mode.product(Product(x, weight, dtype=args[2] if len(args) > 2 else named.get("out_dtype")))
    return _into(named.get("out"), done)


def _addmm(mode: InvariantRows, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    added, x, weight = args
    plain = named.get("beta", 1) == named.get("alpha", 1) == 1
    if added.ndim == 1 and plain:
        return _into(named.get("out"), mode.product(Product(x, weight, added)))
    done = mode.product(Product(x, weight))
    return _into(named.get("out"), done.add_(added) if plain else done * named.get("alpha", 1) + added * named.get("beta", 1))


def _into(out: Tensor | None, done: Tensor) -> Tensor:
    return done if out is None else out.copy_(done)


def _along_rows(places: int, mode: InvariantRows, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """A reduction or scan along the last dimension, `args[1]`, of which every row is computed by itself. `places`: arguments before its
    own options."""
    x, dims = args[0], args[1] if len(args) > 1 else named.get("dim")
    (dim,) = dims if isinstance(dims, (list, tuple)) and len(dims) == 1 else (dims,)
    if not isinstance(dim, int) or dim % max(1, x.ndim) != x.ndim - 1 or x.ndim < 2 or not x.numel():
        return None
    rows, along = x.reshape(-1, x.shape[-1]), [1] if isinstance(dims, (list, tuple)) else 1
    options = {name: value for name, value in named.items() if name != "dim"}
    done = in_blocks(lambda block: func(block, along, *args[places:], **options), rows, REDUCED)
    return done.reshape(*x.shape[:-1], *done.shape[1:])


_RULES: Mapping[Any, Callable[[InvariantRows, Any, Sequence[Any], Mapping[str, Any]], Tensor | None]] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    **{getattr(aten.mm, name): _matmul for name in aten.mm.overloads()},  # type: ignore[no-untyped-call]
    aten.addmm.default: _addmm,
    aten.addmm.out: _addmm,
    **{
        op: partial(_along_rows, 2)
        for op in (aten.mean.dim, aten.sum.dim_IntList, aten.logsumexp.default, aten.cumsum.default, aten.log_softmax.int, aten.softmax.int)
    },
}
