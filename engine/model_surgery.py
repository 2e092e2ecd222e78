"""What is changed in a loaded model, module by module, before it runs: the layout of its weights, and its row blocks.

Knows nothing of attention, steps or Transformers; works on any tree of PyTorch modules.

*Weight layout*: a CPU matrix product of a few dozen rows is 1.3 to 1.7 times as fast when the weight lies [in, out] in memory, because the
library then packs it without transposing. Shapes and values stay; a weight that other modules share stays as it is.

*Row blocks* (deterministic mode): bits of a matrix product depend on its row count, so a stream's logits would change in the last bit when
siblings come and go. Inside a block of fixed size they depend on the row's own values alone, not on its place nor on its neighbours
(measured for fp32 on x86, one thread and several). Activations need more care on a CPU: a vector loop and its scalar remainder round `exp`
differently, so they run row by row. Costs the rows that padding adds, and a Python loop an activation. Attention has blocks of its own
(`kernels/passes`).
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn

from askmany.engine.invariant_rows import in_blocks

ROWS = 32


def lay_out_weights(model: nn.Module) -> None:
    """Store every linear layer's weight [out, in] column by column, in place.

    The other weights are copied too, so that a weight file that was mapped into memory is let go and does not stay there a second time.
    """
    holders = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for parameter in model.parameters():
        alone = id(parameter) in linear and holders[id(parameter)] == 1
        parameter.data = parameter.data.t().contiguous().t() if alone else parameter.data.clone()


class RowBlocks(nn.Module):
    """`inner`, which maps each row of the last dimension by itself, run in blocks of exactly `rows` rows (zeros fill the last)."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner = inner
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [N, in]
        done = in_blocks(self.inner, flat, self.rows)
        return done.view(*x.shape[:-1], done.shape[1])


def in_row_blocks(model: nn.Module) -> None:
    """Wrap, in place, every leaf module of `model` that transforms rows; embeddings, rotary tables and dropout stay as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            rows = _rows_of(name, child)
            if rows is not None and not isinstance(parent, RowBlocks):
                setattr(parent, name, RowBlocks(child, rows))


def _rows_of(name: str, module: nn.Module) -> int | None:
    if any(True for _ in module.children()) or isinstance(module, (nn.Embedding, nn.Dropout, nn.Identity)) or "rotary" in name:
        return None
    return ROWS if any(True for _ in module.parameters()) else 1
