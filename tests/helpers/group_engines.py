"""Context-parallel engines for tests: what every rank of a gloo world runs, with a chosen way of attending, in poisoned memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from askmany.engine.config import EngineConfig
from askmany.engine.context_parallel import Groups, RankModel, follow
from askmany.engine.context_parallel_build import ContextParallelEngine, build_group_engine, build_rank, leader_engine
from askmany.engine.context_parallel_rows import RowPolicy
from askmany.engine.context_parallel_step import RankStep, StepMessage
from askmany.engine.fake import FakeDetokenizer
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.models import ResolvedModel
from askmany.engine.request import Document, StreamResult
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Choice, Rules, Way
from tests.helpers.interpreter import repair
from tests.helpers.tiny_models import tiny_model

Key = tuple[str, str]


@dataclass(frozen=True)
class GroupCase:
    """Documents by turns: a turn is submitted when the one before is answered. `kv_tokens` is each rank's; `way` None: by the rules."""

    model: str
    config: EngineConfig
    turns: tuple[tuple[Document, ...], ...]
    way: Way | None = None
    policy: RowPolicy = field(default_factory=RowPolicy)
    seed: int = 0
    captured: bool = False  # decode steps go the way that graphs go; a replay runs the step again


@dataclass
class GroupAnswers:
    """What the leader saw; `owned` are the slots of each rank after each step; `captured` steps among them."""

    results: dict[Key, StreamResult]
    logits: dict[Key, list[Tensor]]
    owned: list[list[int]]
    metrics: Any
    captured: int = 0


class AgainCapturer:
    """A `Capturer` whose replay is the work itself."""

    def capture(self, work: Any) -> Any:
        work()
        return work


@dataclass(frozen=True)
class Forced(Rules):
    """Rules that always say the same."""

    way: Way = "pass_kv"

    def choose(self, new_tokens: int, cached_tokens: int) -> Choice:
        return Choice(self.way, "forced", "a test says so")


class WatchedRank(RankModel):
    """Fills every free place with NaN before each step, checks the map, and notes who owns how much."""

    owned: list[list[int]]

    def step(self, message: StepMessage) -> tuple[RankStep, Tensor | None]:
        self.slots.release(message.freed)
        self.pool.poison(torch.nonzero(~self.slots._taken[self.groups.data.rank])[:, 0])
        done = super().step(message)
        self.slots.check()
        self.owned.append(torch.bincount(self.slots.owner[self.slots.owner >= 0], minlength=self.slots.ranks).tolist())
        return done


def groups_of() -> Groups:
    """The whole world, data and control on groups of their own."""
    world = range(dist.get_world_size())
    return Groups(*(RankGroup(world, dist.new_group(world, timeout=timedelta(seconds=100))) for _ in range(2)))


def watched_rank(model: TransformersModel, case: GroupCase) -> WatchedRank:
    assert case.config.kv_tokens != "auto"
    if case.captured:
        repair()
    rank = build_rank(
        model, case.config.kv_tokens, case.config, groups_of(), case.policy, capturer=AgainCapturer() if case.captured else None
    )
    if case.way is not None:
        rules = rank._maker.rules
        object.__setattr__(rank._maker, "rules", Forced(rules.heads, rules.ranks, way=case.way))
    rank.__class__ = WatchedRank
    rank.owned = []  # type: ignore[attr-defined]
    return rank  # type: ignore[return-value]


def answer_turns(rank: int, size: int, case: GroupCase) -> GroupAnswers | None:
    """The leader's answers to all turns; followers follow."""
    model = TransformersModel(tiny_model(case.model, case.seed))
    part = watched_rank(model, case)
    if rank:
        follow(part)
        return None
    engine = leader_engine(part, case.config, FakeDetokenizer(), (), None)  # type: ignore[arg-type]
    return drained(engine, part, case)


def drained(engine: ContextParallelEngine, part: WatchedRank, case: GroupCase) -> GroupAnswers:
    logits: dict[Key, list[Tensor]] = defaultdict(list)
    forward = engine.group_model.forward

    def recorded(batch: Any, pool: Any) -> Tensor:
        found = forward(batch, pool)
        for stream, row in zip(batch.sampled_streams, found, strict=False):
            logits[stream.document.document.key, stream.question.question_id].append(row.clone())
        return found

    engine.group_model.forward = recorded  # type: ignore[method-assign]
    results = {}
    for turn in case.turns:
        for document in turn:
            engine.submit(document)
        results.update({(r.document_key, r.question_id): r for r in engine.drain()})
    engine.close()
    captured = part.tally.sections["gather_q", "captured"]
    return GroupAnswers(results, dict(logits), part.owned, engine.metrics, captured)


def answer_with_smollm2(rank: int, size: int, resolved: ResolvedModel, documents: tuple[Document, ...], config: EngineConfig) -> Any:
    """(answers by key, logits by key, metrics) of the real model on this world; None from followers."""
    engine = build_group_engine(resolved, config, groups_of())
    if engine is None:
        return None
    case = GroupCase("smollm2", config, (documents,))
    part: Any = engine.group_model.rank
    part.owned = []
    return drained(engine, part, case)
