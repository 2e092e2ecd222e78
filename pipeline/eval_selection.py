"""What an evaluation has to ask anew: the files of the input that are not as they were at the last one.

Pure: two listings in, a selection out. A file is the unit, told by its size and version (ETag or time of writing); whoever wants documents
looked at one by one gives each a file of its own. Knows nothing of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from askmany.pipeline.storage import InputFile


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it was when it was evaluated; `run` names the run that holds the answers about its documents."""

    size: int
    version: str
    run: str

    def is_still(self, file: InputFile) -> bool:
        return (self.size, self.version) == (file.size, file.version)


Files = Mapping[str, FileState]


@dataclass(frozen=True, slots=True)
class Selection:
    """`changed` is to be asked, `kept` has its answers, `gone` was there last time and is no more."""

    changed: tuple[InputFile, ...]
    kept: Files = field(default_factory=dict)
    gone: tuple[str, ...] = ()

    def after(self, run: str) -> dict[str, FileState]:
        """The files as they are once `run` has answered what was changed."""
        fresh = {file.uri: FileState(file.size, file.version, run) for file in self.changed}
        return {**self.kept, **fresh}


def select(files: Sequence[InputFile], before: Files) -> Selection:
    """Compare a listing with the files of the last evaluation (none: everything is new)."""
    kept = {file.uri: before[file.uri] for file in files if file.uri in before and before[file.uri].is_still(file)}
    changed = tuple(file for file in files if file.uri not in kept)
    listed = {file.uri for file in files}
    return Selection(changed, kept, tuple(sorted(set(before) - listed)))


def dumped(files: Files) -> dict[str, dict[str, Any]]:
    """Fit for JSON."""
    return {uri: asdict(state) for uri, state in sorted(files.items())}


def loaded(values: Mapping[str, Mapping[str, Any]]) -> dict[str, FileState]:
    """What `dumped` made."""
    return {uri: FileState(**state) for uri, state in values.items()}
