"""`askmany prefetch MODEL`: a model into this machine's cache before anything waits for it, and the hash by which to pin it.

What an init container or a node's first boot runs. Any number of them at once on one machine fetch it once.
"""

from __future__ import annotations

from rich.console import Console

from askmany.engine.models import resolve_model


def main(model: str, revision: str | None, console: Console) -> int:
    """Fetch, prove, and print where it lies and what to write into a configuration. ConfigError when it cannot be had."""
    found = resolve_model(model, revision)
    for line in (f"model: {model}", f"model_revision: {found.revision}", f"# in {found.folder}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
