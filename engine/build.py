"""From a resolved model and config to a scheduler, and to a whole engine: the one place that chooses them.

Imports nothing heavy itself: `build_engine` loads PyTorch when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from askmany.engine.choice import Expected, bounded, chosen
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.interleaved import InterleavedScheduler
from askmany.engine.models import ResolvedModel
from askmany.engine.pages import PagePool
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.scheduler import Scheduler, SplitScheduler
from askmany.engine.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from askmany.engine.loading import ModelLoader


def build_scheduler(config: EngineConfig) -> Scheduler:
    """A scheduler over `config.kv_pages` free pages; `kv_tokens` must be resolved."""
    pool = PagePool(config.kv_pages, config.page_size)
    tree = PrefixTree(pool)
    if config.layout == "split":
        return SplitScheduler(pool, tree, config.limits)
    return InterleavedScheduler(pool, tree, config.limits)


def build_engine(
    model: ResolvedModel,
    config: EngineConfig,
    context_tokens: int | None = None,
    expected: Expected | None = None,
    load: ModelLoader | None = None,
) -> Engine:
    """Load `model` on the device that `config` names, with a KV pool for prompts and answers of `context_tokens` (default: the model's).

    `expected` is what `streams: auto` goes by: the engine's `choice` tells what came of it, and a GPU's graphs for it are made now. `load`
    loads the weights in place of the backend's own loader. Raises ConfigError in one line when the device is not there, the model is not
    supported, or weights and context do not fit.
    """
    from askmany.engine.loading import load_executor, load_model

    context_tokens = context_tokens or model.context_tokens
    executor, resolved = load_executor(model, bounded(config, expected), context_tokens, load or load_model)
    make = Engine if executor.steps is None else PipelinedEngine
    engine = make(
        build_scheduler(resolved),
        executor,
        TextTokenizer(model.folder),
        eos_token_ids=model.eos_token_ids,
        kv_bytes_per_token=executor.pool.shape.token_bytes,
    )
    engine.choice = chosen(config, resolved, expected)
    if expected and engine.choice and executor.steps:
        executor.steps.warm_run(engine.choice.rows, min(engine.choice.streams, expected.questions), expected.document_tokens)
    return engine
