"""Triton's interpreter, made to work with the installed NumPy."""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def repair() -> None:
    """NumPy 2.4 no longer turns arrays of one element into integers, which the interpreter of Triton 3.6 does for every loop bound."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__name__ == "patch_and_index":
        return

    def patch_and_index(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_and_index
