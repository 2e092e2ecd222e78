"""The rules that keep a line of code in its room: who may import what.

`violations` judges one module by its path and source, so the rules are themselves tested on sources that break them. The imports that a
reader cannot see (an import of an import) are checked in a fresh interpreter.
"""

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source import FOLDERS, ROOT, Import, imports_of, module_name, python_files

# The engine modules that may import torch; every other module of the engine belongs to the host half.
DEVICE_HALF = {
    "batch",
    "chunk_pass",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_build",
    "context_parallel_decode",
    "context_parallel_hand_over",
    "context_parallel_join",
    "context_parallel_launch",
    "context_parallel_layout",
    "context_parallel_memory",
    "context_parallel_message",
    "context_parallel_rows",
    "context_parallel_slots",
    "context_parallel_step",
    "constraints",
    "executor",
    "grammar",
    "graphs",
    "idle",
    "kernel_loading",
    "kernel_steps",
    "held_rows",
    "invariant_check",
    "invariant_rows",
    "host_threads",
    "kv_pool",
    "masks",
    "loading",
    "masked_space",
    "memory",
    "model_sglang",
    "model_transformers",
    "model_probe",
    "model_surgery",
    "sampler",
    "scoring",
    "sglang_compat",
    "sglang_rotary",
    "side_stream",
    "space",
    "space_makers",
    "split_space",
    "staging",
    "step_attention",
    "workspaces",
}
# Who may import a foreign package, as patterns of paths. A package that is not named here is free, but for the rules below.
ALLOWED = {
    "sglang": ("engine/model_sglang.py", "engine/sglang_compat.py", "jobs/baselines_*.py"),
    "sgl_kernel": ("kernels/vendor.py",),
    "flash_attn": ("kernels/vendor.py",),
    "flash_attn_interface": ("kernels/vendor.py",),
    "flashinfer": ("kernels/vendor.py",),
    "transformers": ("engine/model_transformers.py", "jobs/*.py"),
    "xgrammar": ("engine/grammar.py", "engine/constraints.py"),
    "triton": ("kernels/*.py",),
    "ray": ("pipeline/*.py", "jobs/*.py"),
    "torch": ("kernels/*.py", "jobs/*.py", "pipeline/*.py", *(f"engine/{name}.py" for name in sorted(DEVICE_HALF))),
}
KERNELS_MAY = {"askmany", "torch", "triton", "numpy", *sys.stdlib_module_names}
HEAVY = ("torch", "triton", "transformers", "sglang", "xgrammar")


def is_host(path: str) -> bool:
    folder, _, name = path.partition("/")
    return folder == "engine" and name.removesuffix(".py") not in DEVICE_HALF


def violations(path: str, source: str) -> list[str]:
    """What the module at `path` (as `engine/x.py`) imports against the rules, one line each."""
    return [f"{path}:{found.line} {reason}" for found in imports_of(source) for reason in _reasons(path, found)]


def _reasons(path: str, found: Import) -> list[str]:
    folder = path.split("/")[0]
    reasons = []
    allowed = ALLOWED.get(found.top)
    if allowed is not None and not found.typing_only and not any(fnmatch.fnmatch(path, pattern) for pattern in allowed):
        reasons.append(f"imports {found.module}; only {', '.join(allowed)} may")
    if found.level:
        reasons.append("uses a relative import; write askmany.<folder>.<module>")
    if found.level == 0 and found.top in (*FOLDERS, "tests"):
        reasons.append(f"imports the bare name {found.module}; write askmany.{found.module}")
    if found.top == "askmany" and not found.typing_only:
        reasons += _layer(path, folder, found)
    if folder == "kernels" and path != "kernels/vendor.py" and found.top not in KERNELS_MAY:
        reasons.append(f"imports {found.module}; kernels know torch and triton alone")
    if path == "kernels/vendor.py" and found.top not in KERNELS_MAY and not found.lazy:
        reasons.append(f"imports {found.module} at module level; vendor kernels are imported lazily")
    if folder == "pipeline" and found.top in HEAVY and not found.lazy and not found.typing_only:
        reasons.append(f"imports {found.module} at module level; a driver has no use for it")
    return reasons


def _layer(path: str, folder: str, found: Import) -> list[str]:
    parts = found.module.split(".")
    target = parts[1] if len(parts) > 1 else ""
    if target not in FOLDERS:
        return []
    if FOLDERS.index(target) > FOLDERS.index(folder):
        return [f"imports {found.module}: jobs -> pipeline -> engine -> kernels, never back"]
    if target == "kernels" and is_host(path) and not found.lazy:
        return [f"imports {found.module}: the host half of the engine knows no kernels"]
    return []


