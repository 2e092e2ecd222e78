import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from askmany.pipeline.watchdog import EXIT_HUNG, HangEvent, Watchdog

ROOT = Path(__file__).parents[2]


def test_it_fires_once_after_the_limit_and_names_the_stacks(tmp_path: Path) -> None:
    fired: list[tuple[HangEvent, str]] = []
    ended: list[int] = []
    done = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        done.set()

    started = time.monotonic()
    watchdog = Watchdog(0.4, lambda: True, lambda event, stacks: fired.append((event, stacks)), end, folder=str(tmp_path))
    assert done.wait(5)
    assert time.monotonic() - started >= 0.4
    assert ended == [EXIT_HUNG]
    event, stacks = fired[0]
    assert event.silent_s >= 0.4
    assert event.stacks == watchdog.stacks_file
    assert "test_it_fires_once" in stacks
    assert Path(event.stacks).read_text() == stacks
    watchdog.close()


def test_beats_and_idleness_hold_it_back(tmp_path: Path) -> None:
    ended: list[int] = []
    busy = [True]
    watchdog = Watchdog(1.0, lambda: busy[0], end=ended.append, folder=str(tmp_path))
    for _ in range(30):
        time.sleep(0.05)
        watchdog.beat()
    busy[0] = False
    time.sleep(1.5)
    assert ended == []
    watchdog.close()
    assert list(tmp_path.iterdir()) == []


_HANG = """
import sys, time
from askmany.pipeline.watchdog import Watchdog
{body}
"""


def _run(body: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    command = [sys.executable, "-c", _HANG.format(body=body), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60), time.monotonic() - started


def test_a_sleeping_process_dies_with_its_stacks(tmp_path: Path) -> None:
    body = "def stuck():\n    time.sleep(60)\nWatchdog(0.5, lambda: True, folder=sys.argv[1])\nstuck()"
    done, seconds = _run(body, tmp_path)
    assert done.returncode == EXIT_HUNG
    assert seconds < 20
    event = json.loads(done.stderr.splitlines()[-1])
    assert event["event"] == "worker_hung"
    assert "stuck" in Path(event["stacks"]).read_text()


def test_a_tell_that_hangs_does_not_save_the_process(tmp_path: Path) -> None:
    body = "Watchdog(0.3, lambda: True, lambda event, stacks: time.sleep(60), folder=sys.argv[1], grace_s=0.3)\ntime.sleep(60)"
    done, _ = _run(body, tmp_path)
    assert done.returncode == EXIT_HUNG


def test_a_hang_that_holds_the_interpreter_dies_too(tmp_path: Path) -> None:
    hold = "import ctypes\ntime.sleep(0.3)\nctypes.PyDLL(None).sleep(60)"  # PyDLL keeps the interpreter lock during the call
    done, seconds = _run(f"Watchdog(0.5, lambda: True, folder=sys.argv[1])\n{hold}", tmp_path)
    assert done.returncode != 0
    assert seconds < 20
    assert "Thread" in next(tmp_path.iterdir()).read_text()
