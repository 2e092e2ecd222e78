"""Which rows read which prefix node, as blocks of queries in node order: what another library's attention kernel wants to know.

Letters: T rows, R streams, N nodes, E = T * levels (row, node) pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.kernels.tables import StepTables


class DocumentRows:
    """Which rows read which node, as queries in node order: static device buffers that `build` refills from the tables.

    Pair e of the first `bounds[N]` is row `rows[e]`, and node n owns pairs `bounds[n] : bounds[n + 1]`. `place[t, level]` is the pair of
    row t at that level, -1 for none. `whole`: with a single node and level pair t is row t, whether it reads the node or not, so that the
    step's queries need no reordering.
    """

    def __init__(self, tables: StepTables, levels: int, node_pages: int) -> None:
        limits, device = tables.limits, tables.device
        self.tables, self.levels = tables, levels
        self.whole = limits.nodes == 1 and levels == 1
        pairs = limits.rows * levels
        self.rows = torch.zeros(pairs, dtype=torch.int64, device=device)
        self.bounds = torch.zeros(limits.nodes + 1, dtype=torch.int32, device=device)
        self.place = torch.full((limits.rows, levels), -1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(limits.nodes, node_pages, dtype=torch.int32, device=device)
        self._steps = torch.arange(limits.rows, device=device)
        self._pairs = torch.arange(pairs, device=device)
        self._page_steps = torch.arange(node_pages, device=device)

    def build(self) -> None:
        """Refill from the tables: static shapes, no synchronisation, capturable."""
        tables, nodes = self.tables, self.tables.limits.nodes
        first, count = tables.stream_row[:, None], tables.stream_row_count[:, None]
        mine = (self._steps >= first) & (self._steps < first + count)  # [R, T]
        path = tables.stream_path[mine.int().argmax(0), : self.levels].long()  # [T, levels]
        length = torch.where(path >= 0, tables.node_length[path.clamp(min=0)], 0)
        node = torch.where(mine.any(0)[:, None] & (length > 0), path, nodes).reshape(-1)  # [E], `nodes` for none
        if self.whole:
            self.place.copy_(torch.where(node < nodes, self._pairs, -1)[:, None])
        else:
            self._sort(node)
        at = (tables.node_page_start[:, None] + self._page_steps).clamp(max=tables.limits.pages - 1)
        self.pages.copy_(tables.page_ids[at])

    def _sort(self, node: Tensor) -> None:
        """Put the pairs in the order of their `node` [E]."""
        nodes = self.tables.limits.nodes
        order = torch.sort(node, stable=True).indices
        self.rows.copy_(order // self.levels)
        counts = torch.zeros(nodes + 1, dtype=torch.int32, device=node.device).scatter_add_(
            0, node, torch.ones_like(node, dtype=torch.int32)
        )
        self.bounds[1:].copy_(counts[:nodes].cumsum(0))
        place = torch.empty_like(order).scatter_(0, order, self._pairs)
        self.place.copy_(torch.where(node < nodes, place, -1).reshape(self.place.shape))
