"""From a resolved config to a scheduler: the one place that chooses a layout's scheduler."""

from __future__ import annotations

from askmany.engine.config import EngineConfig
from askmany.engine.interleaved import InterleavedScheduler
from askmany.engine.pages import PagePool
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.scheduler import Scheduler, SplitScheduler


def build_scheduler(config: EngineConfig) -> Scheduler:
    """A scheduler over `config.kv_pages` free pages; `kv_tokens` must be resolved."""
    pool = PagePool(config.kv_pages, config.page_size)
    tree = PrefixTree(pool)
    if config.layout == "split":
        return SplitScheduler(pool, tree, config.limits)
    return InterleavedScheduler(pool, tree, config.limits)
