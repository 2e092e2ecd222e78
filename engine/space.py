"""Static memory for all steps up to one size, on a device with kernels: what a captured graph may hold.

`load` stages a step; `compute` is device work alone, over static addresses and with shapes that no step changes, so that it can be captured
once and replayed. Rows beyond the step are dummies: they are stored nowhere, belong to no stream and attend to nothing. What differs
between the layouts is a `SpaceLayout`.

Letters: T rows, W rows that ask for logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from askmany.engine.kv_pool import KVPool
from askmany.engine.model import RowModel, StepRows, Wanted
from askmany.engine.paged import PagedRows
from askmany.engine.side_stream import SideStream
from askmany.engine.staging import Field, Staging
from askmany.kernels.greedy import GreedyPick, feed
from askmany.kernels.rotary import Rotary, rotate_and_store
from askmany.kernels.store import store

Arrays = Mapping[str, np.ndarray[Any, Any]]
Step = TypeVar("Step", bound=PagedRows, contravariant=True)


class KernelCall(Protocol):
    """Attention of one layer over a step that is prepared; the rows' K and V are stored already."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """`q` [T, HQ, D], the rows' own `k`, `v` [T, HKV, D], caches [S, HKV, D]; output [T, HQ, D]."""
        ...


class SpaceLayout(Protocol[Step]):
    """The attention of one layout, over buffers of its own that lie in the space's staging."""

    @property
    def fields(self) -> list[Field]:
        """What it stages; the last may be long."""
        ...

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the staged tensors, once."""
        ...

    def fill(self, arrays: Arrays, step: Step) -> int:
        """Write a step; the used length of the last field."""
        ...

    def prepare(self, slots: Tensor) -> None:
        """Device work once a step, before attention; beside the current stream, so it allocates nothing. `slots` [T]."""
        ...

    @property
    def call(self) -> KernelCall: ...

    def check(self) -> None:
        """Wait for the device; RuntimeError if a step did not fit."""
        ...


class StepSpace:
    """Buffers and outputs of steps with up to `rows` rows, `wanted` of which ask for logits. With `decode` all rows do.

    `drawn` [D] int64 is shared by all spaces: the tokens that the last step drew.
    """

    def __init__(
        self, model: RowModel, pool: KVPool, layout: SpaceLayout[Any], rows: int, wanted: int, drawn: Tensor, decode: bool = False
    ) -> None:
        self.rows, self.wanted, self.decode = rows, wanted, decode
        self.layout = layout
        self._model, self._pool, self._drawn = model, pool, drawn
        self._staging = Staging(_row_fields(rows, wanted) + layout.fields, pool.device)
        layout.adopt(self._staging.tensors)
        self.greedy = GreedyPick(wanted, model.vocabulary, pool.device)
        self._beside = SideStream(pool.device)
        self.logits: Tensor | None = None  # [W, V] of the last `compute`

    def load(self, step: PagedRows, feeds: Sequence[int]) -> None:
        """Stage a step that fits. `feeds` [T]: for a row whose token is PENDING, its place in `drawn`; else -1."""
        arrays = self._staging.fill()
        _fill_rows(arrays, step, feeds)
        _fill_wanted(arrays, step)
        self._staging.flush(self.layout.fill(arrays, step))

    def compute(self, rows: int | None = None, wanted: int | None = None) -> None:
        """Run the step that is loaded: K and V into the pool, logits into `logits`, the likeliest tokens into `greedy.out` and, in the
        order of the wanted rows, into `drawn`, from where the next step may take them.

        Without counts all rows run, dummies too: such a call may be captured. With counts, the step's own rows alone.
        """
        at = self._staging.tensors
        count = self.rows if rows is None else rows
        asked = self.wanted if wanted is None else wanted
        slots, feeds = at["slots"][:count], at["feeds"][:count]
        ids = feed(at["token_ids"][:count], feeds, self._drawn)
        self._beside.run(partial(self.layout.prepare, slots))
        ends = max(asked, 1)  # SGLang's layers want a row
        wants = None if self.decode and asked == count else Wanted(at["wanted"][:ends], at["lengths"][:ends])
        positions, rotary = at["positions"][:count], self._model.rotary
        attention = RowAttention(self._pool, slots, self.layout.call, self._beside.join, positions, rotary)
        self.logits = self._model.run_rows(StepRows(ids, positions, slots, wants, rotary is not None), attention)
        self._beside.join()
        self.greedy.run(self.logits, self._drawn, asked)


class RowAttention:
    """What the layers of one step call: turn queries and keys where `rotary` is given, store K and V, then attend. `ready` waits for what
    attention needs besides; `positions` [T]."""

    def __init__(
        self, pool: KVPool, slots: Tensor, call: KernelCall, ready: Callable[[], None], positions: Tensor, rotary: Rotary | None
    ) -> None:
        self._pool, self._slots, self._call, self._ready = pool, slots, call, ready
        self._positions, self._rotary = positions, rotary

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """`q` [T, HQ, D], `k`, `v` [T, HKV, D], of which q and k may be turned in place; output [T, HQ, D]."""
        self._ready()
        k_cache, v_cache = self._pool.k[layer], self._pool.v[layer]
        if self._rotary is None:
            store(k, v, k_cache, v_cache, self._slots)
        else:
            rotate_and_store(q, k, v, self._positions, self._rotary, k_cache, v_cache, self._slots)
        return self._call(q, k, v, k_cache, v_cache, scale)


def _row_fields(rows: int, wanted: int) -> list[Field]:
    long = [Field(name, (rows,), torch.int64) for name in ("token_ids", "positions", "slots", "feeds")]
    return [*long, Field("wanted", (wanted,), torch.int64), Field("lengths", (wanted,), torch.int32)]


def _fill_rows(arrays: Arrays, step: PagedRows, feeds: Sequence[int]) -> None:
    """The rows of a step, and dummies behind them."""
    count = step.rows
    for name, values, dummy in (
        ("token_ids", step.token_ids, 0), ("positions", step.positions, 0), ("slots", step.slots, -1), ("feeds", feeds, -1),
    ):  # fmt: skip
        arrays[name][:count] = values
        arrays[name][count:] = dummy
    np.maximum(arrays["token_ids"], 0, out=arrays["token_ids"])


def _fill_wanted(arrays: Arrays, step: PagedRows) -> None:
    """The rows that ask for logits, and the lengths of the runs of rows that end at them; the other rows follow the last one."""
    count = len(step.wanted)
    arrays["wanted"][:count] = step.wanted
    arrays["wanted"][count:] = 0
    ends = np.asarray([*step.wanted, step.rows - 1], dtype=np.int64) + 1
    lengths = np.diff(ends, prepend=0)[: len(arrays["lengths"])]
    arrays["lengths"][: len(lengths)] = lengths
    arrays["lengths"][len(lengths) :] = 0
