"""Why a worker cannot go on, told to the driver as an answer like any other: one clear line instead of a framework's stack of errors."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass

from askmany.engine.errors import AskmanyError, ConfigError, EngineError


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker says instead of an acknowledgement; `config` when no other worker could go on either."""

    message: str
    config: bool
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        message = str(error) if isinstance(error, AskmanyError) else f"{type(error).__name__}: {error}"
        return cls(message, isinstance(error, ConfigError), "".join(traceback.format_exception(error)))

    def dump(self) -> str:
        return json.dumps({"failure": asdict(self)})

    def error(self) -> ConfigError | EngineError:
        """The same as an exception, the worker's traceback in its notes."""
        error = (ConfigError if self.config else EngineError)(self.message)
        error.add_note(self.traceback)
        return error
