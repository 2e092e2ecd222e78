import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.admission import Admission, Claim
from askmany.engine.pages import PagePool
from askmany.engine.prefix_tree import PrefixTree
from askmany.engine.request import DocumentState
from tests.helpers.workload import make_document


def make_admission(page_count: int, max_claims: int = 100, max_per_document: int = 100) -> Admission:
    pool = PagePool(page_count, 1)
    return Admission(pool, PrefixTree(pool), max_claims, max_per_document)


def submit(admission: Admission, key: str, path: tuple[int, ...], claims: list[int]) -> list[Claim]:
    """A document with segments of `path` pages, the first of them shared by documents of its length, and claims of so many pages."""
    segments = [[0] * path[0], *([ord(key[-1])] * length for length in path[1:])]
    state = DocumentState(make_document(key, segments, []))
    made = [Claim(state, (), tokens) for tokens in claims]
    admission.submit(state, made)
    return made


def names(claims: list[Claim]) -> list[tuple[str, int]]:
    return [(claim.document.document.key, claim.tokens) for claim in claims]


def complete(admission: Admission) -> None:
    for state in admission.resident:
        for node in state.path:
            node.stored = len(node.token_ids)


def test_claims_start_in_order_as_pages_allow() -> None:
    admission = make_admission(9)
    first = submit(admission, "a", (1, 2), [2, 3])
    submit(admission, "b", (1, 1), [1, 1])
    assert names(admission.start()) == [("a", 2), ("a", 3)]  # 8 pages; b needs 1 + 1 more
    assert [state.document.key for state in admission.resident] == ["a"]
    assert admission.start() == []
    complete(admission)
    admission.end(first[0])
    later = admission.start()
    assert names(later) == [("b", 1), ("b", 1)]
    assert [state.document.key for state in admission.resident] == ["a", "b"]
    admission.check_integrity([first[1], *later])


def test_a_big_claim_is_not_overtaken_by_later_small_ones() -> None:
    admission = make_admission(10)
    a = submit(admission, "a", (1, 1), [4, 6])
    submit(admission, "b", (1, 1), [1])
    assert names(admission.start()) == [("a", 4)]
    complete(admission)
    admission.end(a[0])
    assert names(admission.start()) == [("a", 6), ("b", 1)]


def test_a_document_at_its_cap_is_passed_over_and_places_are_limited() -> None:
    admission = make_admission(30, max_claims=3, max_per_document=1)
    a = submit(admission, "a", (1, 1), [1, 1])
    b = submit(admission, "b", (1, 1), [1, 1])
    submit(admission, "c", (1, 1), [1])
    submit(admission, "d", (1, 1), [1])
    assert [key for key, _ in names(admission.start())] == ["a", "b", "c"]
    complete(admission)
    admission.end(b[0])
    assert [key for key, _ in names(admission.start())] == ["b"]
    admission.end(a[0])
    assert [key for key, _ in names(admission.start())] == ["a"]


def test_paths_that_could_lock_each_other_out_are_not_admitted_together() -> None:
    """Paths of 3 + 3 pages and a later claim of 5 in a pool of 10: with both paths held the claim could never start."""
    admission = make_admission(10, max_per_document=1)
    a = submit(admission, "a", (3,), [1, 5])
    state = DocumentState(make_document("b", [[9] * 3], []))
    b = [Claim(state, (), 1), Claim(state, (), 1)]
    admission.submit(state, b)
    assert names(admission.start()) == [("a", 1)]
    complete(admission)
    admission.end(a[0])
    assert names(admission.start()) == [("a", 5)]
    admission.end(a[1])
    assert names(admission.start()) == [("b", 1)]


def test_pages_of_a_finished_document_are_reused_before_they_are_evicted() -> None:
    admission = make_admission(10)
    (claim,) = submit(admission, "a", (1, 2), [1])
    admission.start()
    complete(admission)
    admission.end(claim)
    assert not admission.has_work
    assert admission.tree.room_pages == 10
    submit(admission, "a", (1, 2), [5])
    admission.start()
    assert admission.tree.stats.hit_tokens == 3


@pytest.mark.parametrize("spoil", ["lost", "twice", "count"])
def test_check_integrity_sees_what_is_wrong(spoil: str) -> None:
    admission = make_admission(10)
    claims = submit(admission, "a", (1, 2), [2, 2])
    admission.start()
    admission.check_integrity(claims)
    if spoil == "lost":
        claims[0].pages = claims[0].pages[:1]
    elif spoil == "twice":
        claims[0].pages = list(claims[1].pages)
    else:
        claims = claims[:1]
    with pytest.raises(AssertionError):
        admission.check_integrity(claims)


SHAPES = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=6)), min_size=1, max_size=8)


@given(SHAPES, st.integers(0, 12), st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_random_work_never_deadlocks_and_ends_with_every_page_free(
    shapes: list[tuple[int, list[int]]], spare: int, max_claims: int, cap: int, rng: random.Random
) -> None:
    """Claims end in random order, none while anything can start; the pool just holds the largest document, or a little more."""
    admission = make_admission(max(2 + path + max(claims) for path, claims in shapes) + spare, max_claims, cap)
    waiting = list(enumerate(shapes))
    order: dict[str, list[int]] = {}
    live: list[Claim] = []
    while waiting or admission.has_work:
        while waiting and (not admission.has_work or rng.random() < 0.5):
            number, (path, claims) = waiting.pop(0)
            submit(admission, f"d{number}", (2, path), claims)
        started = admission.start()
        live += started
        for claim in started:
            order.setdefault(claim.document.document.key, []).append(claim.tokens)
        assert live, "work waits and nothing runs"
        assert len(live) <= max_claims
        admission.check_integrity(live)
        complete(admission)
        for _ in range(rng.randrange(1, 3)):
            if live:
                admission.end(live.pop(rng.randrange(len(live))))
        admission.check_integrity(live)
    assert order == {f"d{number}": claims for number, (_, claims) in enumerate(shapes)}
    assert list(order) == sorted(order), "a document was overtaken"
    admission.tree.clear()
    assert admission.pool.available == admission.pool.page_count
