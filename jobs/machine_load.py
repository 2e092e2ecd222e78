"""How busy a machine's GPUs and this process are while something runs: samples twice a second, and what they come to over a span."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean


@contextmanager
def repeated(look: Callable[[], bool], every_s: float) -> Iterator[None]:
    """Meanwhile, call `look` in a thread of its own, until it says that it has seen what it was looking for."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s) and not look():
            pass

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def gpu_samples() -> Iterator[list[tuple[float, list[float]]]]:
    """(seconds since 1970, utilisation of each GPU from 0 to 1), twice a second; nothing where there is no nvidia-smi."""
    found: list[tuple[float, list[float]]] = []
    program = shutil.which("nvidia-smi")
    command = [str(program), "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]

    def sample() -> bool:
        if program:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found.append((time.time(), [float(line) / 100 for line in done.stdout.split()]))
        return not program

    with repeated(sample, 0.5):
        yield found


@contextmanager
def cpu_samples() -> Iterator[list[tuple[float, float]]]:
    """(seconds since 1970, processor seconds of this process), twice a second."""
    found: list[tuple[float, float]] = []

    def sample() -> bool:
        found.append((time.time(), time.process_time()))
        return False

    with repeated(sample, 0.5):
        yield found


def share_of_a_core(samples: list[tuple[float, float]], began: float, ended: float) -> float | None:
    """Processor seconds a second between the first and the last sample of a span; None with fewer than two."""
    inside = [sample for sample in samples if began <= sample[0] <= ended]
    if len(inside) < 2:
        return None
    (first, spent_before), *_, (last, spent) = inside
    return round((spent - spent_before) / (last - first), 4)


def mean_over(samples: list[tuple[float, list[float]]], began: float, ended: float, gpus: int) -> float | None:
    """The mean utilisation of the `gpus` busiest GPUs between two times; None without samples."""
    inside = [values for at, values in samples if began <= at <= ended]
    if not inside:
        return None
    means = sorted((fmean(column) for column in zip(*inside, strict=True)), reverse=True)
    return round(fmean(means[:gpus]), 4)


def device_name() -> str:
    """The GPUs of this machine, `cpu` without any."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return ", ".join(done.stdout.strip().splitlines()) or "cpu"
