"""Engines with a will of their own, built in worker processes by tests of whole runs."""

import os
import time
from pathlib import Path
from typing import Any

from askmany.engine.engine import Engine
from askmany.engine.fake import fake_engine
from askmany.engine.request import Document, StreamResult
from askmany.pipeline.config import RunConfig

CONTEXT_TOKENS = 64


class Wrapped:
    """An engine with another inside."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, document: Document) -> None:
        self.inner.submit(document)

    def step(self) -> list[StreamResult]:
        return self.inner.step()


class Strict(Wrapped):
    """Refuses prompts that could not be answered within `CONTEXT_TOKENS`, as a bug of whoever let them through."""

    def submit(self, document: Document) -> None:
        for question in document.questions:
            prompt = document.prefix_tokens + len(question.token_ids)
            if not document.prefix_tokens or not question.token_ids or prompt + question.sampling.max_new_tokens > CONTEXT_TOKENS:
                raise AssertionError(f"a prompt of {prompt} tokens reached the engine")
        super().submit(document)


class Deadly(Wrapped):
    """Ends its process on `kills-once` the first time (a mark in the output folder remembers) and on `kills` every time."""

    def __init__(self, inner: Engine, folder: Path) -> None:
        super().__init__(inner)
        self.mark = folder / "killed-once"

    def submit(self, document: Document) -> None:
        name = document.key.rpartition("/")[2]
        if name == "kills" or (name == "kills-once" and not self.mark.exists()):
            self.mark.touch()
            os._exit(9)
        super().submit(document)


class Slow(Wrapped):
    """Takes its time over every step."""

    def step(self) -> list[StreamResult]:
        time.sleep(0.05)
        return super().step()


class Noting(Wrapped):
    """Writes down every stream that it is asked, a line `doc_id question_id` each, beside the output."""

    def __init__(self, inner: Engine, path: Path) -> None:
        super().__init__(inner)
        self.path = path

    def submit(self, document: Document) -> None:
        doc_id = document.key.partition("/")[2]
        lines = "".join(f"{doc_id} {question.question_id}\n" for question in document.questions)
        with open(self.path, "a") as file:
            file.write(lines)
        super().submit(document)


def noting_engine(config: RunConfig) -> Noting:
    return Noting(fake_engine(config.engine), Path(config.output.uri).parent / "asked.txt")


def strict_engine(config: RunConfig) -> Strict:
    return Strict(fake_engine(config.engine))


def deadly_engine(config: RunConfig) -> Deadly:
    return Deadly(fake_engine(config.engine), Path(config.output.uri))


def slow_engine(config: RunConfig) -> Slow:
    return Slow(fake_engine(config.engine))


def failing_engine(config: RunConfig) -> Engine:
    raise RuntimeError("no such device")
