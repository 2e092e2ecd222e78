"""The interleaved layout's part of a `StepSpace`: KV rows as slot lists, stream ids by slot, the stream-id mask in the kernel.

Letters: B requests, T rows, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from askmany.engine.chunk_pass import ChunkPass
from askmany.engine.paged import MaskedStep
from askmany.engine.slots import page_slots_array
from askmany.engine.space import Arrays, KernelCall
from askmany.engine.staging import Field
from askmany.kernels.store import store_ids
from askmany.kernels.stream_mask import MaskPlan, choose_splits, choose_tile, stream_mask
from askmany.kernels.tiles import AttentionShape

CPU_PROCESSORS = 2  # what the interpreter plays


@dataclass(frozen=True, slots=True)
class MaskedSize:
    """The most that one step holds. `keys`: cached slots of all requests together."""

    rows: int
    requests: int
    keys: int

    def holds(self, step: MaskedStep) -> bool:
        fits = step.rows <= self.rows and len(step.requests) <= self.requests
        return fits and step.cached_tokens <= self.keys


class MaskedLayout:
    """Attention of steps up to `size`; `slot_sid` [S] int32 holds the stream id of every stored slot and is shared by all spaces."""

    def __init__(
        self, shape: AttentionShape, size: MaskedSize, slot_sid: Tensor, typical_keys: int, chunk_pass: ChunkPass | None = None
    ) -> None:
        """`typical_keys`: of one request, for which the keys are cut. With `chunk_pass`, prefix chunks go through it (not capturable)."""
        self.size, self._shape, self._slot_sid, self._chunk_pass = size, shape, slot_sid, chunk_pass
        self._tile = choose_tile(size.rows, shape.group, shape.head_dim, shape.dtype)
        device = slot_sid.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else CPU_PROCESSORS
        self._splits = choose_splits(size.rows, shape.group, shape.kv_heads, typical_keys, self._tile, processors)
        self._plan: MaskPlan | None = None

    @property
    def fields(self) -> list[Field]:
        size = self.size
        bounds = [Field(name, (size.requests + 1,), torch.int32) for name in ("q_indptr", "kv_indptr")]
        own = [Field("new_keys", (size.requests,), torch.int32), Field("q_sid", (size.rows,), torch.int32)]
        return [*bounds, *own, Field("kv_indices", (max(1, size.keys),), torch.int32)]

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """The plan's tensors are the staged ones."""
        names = ("q_indptr", "new_keys", "kv_indptr", "kv_indices", "q_sid")
        self._plan = MaskPlan(**{name: tensors[name] for name in names}, splits=self._splits)

    def fill(self, arrays: Arrays, step: MaskedStep) -> int:
        """Requests in the order of their rows; behind the last one, requests without rows."""
        page_size = self._shape.page_size
        if self._chunk_pass is not None:
            self._chunk_pass.plan(step, page_size)
        listed = 0 if self._chunk_pass is None else step.chunks  # requests before this one have rows and no keys
        known: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = {}
        at, count = 0, len(step.requests)
        arrays["q_indptr"][0] = arrays["kv_indptr"][0] = 0
        for index, request in enumerate(step.requests):
            if index >= listed:
                for node in request.nodes:
                    if id(node) not in known:
                        known[id(node)] = page_slots_array(node.pages, len(node.token_ids), page_size)
                    own = known[id(node)]
                    arrays["kv_indices"][at : at + len(own)] = own
                    at += len(own)
                arrays["kv_indices"][at : at + request.stored] = page_slots_array(request.pages, request.stored, page_size)
                at += request.stored
            arrays["q_indptr"][index + 1] = request.row + request.rows
            arrays["kv_indptr"][index + 1] = at
            arrays["new_keys"][index] = request.rows if index >= listed else 0
        arrays["q_indptr"][count + 1 :] = step.rows
        arrays["kv_indptr"][count + 1 :] = at
        arrays["new_keys"][count:] = 0
        arrays["q_sid"][: step.rows] = step.sids
        arrays["q_sid"][step.rows :] = -1
        return at

    def prepare(self, slots: Tensor) -> None:
        """Mark the slots that the step writes with their streams."""
        assert self._plan is not None
        store_ids(self._plan.q_sid[: slots.shape[0]], self._slot_sid, slots)

    @property
    def call(self) -> KernelCall:
        return self._call

    def check(self) -> None:
        """Nothing can overflow."""

    def _call(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        assert self._plan is not None
        plan = self._plan
        if q.shape[0] < plan.q_sid.shape[0]:
            plan = MaskPlan(plan.q_indptr, plan.new_keys, plan.kv_indptr, plan.kv_indices, plan.q_sid[: q.shape[0]], plan.splits)
        out, _ = stream_mask(q, k, v, k_cache, v_cache, self._slot_sid, plan, scale, self._tile)
        if self._chunk_pass is not None:
            self._chunk_pass.run(q, k_cache, v_cache, scale, out)
        return out
