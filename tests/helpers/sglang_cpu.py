"""SGLang in a process without a GPU: stand-ins for what it imports there and never calls. To be set up before SGLang is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = ("IPython", "torchvision")  # imported, not used by a text model on a CPU
NEEDED_MODELS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_causal")


def prepare() -> None:
    """Idempotent. Model classes that no test loads are not imported: there are some hundred and eighty of them."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_models())
    if "sgl_kernel" not in sys.modules:
        sys.modules["sgl_kernel"] = _Kernels("sgl_kernel")
    for package in ABSENT:
        if importlib.util.find_spec(package) is None:
            sys.meta_path.append(_Finder(package))


def _other_models() -> list[str]:
    files = importlib.metadata.files("sglang") or []
    names = {file.stem for file in files if file.as_posix().startswith("sglang/srt/models/") and len(file.parts) == 4}
    return sorted(names - set(NEEDED_MODELS) - {"__init__"})


class _Kernels(ModuleType):
    """The CUDA package `sgl_kernel`, whose CPU functions 0.5.23 asks for by name; calling one is an error."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_cpu"):
            raise AttributeError(f"the stand-in for sgl_kernel has no {name}")

        def called(*args: Any, **named: Any) -> None:
            raise RuntimeError(f"sgl_kernel.{name} was called")

        return called


class _AnyNames(type):
    """A class in which every name exists."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Package(ModuleType):
    """A package in which every name exists: submodules, classes (upper case), decorators."""

    __path__ = ()
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = _AnyNames(name, (), {"__module__": self.__name__}) if name[0].isupper() else _Package(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not named else lambda function: function


class _Finder:
    """Finds `_Package`s for one top-level name."""

    def __init__(self, top: str) -> None:
        self.top = top

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.split(".")[0] != self.top:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""
