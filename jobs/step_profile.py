"""What a decode step spends its time on, launch by launch, from PyTorch's profiler: the kernels of long answers less those of short ones.

A launch that starts beside the one before it (programmatic dependent launch) shows at its full length, its waiting included, so that the
launches' times add up to more than `covered_us`, in which any of them ran. Profiled steps are slower than others: shares count here.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}  # of trace events that are work of the device
NAME_LENGTH = 96  # characters kept of a kernel's name, which may be a page of template arguments

Launch = tuple[str, str]  # a kernel's name, its grid


@dataclass
class Profile:
    """Launches by name and grid: how many, and microseconds of all of them; and in how many microseconds any ran."""

    counts: Counter[Launch] = field(default_factory=Counter)
    micros: Counter[Launch] = field(default_factory=Counter)
    covered_us: float = 0.0

    def step(self, shorter: Profile, steps: int) -> dict[str, Any]:
        """A step of the `steps` that this one has beyond `shorter`: `covered_us`, and `launches`, the longest first."""
        rows = [
            {"name": name, "grid": grid, "launches": (count - shorter.counts[name, grid]) / steps,
             "us": (self.micros[name, grid] - shorter.micros[name, grid]) / steps}
            for (name, grid), count in self.counts.items() if count > shorter.counts[name, grid]
        ]  # fmt: skip
        return {"covered_us": (self.covered_us - shorter.covered_us) / steps, "launches": sorted(rows, key=lambda row: -row["us"])}


def profiled(work: Callable[[], object], device: torch.device) -> Profile:
    """`work`, once."""
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as running:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="askmany-profile-") as scratch:
        file = Path(scratch) / "trace.json"
        running.export_chrome_trace(str(file))
        return read(json.loads(file.read_text())["traceEvents"], KINDS[device.type])


def read(events: Iterable[Mapping[str, Any]], kinds: tuple[str, ...]) -> Profile:
    """A profile of a trace's events of these kinds."""
    found, until = Profile(), 0.0
    for event in sorted((e for e in events if e.get("cat") in kinds and e.get("ph") == "X"), key=lambda e: e["ts"]):
        grid = "x".join(str(size) for size in event.get("args", {}).get("grid", []))
        launch = event["name"][:NAME_LENGTH], grid
        found.counts[launch] += 1
        found.micros[launch] += event["dur"]
        end = event["ts"] + event["dur"]
        found.covered_us += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return found


def text(step: Mapping[str, Any], most: int = 24) -> str:
    """A table for the terminal."""
    head = f"launches cover {step['covered_us']:.0f} us a step"
    rows = (f"{row['us']:9.1f} us {row['launches']:6.1f} x {row['grid']:>12} {row['name']}" for row in step["launches"][:most])
    return "\n".join([head, *rows])
