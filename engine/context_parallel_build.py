"""From a resolved model, a config and this process's groups to an engine (the leader) or a follower."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from askmany.engine import loading
from askmany.engine.answers import Detokenizer
from askmany.engine.config import EngineConfig
from askmany.engine.constraints import Constraints
from askmany.engine.context_parallel import ContextParallelModel, Groups, RankModel, follow
from askmany.engine.context_parallel_pages import NotedPagePool
from askmany.engine.context_parallel_rows import RowPolicy
from askmany.engine.errors import ConfigError
from askmany.engine.executor import TorchExecutor
from askmany.engine.grammar import GrammarCompiler
from askmany.engine.graphs import Capturer, CudaCapturer
from askmany.engine.kv_pool import KVPool
from askmany.engine.metrics import Metrics
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.models import ResolvedModel
from askmany.engine.pipelined import PipelinedEngine
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.scheduler import SplitScheduler
from askmany.engine.tokenizer import TextTokenizer
from askmany.kernels.block_attention import best_blocks
from askmany.kernels.ring_choice import Heads, Rules
from askmany.kernels.tiles import AttentionShape

RANK_STEP_TOKENS = 8192  # of a prefill step, on each GPU
MOST_STEP_TOKENS = 32_768  # over all ranks: what a step's activations take is set aside on each


@dataclass(frozen=True, slots=True)
class ContextParallelMetrics(Metrics):
    """The engine's counters, and the group's: sections of steps by way, and by the rule that chose it; bytes that rank 0 sent."""

    sections_pass_kv: int = 0
    sections_pass_q: int = 0
    sections_gather_kv: int = 0
    sections_gather_q: int = 0
    sections_local: int = 0
    chosen_by_size: int = 0  # equation 1
    chosen_by_overlap: int = 0  # equation 2
    chosen_by_way_home: int = 0  # equation 5
    chosen_by_fit: int = 0
    sent_bytes: int = 0
    handed_over_documents: int = 0


_RULES = {"equation 1": "chosen_by_size", "equation 2": "chosen_by_overlap", "equation 5": "chosen_by_way_home", "fit": "chosen_by_fit"}


class ContextParallelEngine(PipelinedEngine):
    """An engine whose model is spread over a group. `close` lets the followers end."""

    group_model: ContextParallelModel

    @property
    def metrics(self) -> ContextParallelMetrics:
        """Everything counted so far, choices included."""
        plain = super().metrics
        tally = self.group_model.rank.tally
        counts: dict[str, int] = {"sent_bytes": tally.sent_bytes, "handed_over_documents": tally.handed_over}
        for (way, rule), sections in tally.sections.items():
            for name in (f"sections_{way}", _RULES.get(rule)):
                if name is not None:
                    counts[name] = counts.get(name, 0) + sections
        return ContextParallelMetrics(**{f.name: getattr(plain, f.name) for f in fields(Metrics)}, **counts)

    @property
    def reasons(self) -> dict[tuple[str, str], str]:
        """The last comparison that led to each way and rule, in numbers."""
        return dict(self.group_model.rank.tally.reasons)

    def close(self) -> None:
        """End the group; the engine must not be used any more."""
        self.group_model.close()


def build_rank(
    model: TransformersModel,
    kv_tokens: int,
    config: EngineConfig,
    groups: Groups,
    policy: RowPolicy | None = None,
    rules: Rules | None = None,
    capturer: Capturer | None = None,
) -> RankModel:
    """This rank's part, with a pool of `kv_tokens`. Collective. Raises ConfigError for what a group cannot do.

    `capturer`: of decode steps; on a GPU CUDA graphs where nothing is given. Without one every step runs as it comes.
    """
    refuse_unfit(config)
    pool = KVPool(model.kv_shape, kv_tokens // config.page_size * config.page_size, model.device)
    shape = model.kv_shape
    heads = Heads(model.q_heads, shape.kv_heads, shape.head_dim, shape.dtype.itemsize)
    tiles = AttentionShape(heads.q_heads, heads.kv_heads, heads.head_dim, 1, shape.dtype) if 16 <= heads.head_dim <= 256 else None
    blocks = best_blocks(model.device, shape.dtype, tiles)
    size = groups.data.size
    rank = RankModel(model, pool, pool.slots * size, groups, blocks, rules or Rules(heads, size), policy)
    if capturer is None and model.device.type == "cuda" and size > 1:
        capturer = CudaCapturer(model.device, model.capture_scope, others=True)
    if capturer is not None and tiles is not None:
        from askmany.engine.context_parallel_decode import RankDecode  # Triton is there only where a GPU is

        rank.decode = RankDecode(model, pool, rank.slots, groups.data, blocks, capturer, config.max_rows, pool.slots)
    return rank


def refuse_unfit(config: EngineConfig) -> None:
    """ConfigError for settings that a group does not have."""
    if config.layout != "split":
        raise ConfigError(f"engine.layout {config.layout}: a context-parallel group runs the split layout alone")
    if config.deterministic:
        raise ConfigError("engine.deterministic: a context-parallel group has no deterministic mode; what is merged depends on its ranks")
    if config.backend in ("sglang", "fake"):
        raise ConfigError(f"engine.backend {config.backend}: a context-parallel group runs backend transformers alone")


def start_up_cells(room_tokens: int) -> list[tuple[int, int]]:
    """(new, cached) tokens of the start-up measurement: short and long, from an empty cache to a tenth and less of new tokens, as far as
    they fit. Seconds of work; what lies beyond is extrapolated."""
    cells = [(new, cached) for new in (16, 128, 1024) for cached in (0, 96, 4096)]
    fitting = [cell for cell in cells if sum(cell) <= room_tokens]
    return fitting if len(fitting) >= 3 else []


def leader_engine(
    rank: RankModel, config: EngineConfig, detokenizer: Detokenizer, eos_token_ids: tuple[int, ...], constraints: Constraints | None
) -> ContextParallelEngine:
    """The engine of rank 0, with the memory of all ranks as its pool."""
    pages = NotedPagePool(len(rank.slots.owner) // config.page_size, config.page_size)

    def take_freed() -> Tensor:
        freed = torch.tensor(pages.take_freed(), dtype=torch.int64)[:, None] * config.page_size
        return (freed + torch.arange(config.page_size)).flatten()

    model = ContextParallelModel(rank, take_freed)
    scheduler = SplitScheduler(pages, PrefixTree(pages), config.limits)
    steps = None
    if rank.decode is not None:
        from askmany.engine.context_parallel_launch import GroupSteps

        steps = GroupSteps(rank, config.page_size, take_freed)
    executor = TorchExecutor(model, rank.pool, config.page_size, constraints, steps)
    engine = ContextParallelEngine(scheduler, executor, detokenizer, eos_token_ids, rank.pool.shape.token_bytes)
    engine.group_model = model
    return engine


def with_group_steps(config: EngineConfig, step_tokens: int | Literal["auto"], ranks: int, cuda: bool) -> EngineConfig:
    """`config` with prefill steps of `step_tokens` over all ranks. The keys stored so far travel once a step, so the longer the steps, the
    better the exchange hides behind their attention (measured: `jobs/measurements/context-parallel-log.md`)."""
    if step_tokens == "auto":
        step_tokens = min(RANK_STEP_TOKENS * ranks, MOST_STEP_TOKENS) if cuda else config.prefill_chunk
    return config.model_copy(update={"prefill_chunk": step_tokens, "step_tokens": max(config.step_tokens, step_tokens)})


def build_group_engine(
    model: ResolvedModel,
    config: EngineConfig,
    groups: Groups,
    context_tokens: int | None = None,
    step_tokens: int | Literal["auto"] = "auto",
) -> ContextParallelEngine | None:
    """Load `model` on this rank. Rank 0 returns the engine; on the others this call is their whole life and returns None at its end.

    `step_tokens` of a document are fed in one step of the group. Collective over the group. Raises ConfigError in one line.
    """
    refuse_unfit(config)
    config = with_group_steps(config, step_tokens, groups.data.size, config.device != "cpu" and torch.cuda.is_available())
    loaded, kv_tokens, resolved = loading.load_rank(model, config, context_tokens or model.context_tokens, groups.data.size)
    kv_tokens = -int(groups.control.agree([-kv_tokens])[0])  # what the rank with the least memory has
    rank = build_rank(loaded, kv_tokens, resolved, groups, RowPolicy(hand_over=True))
    rank.calibrate(start_up_cells(kv_tokens * groups.data.size))
    if groups.data.rank:
        follow(rank)
        return None
    constraints = Constraints(partial(GrammarCompiler.load, model.folder, loaded.vocabulary, model.eos_token_ids))
    return leader_engine(rank, resolved, TextTokenizer(model.folder), tuple(model.eos_token_ids), constraints)
