import pytest
from hypothesis import given
from hypothesis import strategies as st

from askmany.engine.pages import PagePool
from askmany.engine.prefix_tree import PrefixNode, PrefixStats, PrefixTree

INSTRUCTION = (1, 2, 3)


def make_tree(page_count: int, page_size: int = 4) -> PrefixTree:
    return PrefixTree(PagePool(page_count, page_size))


def fill(path: list[PrefixNode]) -> None:
    for node in path:
        node.stored = len(node.token_ids)


def must_acquire(tree: PrefixTree, segments: tuple[tuple[int, ...], ...]) -> list[PrefixNode]:
    path = tree.acquire(segments)
    assert path is not None
    return path


def test_two_documents_share_the_instruction_even_while_it_is_prefilled() -> None:
    tree = make_tree(10)
    first = must_acquire(tree, (INSTRUCTION, (4,) * 5))
    second = must_acquire(tree, (INSTRUCTION, (5,) * 9))
    assert first[0] is second[0]
    assert (first[0].refs, first[1].refs, second[1].refs) == (2, 1, 1)
    assert (first[0].start, first[1].start, second[1].start) == (0, 3, 3)
    assert [len(node.pages) for node in (*first, second[1])] == [1, 2, 3]
    assert second[1].ancestors == (first[0],)
    assert tree.pool.available == 4
    assert tree.stats == PrefixStats(hit_tokens=3, missed_tokens=3 + 5 + 9)
    tree.check_integrity()


def test_the_same_tokens_under_another_parent_are_another_node() -> None:
    tree = make_tree(10)
    first, second = must_acquire(tree, ((1,), (9,))), must_acquire(tree, ((2,), (9,)))
    assert first[1] is not second[1]
    assert must_acquire(tree, ((9,),))[0] not in (first[1], second[1])
    tree.check_integrity()


def test_complete_paths_stay_cached_and_are_found_again() -> None:
    tree = make_tree(10)
    path = must_acquire(tree, (INSTRUCTION, (4,) * 5))
    fill(path)
    tree.release(path)
    assert (tree.pool.available, tree.room_pages) == (7, 10)
    again = must_acquire(tree, (INSTRUCTION, (4,) * 5))
    assert again == path
    assert all(node.complete for node in again)
    assert tree.stats == PrefixStats(hit_tokens=8, missed_tokens=8)


def test_what_the_last_user_left_incomplete_is_dropped() -> None:
    tree = make_tree(10)
    path = must_acquire(tree, (INSTRUCTION, (4,) * 5))
    path[0].stored, path[1].stored = 3, 2
    tree.release(path)
    assert list(tree.nodes()) == [path[0]]
    assert path[1].pages == []
    assert tree.pool.available == 9
    tree.check_integrity()


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    tree = make_tree(5, page_size=1)
    for last in (10, 11, 12):
        path = must_acquire(tree, ((1,), (last,)))
        fill(path)
        tree.release(path)
    tree.release(must_acquire(tree, ((1,), (10,))))  # 10 is the most recent leaf now
    assert tree.make_room(2)
    assert [node.token_ids for node in tree.nodes()] == [(1,), (12,), (10,)]
    assert tree.make_room(4)
    assert [node.token_ids for node in tree.nodes()] == [(1,)]
    assert tree.stats.evicted_tokens == 3
    tree.clear()
    assert list(tree.nodes()) == []
    assert tree.pool.available == 5


def test_a_failed_acquire_changes_nothing() -> None:
    tree = make_tree(6, page_size=1)
    held = must_acquire(tree, ((1,), (2, 2)))
    cached = must_acquire(tree, ((1,), (3,)))
    fill([*held, *cached])
    tree.release(cached)
    before = ([(node, node.refs, node.last_used) for node in tree.nodes()], tree.pool.free_pages(), tree.stats)
    assert tree.acquire(((1,), (4, 4, 4, 4))) is None
    assert tree.acquire(((1,), (4, 4)), spare_pages=2) is None
    assert tree.acquire(((1,), (3,)), spare_pages=3) is None  # (3,) itself cannot be both found and evicted
    assert not tree.make_room(4)
    assert before == ([(node, node.refs, node.last_used) for node in tree.nodes()], tree.pool.free_pages(), tree.stats)
    assert tree.acquire(((1,), (3,)), spare_pages=2) == cached
    assert tree.pool.available == 2


def test_a_path_larger_than_the_pool_is_an_error() -> None:
    with pytest.raises(ValueError, match="a path of 4 pages in a pool of 3"):
        make_tree(3).acquire(((1,), (2,) * 12))


def test_releasing_twice_fails() -> None:
    tree = make_tree(3)
    path = must_acquire(tree, ((1,),))
    fill(path)
    tree.release(path)
    with pytest.raises(AssertionError, match="released twice"):
        tree.release(path)


@pytest.mark.parametrize("spoil", ["refs", "pages", "stored", "start", "idle"])
def test_check_integrity_sees_what_is_wrong(spoil: str) -> None:
    tree = make_tree(8)
    path = must_acquire(tree, ((1,), (2,) * 5))
    if spoil == "refs":
        path[1].refs = 3
    elif spoil == "pages":
        path[1].pages = [*path[0].pages, 5]
    elif spoil == "stored":
        path[1].stored = 2
    elif spoil == "start":
        path[1].start = 2
    else:
        path[1].refs = 0
    with pytest.raises(AssertionError):
        tree.check_integrity()


SEGMENTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3).map(tuple)


@given(st.integers(6, 14), st.integers(1, 3), st.lists(st.tuples(SEGMENTS, st.booleans(), st.integers(0, 9)), max_size=40))
def test_random_paths_keep_the_tree_sound(
    page_count: int, page_size: int, actions: list[tuple[tuple[tuple[int, ...], ...], bool, int]]
) -> None:
    tree = make_tree(page_count, page_size)
    held: list[tuple[tuple[tuple[int, ...], ...], list[PrefixNode]]] = []
    for segments, take, choice in actions:
        if take and tree.path_pages(segments) <= page_count:
            referenced = {node for node in tree.nodes() if node.refs}
            path = tree.acquire(segments, spare_pages=choice % 3)
            if path is None:
                held_pages = sum(len(node.pages) for node in referenced)
                found = sum(len(node.pages) for node in referenced if node in _match(tree, segments))
                assert held_pages - found + tree.path_pages(segments) + choice % 3 > page_count
            else:
                assert tuple(node.token_ids for node in path) == segments
                assert referenced <= set(tree.nodes())
                assert tree.room_pages >= choice % 3
                held.append((segments, path))
        elif held:
            _, path = held.pop(choice % len(held))
            if choice % 2:
                fill(path)
            tree.release(path)
        tree.check_integrity()
        assert all(tuple(node.token_ids for node in path) == segments for segments, path in held)
    for _, path in held:
        tree.release(path)
    assert tree.room_pages == page_count
    tree.clear()
    assert tree.pool.available == page_count


def _match(tree: PrefixTree, segments: tuple[tuple[int, ...], ...]) -> list[PrefixNode]:
    found: list[PrefixNode] = []
    for segment in segments:
        parent = found[-1] if found else None
        node = next((n for n in tree.nodes() if n.parent is parent and n.token_ids == segment), None)
        if node is None:
            break
        found.append(node)
    return found
