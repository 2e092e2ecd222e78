"""Document passes of other libraries, FlashAttention-3 and FlashInfer: attention of blocks of queries over shared nodes, not causal.

The packages are imported on first use only; without them `available` says so and nothing else here runs. The one module of `kernels`
that names them. Letters: E queries in node order, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from askmany.kernels.document_rows import DocumentRows
from askmany.kernels.tiles import AttentionShape

FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


def flash_attention() -> Callable[..., Any] | None:
    """FlashAttention-3's `flash_attn_with_kvcache`, from SGLang's kernel package or its own; None where neither is installed."""
    for module in ("sgl_kernel.flash_attn", "flash_attn_interface"):
        try:
            function: Callable[..., Any] = importlib.import_module(module).flash_attn_with_kvcache
        except (ImportError, AttributeError, OSError):
            continue
        return function
    return None


def flashinfer() -> Any | None:
    """The FlashInfer module, None where it is not installed."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError):
        return None


def available(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the document passes that can run on `device`: "fa3" on Hopper, "flashinfer" from Ampere on; 16-bit types only."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return ()
    major = torch.cuda.get_device_capability(device)[0]
    names = []
    if major == 9 and flash_attention() is not None:
        names.append("fa3")
    if major >= 8 and flashinfer() is not None:
        names.append("flashinfer")
    return tuple(names)


class DocumentPass(Protocol):
    """A vendor's attention over shared nodes."""

    def plan(self, rows: DocumentRows) -> None:
        """Once a step, after `rows.build()`."""
        ...

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: DocumentRows, scale: float) -> tuple[Tensor, Tensor]:
        """`q` [E, HQ, D] in node order over pages [pages, page, HKV, D]: output [E, HQ, D], natural log-sum-exp as a [E, HQ] view."""
        ...


class FlashDocumentPass:
    """FlashAttention-3: lengths and pages are read on the device, so a captured call may be replayed at other lengths."""

    def __init__(self) -> None:
        function = flash_attention()
        if function is None:
            raise RuntimeError("FlashAttention-3 is not installed (packages sgl_kernel or flash_attn_interface)")
        self._attend = function

    def plan(self, rows: DocumentRows) -> None:
        """Nothing to prepare."""

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: DocumentRows, scale: float) -> tuple[Tensor, Tensor]:
        lengths = rows.tables.node_length
        options: dict[str, Any] = {"page_table": rows.pages, "cache_seqlens": lengths, "softmax_scale": scale, "return_softmax_lse": True}
        if lengths.shape[0] == 1:  # one node: a plain block of queries, which FA3 splits over keys best
            out, lse, *_ = self._attend(q[None], k_pages, v_pages, causal=False, **options)
            return out[0], lse[0].T
        out, lse, *_ = self._attend(q, k_pages, v_pages, cu_seqlens_q=rows.bounds, max_seqlen_q=q.shape[0], causal=False, **options)
        return out, lse.T


class FlashInferDocumentPass:
    """FlashInfer's paged prefill kernel. Its plan is made on the host: `plan` waits for the device and cannot be captured, `run` can."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        module = flashinfer()
        if module is None:
            raise RuntimeError("FlashInfer is not installed (package flashinfer-python)")
        self._shape = shape
        workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, rows: DocumentRows) -> None:
        page, lengths = self._shape.page_size, rows.tables.node_length.cpu()
        used = (lengths + page - 1) // page
        table = rows.pages.cpu()
        indices = torch.cat([table[node, : int(count)] for node, count in enumerate(used)]) if used.numel() else table.reshape(-1)[:0]
        bounds = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32)
        last = (lengths - (used - 1).clamp(min=0) * page).to(torch.int32)
        self._wrapper.plan(
            rows.bounds.cpu(), bounds, indices.to(rows.pages.device), last, self._shape.q_heads, self._shape.kv_heads, self._shape.head_dim,
            page, causal=False, q_data_type=self._shape.dtype, sm_scale=self._shape.head_dim**-0.5,
        )  # fmt: skip

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: DocumentRows, scale: float) -> tuple[Tensor, Tensor]:
        usual = self._shape.head_dim**-0.5  # what `plan` was told; any other scale goes into the queries
        out, lse = self._wrapper.run(q if scale == usual else q * (scale / usual), (k_pages, v_pages), return_lse=True)
        return out, lse * math.log(2)  # FlashInfer's is in base 2
