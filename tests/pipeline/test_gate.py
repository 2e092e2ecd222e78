import threading
import time

import pytest

from askmany.pipeline.gate import Gate


def test_suspects_are_alone_and_get_their_turn() -> None:
    gate, lock = Gate(), threading.Lock()
    inside, seen, most = [0], [], [0]

    def ordinary() -> None:
        for _ in range(20):
            with gate.shared():
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                with lock:
                    inside[0] -= 1

    def suspect() -> None:
        for _ in range(5):
            with gate.exclusive():
                seen.append(inside[0])
                time.sleep(0.002)
                seen.append(inside[0])

    threads = [threading.Thread(target=ordinary) for _ in range(4)] + [threading.Thread(target=suspect) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [0] * 20
    assert most[0] > 1


def test_an_error_inside_opens_the_gate_again() -> None:
    gate = Gate()
    for passage in (gate.exclusive, gate.shared, gate.exclusive):
        with pytest.raises(ValueError, match="inside"), passage():
            raise ValueError("inside")
