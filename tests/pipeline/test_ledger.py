import json
from pathlib import Path

from askmany.pipeline.ledger import Ledger, read_ledger
from askmany.pipeline.storage import ObjectStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_back_in_order_over_segments_and_epochs(tmp_path: Path) -> None:
    store, clock = ObjectStore(str(tmp_path), {}), Clock()
    first = Ledger(store, 1, period_s=10, max_lines=3, clock=clock)
    for number in range(7):
        first.write("group", {"group": f"g{number}", "records": number})
    first.flush()
    first.flush()
    second = Ledger(store, 2, clock=clock)
    second.write("event", {"event": "launched"})
    second.flush()
    assert list(store.list("ledger")) == [
        f"ledger/{name}.jsonl" for name in ("00000001-000000", "00000001-000001", "00000001-000002", "00000002-000000")
    ]
    lines = list(read_ledger(store))
    assert [line["group"] for line in lines[:-1]] == [f"g{number}" for number in range(7)]
    assert lines[-1] == {"kind": "event", "at": 100.0, "event": "launched"}


def test_a_segment_is_written_when_its_time_has_come(tmp_path: Path) -> None:
    store, clock = ObjectStore(str(tmp_path), {}), Clock()
    ledger = Ledger(store, 1, period_s=10, clock=clock)
    ledger.write("group", {"group": "a"})
    assert list(read_ledger(store)) == []
    clock.now += 10
    ledger.write("group", {"group": "b"})
    assert [line["group"] for line in read_ledger(store)] == ["a", "b"]


def test_a_broken_line_is_passed_over(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), {})
    store.put("ledger/00000001-000000.jsonl", b'{"kind": "group", "group": "a"}\n{"kind": "gro\n7\n' + json.dumps({"kind": "x"}).encode())
    assert [line["kind"] for line in read_ledger(store)] == ["group", "x"]
