"""A preparer that tokenises each distinct text once: for runs of a million small documents where the driver is what is weighed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from askmany.pipeline import building
from askmany.pipeline.config import RunConfig
from askmany.pipeline.documents import SourceDocument
from askmany.pipeline.preparing import PreparedDocument, Preparer


class RememberingPreparer:
    """A run's own preparer behind a memory of texts; good for collections that repeat a few texts under many ids."""

    def __init__(self, inner: Preparer) -> None:
        self._inner = inner
        self._known: dict[str, PreparedDocument] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare(self, source: SourceDocument) -> PreparedDocument:
        """As the inner preparer would, for documents without questions of their own."""
        known = self._known.get(source.text)
        if known is None:
            known = self._known[source.text] = self._inner.prepare(source)
        return replace(known, source=source)


def build_remembering_preparer(config: RunConfig) -> RememberingPreparer:
    return RememberingPreparer(building.build_preparer(config))
