import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.pages import PagePool


def test_a_fresh_pool_is_free_and_allocates_in_order() -> None:
    pool = PagePool(5, 16)
    assert (pool.available, pool.pages_for(0), pool.pages_for(1), pool.pages_for(16), pool.pages_for(17)) == (5, 0, 1, 1, 2)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.available == 0


def test_the_shortest_run_that_fits_is_taken_whole() -> None:
    pool = PagePool(12, 1)
    pool.allocate(12)
    pool.free([0, 1, 2, 3, 6, 7, 9])  # runs of 4, 2 and 1
    assert pool.allocate(2) == [6, 7]
    assert pool.allocate(1) == [9]
    assert pool.allocate(3) == [0, 1, 2]


def test_without_a_run_that_fits_pages_come_from_several() -> None:
    pool = PagePool(6, 1)
    pool.allocate(6)
    pool.free([5, 0, 2, 3])
    assert pool.allocate(3) == [0, 2, 3]
    assert pool.allocate(1) == [5]


@pytest.mark.parametrize("count", [0, -1])
def test_an_empty_pool_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"got {count} pages of 16"):
        PagePool(count, 16)
    with pytest.raises(ValueError, match=f"pages of {count} slots"):
        PagePool(4, count)


def test_bugs_of_the_caller_fail() -> None:
    pool = PagePool(4, 1)
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        pool.allocate(5)
    with pytest.raises(AssertionError, match="page 2 is free already"):
        pool.free([2])
    with pytest.raises(AssertionError, match="page 4 of a pool of 4"):
        pool.free([4])
    with pytest.raises(AssertionError, match="page -1 of a pool of 4"):
        pool.free([-1])
    pages = pool.allocate(3)
    with pytest.raises(AssertionError, match="page 3 is free already"):
        pool.free([2, 3])
    pool.free(pages)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(pages)
    with pytest.raises(AssertionError, match="page 0 is free already"):
        pool.free([*pool.allocate(1), 0])


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.randoms(use_true_random=False)), max_size=60))
def test_pages_are_neither_lost_nor_shared(page_count: int, actions: list[tuple[bool, int, random.Random]]) -> None:
    pool = PagePool(page_count, 3)
    held: list[list[int]] = []
    for take, count, rng in actions:
        if take and count <= pool.available:
            before = pool.free_pages()
            pages = pool.allocate(count)
            assert len(pages) == count
            assert set(pages) <= before
            if any(set(range(start, start + count)) <= before for start in range(page_count)):
                assert pages == list(range(min(pages, default=0), min(pages, default=0) + count))
            held.append(pages)
        elif held:
            pages = held.pop(rng.randrange(len(held)))
            rng.shuffle(pages)
            pool.free(pages)
        pool.check()
        owned = [page for pages in held for page in pages]
        assert len(set(owned)) == len(owned)
        assert pool.free_pages() == set(range(page_count)) - set(owned)
        assert pool.available == page_count - len(owned)
    for pages in held:
        pool.free(pages)
    assert pool.allocate(page_count) == list(range(page_count))
