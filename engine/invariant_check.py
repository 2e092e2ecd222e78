"""Whether a model's products are what `invariant_rows` hopes for on this machine: tried at load, shape by shape.

A block of random rows is multiplied again with its rows in other places and in other company; a kernel that splits the inner dimension
differently from tile to tile gives other bits then. Some ten products a shape, each once a load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from askmany.engine.invariant_rows import BLOCK, InvariantRows, Multiply, Product

logger = logging.getLogger(__name__)
SHIFTS = (1, 5, 16, 37, 64, 100)  # rows by which a block is moved: within tiles of any size, and across their borders


def settle_products(mode: InvariantRows, forward: Callable[[], object], name: str) -> None:
    """Have `mode` compute in a fixed order what the library does not compute invariantly of the products that `forward` asks for, which
    enters it. Logs the shapes once, under the model's `name`."""
    with mode.meeting() as met:
        forward()
    found = {shape for shape, product in met.items() if not is_invariant(mode.by_library, product)}
    if found:
        shapes = ", ".join(f"{shape.k} x {shape.n}" for shape in sorted(found, key=lambda shape: (shape.k, shape.n, shape.biased)))
        logger.warning(
            "model %s: products by %s are computed in a slower, fixed order: this machine's library moves their bits", name, shapes
        )
    mode.slow |= found


def is_invariant(by: Multiply, product: Product) -> bool:
    """Whether a row of a block has the same bits in every place and company that is tried."""
    k, device = product.shape.k, product.x.device
    generator = torch.Generator(device).manual_seed(0)
    rows, others = torch.randn(2, BLOCK, k, generator=generator, device=device).to(product.x.dtype)

    def multiplied(block: Tensor) -> Tensor:
        out = block.new_empty(BLOCK, product.shape.n, dtype=product.out_dtype)
        by(block.contiguous(), product.weight, product.bias, out)
        return out

    want = multiplied(rows)
    return all(torch.equal(multiplied(block)[kept], want[own]) for block, kept, own in _moved(rows, others))


def _moved(rows: Tensor, others: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks [BLOCK, K] that hold some of `rows`: in `kept`, the rows `own` of the first."""
    device = rows.device
    places = torch.arange(BLOCK, device=device)
    mixed = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(0)).to(device)
    for order in (*(places.roll(shift) for shift in SHIFTS), places.flip(0), mixed):
        yield rows[order], places, order
    odd = places[1::2]
    for company in (others, torch.zeros_like(others)):
        block = company.clone()
        block[odd] = rows[mixed[odd]]
        yield block, odd, mixed[odd]
