"""Decode steps of a context-parallel group in static memory: what one rank's `StepSpace` attends with, and how its tokens reach all ranks.

A rank's streams read their own keys through the split layout's tables (pages of one slot) while the queries of all ranks are gathered; then
all rows read the document's share that lies here, and partial results go home. Imports Triton. Letters: N ranks, P rows of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from askmany.engine.kv_pool import KVPool
from askmany.engine.model import RowModel
from askmany.engine.paged import PagedStep
from askmany.engine.space import Arrays, KernelCall, StepSpace
from askmany.engine.split_space import SplitLayout
from askmany.engine.staging import Field
from askmany.kernels import ring
from askmany.kernels.block_attention import Attend
from askmany.kernels.merge_into import Part
from askmany.kernels.rank_group import RankGroup


class GroupLayout:
    """The `SpaceLayout` of a rank: `own` over its streams' keys, `document` over all ranks' rows (None: no key of it lies here)."""

    def __init__(self, own: SplitLayout, document: Attend | None, group: RankGroup) -> None:
        self._own, self._document, self._group = own, document, group

    @property
    def fields(self) -> list[Field]:
        return self._own.fields

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        self._own.adopt(tensors)

    def fill(self, arrays: Arrays, step: PagedStep) -> int:
        return self._own.fill(arrays, step)

    def prepare(self, slots: Tensor) -> None:
        self._own.prepare(slots)

    @property
    def call(self) -> KernelCall:
        return self._call

    def check(self) -> None:
        self._own.check()

    def _call(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        def own() -> Part:
            return self._own.attend(q, k_cache, v_cache, scale)

        return ring.gather_q(q, k_cache, v_cache, self._document, scale, self._group, own)[0].to(q.dtype)


class GroupSpace(StepSpace):
    """A `StepSpace` after which every rank knows the tokens of all: `results` [N, P, 4] int32: token (in two), log-probability, margin."""

    def __init__(self, model: RowModel, pool: KVPool, layout: GroupLayout, rows: int, drawn: Tensor, group: RankGroup) -> None:
        super().__init__(model, pool, layout, rows, rows, drawn, decode=True)
        self._group = group
        self.results: Tensor | None = None
        self.sent_bytes = 0  # by this rank in one `compute`

    def compute(self, rows: int | None = None, wanted: int | None = None) -> None:
        """See `StepSpace.compute`; all rows, always, since every rank has as many. Collective."""
        self._group.traffic.take()
        super().compute()
        out = self.greedy.out
        packed = torch.cat(
            [out.tokens[:, None].view(torch.int32), out.logprobs[:, None].view(torch.int32), out.margins[:, None].view(torch.int32)], dim=1
        )
        self.results, arrived = self._group.all_gather(packed)
        arrived()
        self.sent_bytes = sum(size for _, size in self._group.traffic.take().values())


def read_results(results: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N, P] int64, log-probabilities and margins [N, P] fp32, of results on the host."""
    logprobs, margins = (results[..., i].contiguous().view(torch.float32) for i in (2, 3))
    return results[..., :2].contiguous().view(torch.int64)[..., 0], logprobs, margins
