"""askmany: ask many questions of each of many long documents, reading every document once.

The public surface is two names, imported lazily so that `import askmany` costs nothing on a driver without a GPU:
`run(config) -> RunResult` and `__version__`.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["RunResult", "__version__", "run"]


def __getattr__(name: str) -> Any:
    if name in ("run", "RunResult"):
        import askmany.pipeline.run as module

        return getattr(module, name)
    raise AttributeError(f"module 'askmany' has no attribute {name!r}")
