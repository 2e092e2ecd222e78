"""What every attention operation of askmany means: plain PyTorch, slow and obvious, in fp32 or fp64.

Letters: T rows of the step, R rows of an item, L keys of an item, S slots, HQ and HKV query and KV heads (HQ a multiple of HKV; query
head h reads KV head h // (HQ // HKV)), D head dim. Log-sum-exp is natural, -inf for a row that saw no key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.kernels.layout import MaskedBatch, SplitBatch


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of `q` [R, HQ, D] over `k`, `v` [L, HKV, D]; `visible` [R, L] bool (None: all).

    Returns the output [R, HQ, D] and log-sum-exp [R, HQ] in the wider of fp32 and the input's dtype; rows without a visible key are 0
    and -inf. A hidden key contributes nothing whatever its value, NaN included.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # [L, HQ, D]
    v = v.repeat_interleave(groups, dim=1)  # [L, HQ, D]
    scores = torch.einsum("rhd,lhd->rhl", q, k) * scale  # [R, HQ, L]
    if visible is None:
        visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    hidden = ~visible[:, None, :]  # [R, 1, L]
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if k.shape[0] else scores.new_full(scores.shape[:2], float("-inf"))
    weights = torch.exp(scores - lse[..., None]).masked_fill(hidden | torch.isinf(lse)[..., None], 0.0)
    seen = visible.any(dim=0)  # [L]: a key that no row sees may hold NaN, and 0 * NaN is NaN
    return torch.einsum("rhl,lhd->rhd", weights, v.masked_fill(~seen[:, None, None], 0.0)), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets from the attention over each: outputs [R, HQ, D], lse [R, HQ]."""
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    weight_a, weight_b = torch.exp(lse_a - safe), torch.exp(lse_b - safe)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


def causal(row_count: int, key_count: int, device: torch.device | None = None) -> Tensor:
    """[R, L] bool: row i sees the first key_count - row_count + i + 1 keys."""
    rows = torch.arange(row_count, device=device)[:, None]
    keys = torch.arange(key_count, device=device)[None, :]
    return keys <= rows + (key_count - row_count)


def split_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: SplitBatch, scale: float) -> tuple[Tensor, Tensor]:
    """The split layout: `q` [T, HQ, D] over caches [S, HKV, D]; the step's own K and V are already stored.

    Returns output [T, HQ, D] and log-sum-exp [T, HQ]. Rows of no item are 0 and -inf.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    for item in batch.private:
        rows = torch.arange(item.row_start, item.row_start + item.row_count, device=q.device)
        visible = causal(item.row_count, item.slots.shape[0], q.device)
        part = attend(q[rows], k_cache[item.slots], v_cache[item.slots], scale, visible)
        out[rows], lse[rows] = merge(out[rows], lse[rows], *part)
    for shared in batch.shared:
        part = attend(q[shared.rows], k_cache[shared.slots], v_cache[shared.slots], scale)
        out[shared.rows], lse[shared.rows] = merge(out[shared.rows], lse[shared.rows], *part)
    return out, lse


def masked_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: MaskedBatch, scale: float) -> tuple[Tensor, Tensor]:
    """The interleaved layout: a key is visible iff causal and (`slot_sid` == -1 or `slot_sid` == `q_sid`). Shapes as above."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    for item in batch.items:
        rows = torch.arange(item.row_start, item.row_start + item.row_count, device=q.device)
        key_sid = batch.slot_sid[item.slots][None, :]  # [1, L]
        allowed = (key_sid == -1) | (key_sid == batch.q_sid[rows][:, None])  # [R, L]
        visible = causal(item.row_count, item.slots.shape[0], q.device) & allowed
        out[rows], lse[rows] = attend(q[rows], k_cache[item.slots], v_cache[item.slots], scale, visible)
    return out, lse
