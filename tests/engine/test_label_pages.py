"""Where label trees lie in pages: no slot twice, every row's keys a run of pages below what comes before, every cut within its places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.label_pages import LabelPages
from askmany.engine.labels import LabelTrie, label_trie

TREE = label_trie("abcd", [(1, 2, 3, 9), (1, 4, 9), (1, 5, 6, 7, 8, 9), (8,)], end_token_id=0)  # below 1: (2 3), (4), (5 6 7 8)


@st.composite
def tries(draw: st.DrawFn) -> LabelTrie:
    ids = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple), min_size=2, max_size=9, unique=True))
    return label_trie([str(i) for i in range(len(ids))], ids, end_token_id=0)


def test_a_tree_by_hand() -> None:
    """A tail of 3 in pages of 2: tail, trunk and first chain in pages 0 to 2, the others in two pages each."""
    laid = LabelPages(3, TREE, 2)
    assert TREE.feed == (1, 2, 3, 4, 5, 6, 7, 8)
    assert (TREE.starts, TREE.trunk, TREE.longest) == ((0, 3, 4, 8), 1, 4)
    assert (laid.straight, laid.pages) == (6, 7)
    assert laid.slots([10, 20, 30, 40, 50, 60, 70], 0, 11) == [20, 21, 40, 41, 60, 61, 80, 120, 121, 140, 141]
    assert [(p.start, p.stop, p.first, p.page, p.above) for p in laid.pieces(2, 9)] == [(2, 6, 0, 0, 0), (6, 7, 6, 3, 4), (7, 9, 7, 5, 4)]
    assert (laid.places(0, 3), laid.places(2, 6), laid.places(0, 11), laid.places(9, 10)) == (1, 4, 10, 2)


def test_labels_of_one_chain_take_no_page_more() -> None:
    laid = LabelPages(3, label_trie("ab", [(5, 6), (5, 7)], None), 4)
    assert (laid.straight, laid.pages, laid.labels.longest) == (4, 1, 0)
    flat = LabelPages(5, label_trie("ab", [(5,), (7,)], None), 4)
    assert (flat.straight, flat.pages, flat.places(0, 5), next(flat.pieces(1, 4)).length) == (5, 2, 1, 4)


@given(tries(), st.integers(1, 9), st.integers(1, 5), st.data())
def test_every_row_reads_its_own_way_and_no_slot_is_used_twice(trie: LabelTrie, tail: int, page_size: int, data: st.DataObject) -> None:
    laid = LabelPages(tail, trie, page_size)
    total = tail + len(trie.feed)
    pages = data.draw(st.permutations(range(100, 100 + laid.pages)))
    slots = laid.slots(pages, 0, total)
    assert len(set(slots)) == total
    assert {slot // page_size for slot in slots} <= set(pages)
    cut = data.draw(st.integers(0, total))
    assert laid.slots(pages, 0, cut) + laid.slots(pages, cut, total) == slots
    for start, stop in ((0, cut), (cut, total)):
        covered = []
        for piece in laid.pieces(start, stop):
            own = pages[piece.page : piece.last_page]
            keys = [own[i // page_size] * page_size + i % page_size for i in range(piece.length)]
            for index in range(piece.start, piece.stop):
                seen = slots[: piece.above] + keys[: index - piece.first + 1]
                way = [*range(tail), *(tail + node for node in trie.path(index - tail))] if index >= tail else range(index + 1)
                assert seen == [slots[i] for i in way]
                covered.append(index)
        assert covered == list(range(start, stop))


@given(tries(), st.integers(1, 9), st.integers(2, 12), st.data())
def test_a_cut_takes_no_more_than_its_places_and_goes_as_far_as_it_can(
    trie: LabelTrie, tail: int, places: int, data: st.DataObject
) -> None:
    laid = LabelPages(tail, trie, 4)
    total = tail + len(trie.feed)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    end = laid.fitting(start, stop, places)
    assert start < end <= stop
    assert laid.places(start, end) <= places
    assert end == stop or laid.places(start, end + 1) > places
    asks = sum(bool(trie.asked[index - tail + 1]) for index in range(max(start, tail - 1), end))
    pieces = list(laid.pieces(start, end))
    prefixes = any(piece.above for piece in pieces)
    assert asks + prefixes <= laid.places(start, end)
    assert len(pieces) + prefixes <= laid.places(start, end)
    assert laid.fitting(start, stop, 0) == start
