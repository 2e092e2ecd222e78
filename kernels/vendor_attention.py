"""The split layout with another library's document pass: it reads the shared nodes, our kernels the private keys, one merge in fp32.

`VendorAttention` has the interface of `StreamAttention` (`tables`, `plan.build`, `plan.check`, `load`, `run`), so that whoever holds one
need not know which. The document pass rounds its output to 16 bit before the merge, ours does not.

Letters: T rows, S slots, HQ and HKV heads, D head dim.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from askmany.kernels.document_rows import DocumentRows
from askmany.kernels.layout import SplitBatch
from askmany.kernels.stream_attention import StreamAttention
from askmany.kernels.tables import LEVELS, StepLimits, StepTables, entries_of
from askmany.kernels.tiles import AttentionShape
from askmany.kernels.vendor import DocumentPass
from askmany.kernels.vendor_kernels import merge_passes


class VendorPlan:
    """Builds everything a step needs once its tables are filled."""

    def __init__(self, rows: DocumentRows, private: StreamAttention, document: DocumentPass) -> None:
        self._rows, self._private, self._document = rows, private, document

    def build(self) -> None:
        """As `WorkPlan.build`."""
        self._rows.build()
        self._private.plan.build()
        self._document.plan(self._rows)

    def check(self) -> None:
        """As `WorkPlan.check`."""
        self._private.plan.check()


class VendorAttention:
    """The split layout with `document` reading the shared nodes. See `StreamAttention`, whose methods these mirror."""

    def __init__(
        self,
        shape: AttentionShape,
        limits: StepLimits,
        device: torch.device,
        document: DocumentPass,
        *,
        levels: int = LEVELS,
        node_pages: int | None = None,
        rows_per_stream: int = 1,
    ) -> None:
        """`levels`: prefix levels in use (path entries beyond are ignored); `node_pages`: the most pages of one node (default: all)."""
        self.shape = shape
        self.tables = StepTables(limits, shape.page_size, device)
        self._private = StreamAttention(shape, limits, device, node_rows=1, rows_per_stream=rows_per_stream)
        for name in ("page_ids", "stream_page_start", "stream_length", "stream_row", "stream_row_count"):
            setattr(self._private.tables, name, getattr(self.tables, name))  # the same streams, below no node
        self._rows = DocumentRows(self.tables, levels, node_pages or limits.pages)
        self._document = document
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.plan = VendorPlan(self._rows, self._private, document)

    def load(self, batch: SplitBatch) -> None:
        """Describe the step by a `SplitBatch` and build its plan."""
        self.tables.load(*entries_of(batch, self.shape.page_size))
        self.plan.build()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer, as `StreamAttention.run`."""
        out = torch.empty_like(q) if out is None else out
        private = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        private_lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        with self._beside(q.device):
            self._private.run(q, k_cache, v_cache, scale, private, private_lse)
        part, part_lse = self._document_pass(q, k_cache, v_cache, scale)
        if self._side is not None:
            torch.cuda.current_stream(q.device).wait_stream(self._side)
        merge_passes[(q.shape[0], q.shape[1])](
            private, private_lse, part, part_lse, self._rows.place, out, private_lse if lse is None else lse,
            part.stride(0), part.stride(1), part_lse.stride(0), part_lse.stride(1), out.stride(0), out.stride(1),
            HQ=q.shape[1], D=q.shape[2], BD=triton.next_power_of_2(q.shape[2]), LEVELS=self._rows.levels, LSE=lse is not None, num_warps=2,
        )  # fmt: skip
        return out

    def _document_pass(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        page = self.shape.page_size
        k_pages, v_pages = (cache.view(-1, page, *cache.shape[1:]) for cache in (k_cache, v_cache))
        queries = q if self._rows.whole else q.index_select(0, self._rows.rows.clamp(max=q.shape[0] - 1))
        return self._document.run(queries, k_pages, v_pages, self._rows, scale)

    def _beside(self, device: torch.device) -> AbstractContextManager[object]:
        """On a GPU, a second stream that starts where the current one is now: the private pass runs beside the document pass."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._side)
