"""Engines of a benchmark's run: none begins before all are built and warm, and weights may be drawn at random as they are loaded.

Without the wait, the first engine to be built would work alone for as long as the others start, and that time would count as theirs; graphs
captured in the middle of a run would count against the runs of several workers more than once. Used by name from worker processes, which
Ray starts; knows the run by its configuration alone, so it is for runs on one machine.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from askmany.engine.choice import Expected
from askmany.engine.config import EngineConfig
from askmany.engine.models import ResolvedModel
from askmany.engine.request import Document, Question, Sampling
from askmany.pipeline import building
from askmany.pipeline.config import RunConfig
from askmany.pipeline.engine_loop import Engine

if TYPE_CHECKING:
    import torch

    from askmany.engine.model_sglang import SglangModel

READY = "built"
LIMIT_S = 300.0
DRAWN = "drawn.safetensors"
DECODE_ROWS = (32, 64, 128, 192, 256)  # steps whose graphs are captured before the run, and those with question tails or small chunks
MIXED_ROWS = (128, 256, 384, 512, 768, 1024)
DOCUMENTS, DOCUMENT_TOKENS, QUESTIONS, ANSWER_TOKENS = 3, 3000, 16, 8


def stored_engine(config: RunConfig, expected: Expected | None = None) -> Engine:
    """The product's engine, once all of the run's are built."""
    return _together(config, lambda: building.build_engine(config, expected))


def drawn_engine(config: RunConfig, expected: Expected | None = None) -> Engine:
    """The product's engine on SGLang with random weights, once all of the run's are built. The model's folder is one of `mark_drawn`."""
    from askmany.engine.build import build_engine

    model = building.resolve(config, weights=True)
    return _together(config, lambda: build_engine(model, config.engine, config.context_tokens, expected, load_drawn))


def mark_drawn(folder: Path) -> None:
    """Have a folder pass for a model's though its weights are drawn when it is loaded: a weight file without a weight."""
    header = json.dumps({"__metadata__": {"weights": "drawn at random when loaded"}}).encode()
    (folder / DRAWN).write_bytes(struct.pack("<Q", len(header)) + header)


def load_drawn(model: ResolvedModel, config: EngineConfig, device: torch.device, dtype: torch.dtype, context_tokens: int) -> SglangModel:
    """SGLang's model of the folder's config, with weights of its own drawing."""
    from askmany.engine.model_sglang import SglangModel

    return SglangModel.load(model.folder, device, dtype, context_tokens, "dummy", deterministic=config.deterministic)


def _together(config: RunConfig, build: Callable[[], Engine]) -> Engine:
    """The engine that `build` makes, once the run has as many as it has workers. TimeoutError after `LIMIT_S`.

    One that replaces a lost engine finds the others' marks and waits for nobody.
    """
    folder, wanted = Path(config.output.uri) / READY, config.workers.count
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    engine = build()
    warm(engine)
    (folder / str(os.getpid())).write_text(f"{time.monotonic() - began:.1f}")
    while wanted != "auto" and len(list(folder.iterdir())) < wanted:
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError(f"of {wanted} engines, {len(list(folder.iterdir()))} were built in {LIMIT_S:.0f} s")
        time.sleep(0.02)
    return engine


def warm(engine: Any) -> None:
    """Capture the graphs that a run of many short answers needs, then answer a few made-up documents, which are forgotten again."""
    limits, tree = engine.scheduler.limits, engine.scheduler.tree
    steps = getattr(engine.executor, "steps", None)
    if steps is not None:
        steps.warm([rows for rows in DECODE_ROWS if rows <= limits.max_rows], [rows for rows in MIXED_ROWS if rows <= limits.step_tokens])
    length = min(DOCUMENT_TOKENS, engine.room_tokens // (2 * DOCUMENTS))
    question = [Question(f"{n}", (5, 6, 7), Sampling(max_new_tokens=ANSWER_TOKENS)) for n in range(QUESTIONS)]
    for number in range(DOCUMENTS):
        tokens = tuple(3 + (number + 7 * n) % 97 for n in range(length))
        engine.submit(Document(f"warm-{number}", (tokens,), tuple(question)))
    answered = sum(1 for _ in engine.drain())
    if answered != DOCUMENTS * QUESTIONS:
        raise RuntimeError(f"of {DOCUMENTS * QUESTIONS} questions to warm up, {answered} were answered")
    tree.clear()


def built_s(output: Path) -> list[float]:
    """Seconds that each engine of a run took to build, by process id."""
    return [float(file.read_text() or 0) for file in sorted((output / READY).iterdir())]
