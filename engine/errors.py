"""Every error askmany raises on purpose, in three sizes.

AskmanyError
├── ConfigError       the run cannot be right: raised before a model is loaded; exit code 2
├── DocumentError     this document failed: becomes records, the run goes on
├── QuestionError     this stream failed: becomes one record, its siblings go on
└── EngineError       the engine is broken: its worker process ends and the group is tried elsewhere

`assert` is kept for what only a bug in askmany can break.
"""


class AskmanyError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AskmanyError):
    """A configuration that cannot be run; the message names the file, key or URI, the value and the bound."""


class DocumentError(AskmanyError):
    """One document cannot be answered; `status` is the record status its questions get."""

    def __init__(self, message: str, status: str = "error") -> None:
        super().__init__(message)
        self.status = status


class QuestionError(AskmanyError):
    """One stream cannot be answered; `status` is its record status. Raised for several at once before any has started: `question_ids`
    names them."""

    def __init__(self, message: str, question_ids: tuple[str, ...] = (), status: str = "error") -> None:
        super().__init__(message)
        self.question_ids = question_ids
        self.status = status


class EngineError(AskmanyError):
    """The engine can no longer be trusted; the process that holds it must end."""
