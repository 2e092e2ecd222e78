"""A stand-in for CUDA graphs on a CPU: records every operation and kernel launch of a call with the tensors it touched, to run them again.

Like a graph, a replay runs no Python of the captured code: it repeats the recorded operations on the recorded tensors and writes results to
the recorded places. A value that was baked in stays baked in; a tensor that is not static stays at its old content. Operations that look
at values on the host (`item`, `nonzero`, masks) cannot be captured and raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

UNCAPTURABLE = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item")
Step = Callable[[], None]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.kernels = 0
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.quiet:
            return out
        if any(name in func.name() for name in UNCAPTURABLE):
            raise RuntimeError(f"operation not permitted while capturing: {func.name()}")
        held = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]

        def again() -> None:
            found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(held, found, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.steps.append(again)
        return out


class RecordingCapturer:
    """A `Capturer`; keeps every recording in `recorders`."""

    def __init__(self) -> None:
        self.recorders: list[_Recorder] = []

    def capture(self, work: Step) -> Step:
        work()  # warm-up
        recorder = _Recorder()
        launch = interpreter.GridExecutor.__call__

        def launch_and_record(executor: Any, *args: Any, **kwargs: Any) -> None:
            recorder.quiet = True
            try:
                launch(executor, *args, **kwargs)
            finally:
                recorder.quiet = False
            recorder.kernels += 1
            recorder.steps.append(lambda: launch(executor, *args, **kwargs))

        interpreter.GridExecutor.__call__ = launch_and_record
        try:
            with recorder:
                work()
        finally:
            interpreter.GridExecutor.__call__ = launch
        self.recorders.append(recorder)

        def replay() -> None:
            for step in recorder.steps:
                step()

        return replay
