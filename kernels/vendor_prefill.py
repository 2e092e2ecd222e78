"""Prefill attention of other libraries: several chunks of queries, each causal at the end of a list of slots of its own.

Both libraries read the caches as pages of one slot, so that a chunk's keys may be any slots in any number of prefix nodes. The packages are
imported through `vendor`. Letters: C chunks, T rows of all chunks, S slots, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from askmany.kernels import vendor
from askmany.kernels.tiles import AttentionShape

FA3_HEAD_DIMS = (128,)  # what the packaged builds are compiled for
FLASHINFER_HEAD_DIMS = (64, 128, 256)


class PrefillKernel(Protocol):
    """Attention of prefix chunks."""

    def plan(self, rows: Sequence[int], slots: Sequence[NDArray[np.int32]]) -> None:
        """Once a step: chunk c has `rows[c]` rows, the last of its keys in `slots[c]`, its own included. Not capturable."""
        ...

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """`q` [T, HQ, D], chunk after chunk, over caches [S, HKV, D]; output [T, HQ, D]."""
        ...


def best_prefill(shape: AttentionShape, device: torch.device) -> tuple[str, PrefillKernel] | None:
    """The fastest that is installed and serves the shape, by name; None: the project's own kernels shall do it."""
    names = vendor.available(device, shape.dtype)
    if "fa3" in names and shape.head_dim in FA3_HEAD_DIMS:
        return "fa3", FlashPrefill(device)
    if "flashinfer" in names and shape.head_dim in FLASHINFER_HEAD_DIMS:
        return "flashinfer", FlashInferPrefill(shape, device)
    return None


class FlashPrefill:
    """FlashAttention-3 with a page table of single slots."""

    def __init__(self, device: torch.device) -> None:
        function = vendor.flash_attention()
        if function is None:
            raise RuntimeError("FlashAttention-3 is not installed (packages sgl_kernel or flash_attn_interface)")
        self._attend, self._device = function, device
        self._options: dict[str, Any] = {}

    def plan(self, rows: Sequence[int], slots: Sequence[NDArray[np.int32]]) -> None:
        """Build the page table and the bounds of the chunks."""
        lengths = [len(own) for own in slots]
        table = np.zeros((len(slots), max(lengths)), dtype=np.int32)
        for own, line in zip(slots, table, strict=True):
            line[: len(own)] = own
        bounds = np.concatenate([[0], np.cumsum(rows)])
        self._options = {
            "page_table": _sent(torch.from_numpy(table), self._device),
            "cache_seqlens": _ints(lengths, self._device),
            "cu_seqlens_q": _ints(bounds.tolist(), self._device),
            "max_seqlen_q": max(rows),
        }

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """See `PrefillKernel`."""
        out = self._attend(q, k_cache[:, None], v_cache[:, None], softmax_scale=scale, causal=True, **self._options)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class FlashInferPrefill:
    """FlashInfer's paged prefill over pages of one slot."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        module = vendor.flashinfer()
        if module is None:
            raise RuntimeError("FlashInfer is not installed (package flashinfer-python)")
        self._shape, self._device = shape, device
        workspace = torch.empty(vendor.FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, rows: Sequence[int], slots: Sequence[NDArray[np.int32]]) -> None:
        """FlashInfer's own plan, which waits for the device."""
        shape, lengths = self._shape, [len(own) for own in slots]
        self._wrapper.plan(
            _ints([0, *np.cumsum(rows).tolist()], self._device), _ints([0, *np.cumsum(lengths).tolist()], self._device),
            _sent(torch.from_numpy(np.concatenate(slots)), self._device), _ints([1] * len(slots), self._device),
            shape.q_heads, shape.kv_heads, shape.head_dim, 1,
            causal=True, q_data_type=shape.dtype, kv_data_type=shape.dtype, sm_scale=shape.head_dim**-0.5,
        )  # fmt: skip

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """See `PrefillKernel`."""
        usual = self._shape.head_dim**-0.5  # what `plan` was told; any other scale goes into the queries
        out: Tensor = self._wrapper.run(q.contiguous() if scale == usual else q * (scale / usual), (k_cache[:, None], v_cache[:, None]))
        return out


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return _sent(torch.tensor(values, dtype=torch.int32), device)


def _sent(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that waits for nothing: from pageable memory a large one would."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
