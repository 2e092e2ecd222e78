"""The tensors of hand-made plans, worked out by hand: rows, positions, slots, items."""

from __future__ import annotations

import torch
from torch import Tensor

from askmany.engine.batch import build_batch, page_slots
from askmany.engine.prefix_tree import PrefixNode
from askmany.engine.request import Document, DocumentState, InterleavedRequest, Question, Sampling, Stream
from askmany.engine.step import MaskedRun, PrefixChunk, StepPlan, StreamRun
from askmany.kernels.layout import MaskedBatch, SplitBatch

# Pages of 4 slots. Instruction of 3 tokens in page 5, document A of 6 in pages 2 and 7, document B of 5 in pages 0 and 1.
INSTRUCTION = PrefixNode(None, (11, 12, 13), start=0, pages=[5], stored=3)
DOCUMENT_A = PrefixNode(INSTRUCTION, (21, 22, 23, 24, 25, 26), start=3, pages=[2, 7], stored=6)
DOCUMENT_B = PrefixNode(INSTRUCTION, (31, 32, 33, 34, 35), start=3, pages=[0, 1], stored=2)
STATE_A = DocumentState(Document("a", (INSTRUCTION.token_ids, DOCUMENT_A.token_ids), ()), path=[INSTRUCTION, DOCUMENT_A])


def make_stream(number: int, tail: tuple[int, ...], answer: list[int], pages: list[int]) -> Stream:
    return Stream(number, STATE_A, Question(f"q{number}", tail, Sampling(9)), pages=pages, answer_token_ids=answer)


def listed(*tensors: Tensor) -> list[list[int]]:
    return [tensor.tolist() for tensor in tensors]


def test_slots_of_scattered_pages() -> None:
    assert page_slots([3, 0, 9], 10, 4).tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 36, 37]
    assert page_slots([3, 0, 9], 4, 4).tolist() == [12, 13, 14, 15]
    assert page_slots([3], 1, 4).tolist() == [12]


def test_a_split_step() -> None:
    """A chunk of B, a stream of A that decodes its second answer token, and one that feeds a part of its tail."""
    decoding = make_stream(1, (41, 42), [51, 52], pages=[9])
    feeding = make_stream(2, (61, 62, 63), [], pages=[3])
    plan = StepPlan((PrefixChunk(DOCUMENT_B, 2, 5),), (StreamRun(decoding, 3, 4, samples=True), StreamRun(feeding, 0, 2, samples=False)))
    batch = build_batch(plan, page_size=4, slot_count=48)
    assert listed(batch.token_ids, batch.positions, batch.store_slots) == [
        [33, 34, 35, 52, 61, 62],
        [5, 6, 7, 12, 9, 10],
        [2, 3, 4, 39, 12, 13],
    ]
    assert batch.sampled_rows.tolist() == [3]
    assert batch.sampled_streams == (decoding,)
    attention = batch.attention
    assert isinstance(attention, SplitBatch)
    assert [(item.row_start, item.row_count, item.slots.tolist()) for item in attention.private] == [
        (0, 3, [0, 1, 2, 3, 4]),
        (3, 1, [36, 37, 38, 39]),
        (4, 2, [12, 13]),
    ]
    assert [listed(item.rows, item.slots) for item in attention.shared] == [
        [[0, 1, 2, 3, 4, 5], [20, 21, 22]],
        [[3, 4, 5], [8, 9, 10, 11, 28, 29]],
    ]


def test_shared_items_stand_from_the_top_of_the_tree_down() -> None:
    """Also when a deeper node is met first: B's own chunk comes before anything of A."""
    group = PrefixNode(DOCUMENT_A, (71, 72), start=9, pages=[10])
    plan = StepPlan((PrefixChunk(group, 0, 2), PrefixChunk(DOCUMENT_B, 0, 2)))
    batch = build_batch(plan, page_size=4, slot_count=48)
    assert isinstance(batch.attention, SplitBatch)
    assert [item.rows.tolist() for item in batch.attention.shared] == [[0, 1, 2, 3], [0, 1]]
    assert batch.positions.tolist() == [9, 10, 3, 4]
    assert batch.sampled_rows.tolist() == []


def test_an_interleaved_step() -> None:
    """Two streams in one row: 3 slots stored (sids 0, 1, 0), then one token of each; and a chunk of B beside it."""
    first, second = make_stream(1, (41, 42), [51], pages=[]), make_stream(2, (61, 62), [], pages=[])
    request = InterleavedRequest(STATE_A, (first, second), pages=[6, 4], sids=[0, 1, 0])
    run = MaskedRun(request, start=3, entries=((1, 1), (0, 2)), samples=(0, 1))
    batch = build_batch(StepPlan((PrefixChunk(DOCUMENT_B, 0, 1),), masked=(run,)), page_size=4, slot_count=48)
    assert listed(batch.token_ids, batch.positions, batch.store_slots) == [[31, 62, 51], [3, 10, 11], [0, 27, 16]]
    assert batch.sampled_rows.tolist() == [1, 2]
    assert batch.sampled_streams == (second, first)
    attention = batch.attention
    assert isinstance(attention, MaskedBatch)
    assert [(item.row_start, item.row_count, item.slots.tolist()) for item in attention.items] == [
        (0, 1, [20, 21, 22, 0]),
        (1, 2, [20, 21, 22, 8, 9, 10, 11, 28, 29, 24, 25, 26, 27, 16]),
    ]
    assert attention.q_sid.tolist() == [-1, 1, 0]
    assert attention.slot_sid[[24, 25, 26, 27, 16]].tolist() == [0, 1, 0, 1, 0]
    assert int((attention.slot_sid != -1).sum()) == 5
    assert attention.q_sid.dtype == attention.slot_sid.dtype == torch.int32