MODULES = [path for folder in FOLDERS for path in python_files(folder)]


def test_the_rules_see_the_project() -> None:
    seen = {path.relative_to(ROOT).as_posix() for path in MODULES}
    assert {"engine/errors.py", "engine/request.py", "engine/step.py", "kernels/layout.py", "kernels/reference.py"} <= seen


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_keeps_the_rules(path: Path) -> None:
    assert violations(path.relative_to(ROOT).as_posix(), path.read_text()) == []


BROKEN = [
    ("engine/prompts.py", "import transformers"),
    ("engine/prompts.py", "def f():\n    from transformers import AutoTokenizer"),
    ("engine/scheduler.py", "import torch"),
    ("engine/scheduler.py", "from torch import nn"),
    ("engine/scheduler.py", "import importlib\nimportlib.import_module('torch')"),
    ("engine/scheduler.py", "from askmany.kernels.layout import SplitBatch"),
    ("engine/sampler.py", "import triton"),
    ("engine/sampler.py", "import sglang"),
    ("engine/engine.py", "import ray"),
    ("engine/engine.py", "from askmany.pipeline.plan import plan"),
    ("engine/engine.py", "from askmany.pipeline import plan"),
    ("engine/engine.py", "from .request import Stream"),
    ("engine/engine.py", "import kernels.layout"),
    ("engine/engine.py", "from engine.request import Stream"),
    ("kernels/merge.py", "from askmany.engine.request import Stream"),
    ("kernels/merge.py", "import pydantic"),
    ("kernels/merge.py", "import ray"),
    ("kernels/merge.py", "import flashinfer"),
    ("kernels/vendor.py", "import flashinfer"),
    ("pipeline/run.py", "from askmany.jobs.cli import app"),
    ("pipeline/run.py", "import torch"),
    ("pipeline/run.py", "import transformers"),
    ("jobs/run.py", "import sglang"),
    ("jobs/run.py", "import triton"),
    ("jobs/run.py", "from tests.helpers.source import ROOT"),
]
KEPT = [
    ("engine/model_transformers.py", "import torch\nfrom transformers import AutoModelForCausalLM"),
    ("engine/model_sglang.py", "import sglang"),
    ("engine/engine.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ("engine/batch.py", "from askmany.kernels.layout import SplitBatch"),
    ("kernels/merge.py", "import triton\nimport triton.language as tl"),
    ("kernels/vendor.py", "def load():\n    import flashinfer"),
    ("pipeline/worker.py", "import ray\ndef build():\n    from askmany.engine.executor import TorchExecutor"),
    ("jobs/baselines_sglang.py", "import sglang"),
    ("jobs/run.py", "from askmany.pipeline.run import run"),
]


@pytest.mark.parametrize(("path", "source"), BROKEN)
def test_a_broken_rule_is_seen(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(("path", "source"), KEPT)
def test_what_the_rules_allow_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


_FIRST_HEAVY = """
import importlib, json, sys
heavy, names = json.loads(sys.argv[1])
loaded = {}
for name in names:
    importlib.import_module(name)
    for package in heavy:
        if package in sys.modules:
            loaded.setdefault(package, name)
print(json.dumps(loaded))
"""


def _heavy_after(names: list[str], heavy: tuple[str, ...] = HEAVY) -> dict[str, str]:
    """Import modules one after another in a fresh interpreter; for each heavy package, the first module after which it was loaded."""
    command = [sys.executable, "-c", _FIRST_HEAVY, json.dumps([heavy, names])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_the_fresh_interpreter_sees_a_heavy_import() -> None:
    assert _heavy_after(["askmany.engine.request", "askmany.kernels.layout"]) == {"torch": "askmany.kernels.layout"}


def test_importing_the_host_half_loads_no_device_library() -> None:
    host = [module_name(path) for path in python_files("engine") if is_host(path.relative_to(ROOT).as_posix())]
    assert "askmany.engine.request" in host
    assert _heavy_after(["askmany", *host], (*HEAVY, "ray")) == {}


def test_importing_the_pipeline_loads_no_device_library() -> None:
    assert _heavy_after(["askmany", *(module_name(path) for path in python_files("pipeline"))]) == {}


def test_importing_the_command_line_loads_no_device_library() -> None:
    commands = [path for path in python_files("jobs") if path.stem in ("cli", "run", "plan", "status")]
    assert _heavy_after(["askmany", *(module_name(path) for path in commands)]) == {}
