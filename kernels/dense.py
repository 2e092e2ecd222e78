"""Plain attention with its log-sum-exp: the one primitive under the passes of `torch_attention`, on any device.

Knows nothing of slots, items or streams: it gets tensors (views are welcome, nothing is copied for being strided) and returns the output
with the log-sum-exp that lets partial results be merged. On a CPU it is PyTorch's tiled kernel, which never holds a score matrix; elsewhere
two matrix products over blocks of rows, so that scores stay under a bound.
Letters: B batch, H heads, M query rows, L keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SCORES = 1 << 26  # elements of the score block that the general path may hold at once (256 MB in fp32)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of `q` [B, H, M, D] over `k`, `v` [B, H, L, D], L >= 1; B and H of the keys may be expanded (stride 0).

    `visible` [B or 1, 1, M, L] bool hides keys from rows (every row must see one); `causal`, which needs L == M, hides the keys after the
    row's own. Returns the output [B, H, M, D] in `q`'s dtype or fp32 and the natural log-sum-exp [B, H, M] in fp32 (fp64 for fp64 inputs).
    """
    if q.device.type == "cpu":
        mask = None if visible is None else torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    return _blocked(q, k, v, scale, visible, causal)


def _blocked(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """The general path: row blocks small enough that B * H * rows * L scores fit in `MAX_SCORES`."""
    batch, heads, rows, _ = q.shape
    step = max(1, MAX_SCORES // (batch * heads * k.shape[2]))
    parts = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        hidden = None if visible is None else ~visible[:, :, start:stop]
        if causal:
            keys = torch.arange(k.shape[2], device=q.device)
            hidden = keys > torch.arange(start, stop, device=q.device)[:, None]  # [rows, L]
        parts.append(_products(q[:, :, start:stop], k, v, scale, hidden))
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q * scale, k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))  # [B, H, M, L]
    if hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores.sub_(lse[..., None])).to(v.dtype), v), lse
