"""Triton's interpreter, made to work with the installed NumPy, and to do less beside the kernels' work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def repair() -> None:
    """NumPy 2.4 no longer turns arrays of one element into integers, which the interpreter of Triton 3.6 does for every loop bound. That
    interpreter patches the whole language again at each call of a device function, which takes longer than most such functions; and
    coverage, which leaves kernels out, would look at each of its calls."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__name__ == "patch_and_index":
        return

    def patch_and_index(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_and_index
    interpreter._patch_lang = _LaunchPatch(interpreter._patch_lang)
    interpreter.GridExecutor.__call__ = _untraced(interpreter.GridExecutor.__call__)


def _untraced(launch: Callable[..., None]) -> Callable[..., None]:
    """`launch` without a trace function."""

    def run(*args: Any, **kwargs: Any) -> None:
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            launch(*args, **kwargs)
        finally:
            sys.settrace(tracer)
            _entered()  # coverage's tracer goes on at the next call, and must see this function's return

    return run


def _entered() -> None:
    """A call to be seen."""


class _LaunchPatch:
    """`_patch_lang` for the kernel that is launched, and then for the first of its device functions that sees the language by another name.

    The kernel's patch is undone when its launch ends; what a device function's call patches was never undone, and is not here.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._patched: set[tuple[str, ...]] = set()

    def __call__(self, function: Any) -> Any:
        names = _languages(function.__globals__)
        if names in self._patched:
            return None
        scope = self._patch(function)
        if not self._patched:
            restore = scope.restore

            def end() -> None:
                self._patched.clear()
                restore()

            scope.restore = end
        self._patched.add(names)
        return scope


def _languages(namespace: dict[str, Any]) -> tuple[str, ...]:
    """The modules of Triton's language that a function sees."""
    from triton import language

    return tuple(name for name, value in namespace.items() if value is language or value is language.core)
