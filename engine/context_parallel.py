"""A model spread over a context-parallel group: one rank leads and looks like any model to its engine, the others follow.

The leader's engine plans over global slots, as many as all ranks have together, and knows nothing of ranks. In each step the leader sends
the step's tensors round, every rank places the rows, runs the same layers on its own, exchanges what attention needs, and the logits of
sampled rows go to the leader. Weights are on every rank. What can fail here fails on all: a rank that is lost ends the group.
Letters: N ranks, M sampled rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from askmany.engine.batch import StepBatch
from askmany.engine.context_parallel_hand_over import HandOver
from askmany.engine.context_parallel_message import PackedMessage, pack, unpack
from askmany.engine.context_parallel_rows import RowPolicy
from askmany.engine.context_parallel_slots import SlotMap
from askmany.engine.context_parallel_step import RankStep, StepMaker, StepMessage
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.step_attention import LayerAttention
from askmany.kernels.block_attention import BlockAttention
from askmany.kernels.passes import sent
from askmany.kernels.rank_group import RankGroup
from askmany.kernels.ring_choice import Choice, Rules
from askmany.kernels.ring_measure import calibrated

if TYPE_CHECKING:
    from askmany.engine.context_parallel_decode import DecodeMessage, RankDecode

CAPTURED = Choice("gather_q", "captured", "a decode step of streams at home below one path, in a graph")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """`data` carries tensors between the ranks' devices (NCCL or gloo), `control` host data (gloo). Rank 0 of both leads."""

    data: RankGroup
    control: RankGroup


@dataclass(slots=True)
class Tally:
    """What was chosen so far: sections by way and rule, the last reason of each; the bytes that this rank sent; documents
    handed over to one rank."""

    sections: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    sent_bytes: int = 0
    handed_over: int = 0

    def add(self, choice: Choice) -> None:
        if (choice.way, choice.rule) not in self.sections:
            logger.info("attention by %s, chosen by %s: %s", choice.way, choice.rule, choice.reason)
        self.sections[choice.way, choice.rule] += 1
        self.reasons[choice.way, choice.rule] = choice.reason


class RankModel:
    """One rank's weights, pool and map of slots. Every rank of the group makes one with the same arguments but its own groups."""

    def __init__(
        self,
        model: TransformersModel,
        pool: KVPool,
        global_slots: int,
        groups: Groups,
        blocks: BlockAttention,
        rules: Rules,
        policy: RowPolicy | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.groups = groups
        self.slots = SlotMap(groups.data.size, global_slots, pool.slots)
        self.tally = Tally()
        self.decode: RankDecode | None = None  # captured decode steps, where kernels are
        policy = policy or RowPolicy()
        self._hand_over = HandOver(self.slots, pool, groups.data) if policy.hand_over else None
        self._maker = StepMaker(groups.data.rank, self.slots, policy, rules, blocks, model.device)
        self._steps = 0

    def calibrate(self, cells: Sequence[tuple[int, int]]) -> None:
        """Let choices follow a measurement of these (new, cached) tokens on this group; without cells they stay as they are. Collective."""
        if cells:
            maker, shape = self._maker, self.pool.shape
            rules = calibrated(maker.rules, cells, maker.blocks, self.groups.data, self.model.device, shape.dtype)
            self._maker = replace(maker, rules=rules)

    def step(self, message: StepMessage) -> tuple[RankStep, Tensor | None]:
        """This rank's share of a step. On the leader also the logits [M, V] of all sampled rows."""
        self.slots.release(message.freed)
        if self._hand_over is not None:
            self.tally.handed_over += self._hand_over.before(message)
        share = self._maker.make(message, self._steps)
        self._steps += 1
        logits = self.model.run(share.batch, self._attention(share))
        for choice in share.choices:
            self.tally.add(choice)
        gathered = self._gather(logits, share) if share.most_sampled else logits[:0]
        self.tally.sent_bytes += sum(size for _, size in self.groups.data.traffic.take().values())
        return share, gathered

    def take(self, message: PackedMessage | DecodeMessage) -> None:
        """A follower's step."""
        if isinstance(message, PackedMessage):
            self.step(unpack(message))
        else:
            assert self.decode is not None
            self.decode.run(message)
            self.note_captured()

    def note_captured(self) -> None:
        """A captured step was run."""
        assert self.decode is not None
        self.tally.add(CAPTURED)
        self.tally.sent_bytes += self.decode.take_sent_bytes()

    def _attention(self, share: RankStep) -> LayerAttention:
        return share.attention.on(self.pool, self.groups.data)

    def _gather(self, logits: Tensor, share: RankStep) -> Tensor | None:
        padded = logits.new_zeros(share.most_sampled, self.model.vocabulary)
        padded[: len(logits)] = logits
        parts = self.groups.data.gather(padded)
        if parts is None:
            return None
        places = sent(torch.tensor(share.sampled_from, dtype=torch.int64), logits.device)
        return parts[places[:, 0], places[:, 1]]


class ContextParallelModel:
    """The leader's side: a `StepModel`. `take_freed` gives the global slots that were freed since it was asked last."""

    def __init__(self, rank: RankModel, take_freed: Callable[[], Tensor]) -> None:
        self.rank = rank
        self.name = rank.model.name
        self.vocabulary = rank.model.vocabulary
        self.kv_shape = rank.model.kv_shape
        self._take_freed = take_freed

    @property
    def device(self) -> torch.device:
        return self.rank.model.device

    def step_bytes(self, step_tokens: int, rows: int) -> int:
        """See `StepModel`."""
        return self.rank.model.step_bytes(step_tokens, rows)

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """See `StepModel`; `batch` is over global slots, `pool` the leader's own."""
        assert pool is self.rank.pool, "the leader's executor works on another pool"
        message = StepMessage.of(batch, self._take_freed())
        if self.rank.slots.ranks > 1:
            self.rank.groups.control.broadcast_object(pack(message))
        _, logits = self.rank.step(message)
        assert logits is not None
        return logits

    def close(self) -> None:
        """Let the followers end."""
        self.rank.groups.control.broadcast_object(None)


@torch.inference_mode()
def follow(rank: RankModel) -> None:
    """A follower's life: steps as the leader sends them, until it closes. RuntimeError when a rank is lost."""
    while (message := rank.groups.control.broadcast_object(None)) is not None:
        rank.take(message)
