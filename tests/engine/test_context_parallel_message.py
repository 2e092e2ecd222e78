"""A step's message arrives as it was sent, and slots that count up take little room."""

from __future__ import annotations

import pickle
from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from askmany.engine.context_parallel_message import pack, packed, unpack, unpacked
from askmany.engine.context_parallel_step import StepMessage
from askmany.kernels.layout import PrivateItem, SharedItem, SplitBatch

NUMBERS = st.lists(st.integers(-1, 40) | st.integers(0, 1 << 40), max_size=60)


@given(NUMBERS, st.integers(0, 1 << 40), st.integers(0, 300))
@settings(max_examples=80, deadline=None)
def test_numbers_arrive_as_they_were(scattered: list[int], start: int, count: int) -> None:
    numbers = torch.tensor([*scattered[:5], *range(start, start + count), *scattered[5:]], dtype=torch.int64)
    arrived = unpacked(pickle.loads(pickle.dumps(packed(numbers))))
    assert arrived.dtype == torch.int64
    assert torch.equal(arrived, numbers)


def test_a_message_arrives_whole_and_a_long_document_is_short() -> None:
    document = torch.arange(1 << 17)
    message = StepMessage(
        token_ids=torch.tensor([3, 1, 4]),
        positions=torch.tensor([131_072] * 3),
        store_slots=torch.tensor([200_001, 200_018, 200_040]),
        attention=SplitBatch(
            (SharedItem(torch.arange(3), document), SharedItem(torch.tensor([0, 2]), document[5:100])),
            (PrivateItem(0, 1, torch.tensor([200_000, 200_001])), PrivateItem(1, 2, torch.arange(200_016, 200_041))),
        ),
        sampled_rows=torch.tensor([0, 2]),
        prefix_rows=0,
        freed=torch.zeros(0, dtype=torch.int64),
    )
    sent = pickle.dumps(pack(message))
    assert len(sent) < 5000
    arrived = unpack(pickle.loads(sent))
    for field in fields(StepMessage):
        mine, theirs = getattr(message, field.name), getattr(arrived, field.name)
        if isinstance(mine, Tensor):
            assert torch.equal(mine, theirs), field.name
    assert arrived.prefix_rows == 0
    for ours, other in zip(message.attention.shared, arrived.attention.shared, strict=True):
        assert torch.equal(ours.rows, other.rows)
        assert torch.equal(ours.slots, other.slots)
    for own, got in zip(message.attention.private, arrived.attention.private, strict=True):
        assert (own.row_start, own.row_count) == (got.row_start, got.row_count)
        assert torch.equal(own.slots, got.slots)
