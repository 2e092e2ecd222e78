"""How much memory a device has left, and how large a KV pool fits into it.

Refuses what cannot fit with the numbers, before weights are loaded or the pool is made. On a CPU the free memory is the machine's or the
container's, whichever is less.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from askmany.engine.errors import ConfigError
from askmany.kernels.dense import MAX_SCORES

POOL_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of what is free once the weights are in and a step's work is set aside
USEFUL_CONTEXTS = 4  # on a CPU, whose memory others want too, `auto` stops at so many whole contexts ...
USEFUL_TOKENS = 32_768  # ... or at this, whichever is more
_CGROUPS = (  # (limit, use) of a container, version 2 and 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """What the size of a KV pool depends on. `step_bytes`: what one step's work may take beside the pool."""

    model: str
    token_bytes: int
    page_size: int
    context_tokens: int  # the longest prompt with its answer
    step_bytes: int


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [_available_bytes()]
    for limit_file, use_file in _CGROUPS:
        limit, use = _number(limit_file), _number(use_file)
        if limit is not None and use is not None:
            free.append(max(0, limit - use))
    return min(free)


def step_bytes(config: Any, head_dim: int, vocabulary: int, step_tokens: int, rows: int) -> int:
    """An upper estimate of what a step of `step_tokens`, of which `rows` are sampled, needs beside weights and pool.

    `config`: the decoder's own (`hidden_size`, `num_attention_heads`, ...).
    """
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(config.num_attention_heads) * head_dim
    return 4 * (step_tokens * (12 * hidden + 3 * inner + 6 * heads) + 4 * rows * vocabulary + MAX_SCORES)


def check_weights(model: str, weight_bytes: int, device: torch.device, free: int) -> None:
    """Raises ConfigError when the weights alone are more than is free."""
    if weight_bytes > free:
        raise ConfigError(f"model {model}: its weights take {gigabytes(weight_bytes)}, {device} has {gigabytes(free)} free")


def auto_tokens(need: PoolNeed, device: torch.device, free: int) -> int:
    """The pool size for `kv_tokens: auto`, a whole number of pages. Raises ConfigError when one context does not fit."""
    tokens = int((free - need.step_bytes) * POOL_SHARE[device.type]) // need.token_bytes
    if device.type == "cpu":
        tokens = min(tokens, max(USEFUL_CONTEXTS * need.context_tokens, USEFUL_TOKENS))
    tokens = tokens // need.page_size * need.page_size
    if tokens < need.context_tokens:
        raise ConfigError(
            f"model {need.model}: KV for a context of {need.context_tokens} tokens takes "
            f"{gigabytes(need.context_tokens * need.token_bytes)}; {device} has {gigabytes(free)} free, which leaves room for "
            f"{max(0, tokens)} tokens: set a smaller context_tokens, or engine.kv_tokens"
        )
    return tokens


def check_tokens(need: PoolNeed, kv_tokens: int, device: torch.device, free: int) -> None:
    """Raises ConfigError when a pool of `kv_tokens`, as the user asked for, is more than is free."""
    wanted = kv_tokens * need.token_bytes
    if wanted + need.step_bytes > free:
        raise ConfigError(
            f"engine.kv_tokens {kv_tokens}: {gigabytes(wanted)} of KV and {gigabytes(need.step_bytes)} for a step, "
            f"{device} has {gigabytes(free)} free, room for {max(0, free - need.step_bytes) // need.token_bytes} tokens"
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable; set engine.kv_tokens")


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
