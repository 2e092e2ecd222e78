import pytest

from askmany.jobs.simulate import Outcome, Scenario, VirtualPool, direct, ray_data, simulate


def _by_way(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {one.way: one for one in outcomes}


@pytest.mark.parametrize("seed", range(3))
def test_guided_groups_end_together_on_64_workers(seed: int) -> None:
    found = _by_way(simulate(Scenario(workers=64, documents=100_000, slow=0.45, noise=0.3, seed=seed)))
    assert 1.0 <= found["direct"].ratio <= 1.05
    assert 1.0 <= found["ray data"].ratio <= 1.15
    assert found["ray data"].ratio < found["ray data, input order"].ratio


def test_a_makespan_worked_out_by_hand() -> None:
    def pool() -> VirtualPool:
        return VirtualPool([1.0, 0.5], [4.0, 2.0, 1.0], [4.0, 2.0, 1.0])

    # Direct: the fast one takes the 4; the slow one's even share of the 3 left is 1, so it takes the 1 (ends at 2), then the 2 (at 6).
    assert direct(pool(), 3) == pytest.approx(6.0, abs=0.15)
    # Ray Data: fast the 4, slow the 2 (both end at 4), and the 1 waits behind the fast one from the start: 5.
    assert ray_data(pool(), 3) == pytest.approx(5.0, abs=0.15)


def test_nothing_to_do_takes_no_time() -> None:
    assert direct(VirtualPool([1.0], [], []), 0) == 0.0
    assert ray_data(VirtualPool([1.0], [], []), 0) == 0.0
