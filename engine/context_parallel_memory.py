"""What one rank of a context-parallel group holds for a moment beside weights, pool and activations: messages on their way.

Arithmetic; allocates nothing.
"""

from __future__ import annotations

from askmany.engine.kv_pool import KVShape
from askmany.kernels.ring_choice import MOST_GATHERED_BYTES

BLOCKS_IN_FLIGHT = 2  # of the ring of pass-KV: one is attended to, one arrives


def block_bytes(kv: KVShape, ranks: int) -> int:
    """For each token of the rank's pool: one layer's keys and values in the blocks that arrive from other ranks (pass-KV)."""
    return min(BLOCKS_IN_FLIGHT, ranks - 1) * -(-kv.token_bytes // kv.layers)


def message_bytes(q_heads: int, head_dim: int, step_tokens: int) -> int:
    """For a step over all ranks: what is gathered at once, and the partial results of pass-Q that go home and come home (fp32, with their
    log-sum-exps and ids)."""
    return MOST_GATHERED_BYTES + 2 * 4 * step_tokens * (q_heads * (head_dim + 1) + 1)
