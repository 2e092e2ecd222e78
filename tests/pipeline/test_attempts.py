import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.pipeline.attempts import History, Marks, cut_suspects, part_size, unfinished
from askmany.pipeline.storage import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path), {})


def test_a_group_never_begun_has_no_history(store: ObjectStore) -> None:
    assert Marks(store, "7", "g").look() == (History(), [])


def test_marks_tell_what_was_in_flight_and_what_was_kept(store: ObjectStore) -> None:
    marks = Marks(store, "7", "g")
    marks.begin(1)
    marks.begin(2)
    marks.begin_part(2, 0, ["a", "b"])
    store.put(marks.kept_name(2, 0), b"kept")
    marks.begin_part(2, 1, ["c", "d"])
    history, kept = marks.look()
    assert history.in_flight == (None, frozenset({"c", "d"}))
    assert history.next_attempt == 3
    assert history.deaths(["a", "c"]) == {"a": 1, "c": 2}
    assert kept == [marks.kept_name(2, 0)]
    assert Marks(store, "8", "g").look() == (History(), kept)
    marks.forgive(2)
    assert marks.look() == (History((None,)), kept)
    marks.clear()
    assert marks.look() == (History(), [])


def test_parts_shrink_to_one() -> None:
    assert [part_size(100, deaths, 3) for deaths in (0, 1, 2)] == [100, 10, 1]
    assert [part_size(1000, deaths, 4) for deaths in (0, 1, 2, 3)] == [1000, 100, 10, 1]
    assert part_size(100, 1, 2) == 1


def _run(doc_ids: list[str], poison: set[str], limit: int) -> tuple[set[str], set[str], int, dict[str, int]]:
    """Play the protocol: answered, given up, worker deaths, and how many processes each document was in at its end."""
    flights: list[frozenset[str] | None] = []
    done: set[str] = set()
    died_in: dict[str, int] = dict.fromkeys(doc_ids, 0)
    while True:
        history = History(tuple(flights))
        left = unfinished(doc_ids, done)
        parts, given_up = cut_suspects(left, history.deaths(left), limit)
        killed = None
        for part in parts:
            if poison & set(part):
                killed = part
                break
            done |= set(part)
        if killed is None:
            return done, set(given_up), len(flights), died_in
        for doc_id in killed:
            died_in[doc_id] += 1
        flights.append(frozenset(killed))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 60), st.integers(0, 4), st.integers(2, 5), st.integers(0, 10**6))
def test_poison_alone_is_given_up_at_a_bounded_price(count: int, poisonous: int, limit: int, seed: int) -> None:
    doc_ids = [f"d{n}" for n in range(count)]
    poison = set(random.Random(seed).sample(doc_ids, min(poisonous, count)))
    done, given_up, deaths, died_in = _run(doc_ids, poison, limit)
    assert given_up == poison
    assert done == set(doc_ids) - given_up
    assert all(died_in[doc_id] == limit for doc_id in poison)
    assert deaths <= limit * len(poison)


def test_one_try_gives_all_up() -> None:
    assert cut_suspects(["a", "b"], {"a": 1, "b": 1}, 1) == ([], ["a", "b"])
