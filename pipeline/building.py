"""From a configuration to the two things every process builds for itself: the preparer (CPU) and the engine (device).

The only place that knows which engines there are. Heavy libraries are loaded here, inside the functions, and so never on a driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from askmany.engine.choice import Expected
from askmany.engine.models import ResolvedModel, resolve_model
from askmany.engine.prompts import PromptBuilder
from askmany.pipeline.config import RunConfig
from askmany.pipeline.engine_loop import Engine
from askmany.pipeline.preparing import Preparer
from askmany.pipeline.questions import load_questions

FAKE_KV_TOKENS = 1 << 20


def resolve(config: RunConfig, weights: bool = False) -> ResolvedModel:
    """The model of a run; hub weights are fetched only where `weights` asks for them. ConfigError when it cannot be had."""
    return resolve_model(config.model, config.model_revision, weights=weights)


def build_preparer(config: RunConfig) -> Preparer:
    """Tokenizer, prompt and shared questions. ConfigError for a template that cannot be split, or a bad question set."""
    model = resolve(config)
    shared = load_questions(config.questions, config.sampling, config.input.storage_options)
    prompts = PromptBuilder(model.folder, config.prompt, config.date)
    context_tokens = min(model.context_tokens, config.context_tokens or model.context_tokens)
    return Preparer(config, prompts, context_tokens, shared, next(iter(model.eos_token_ids), None), _GrammarCheck(model))


class _GrammarCheck:
    """Compiles grammars for a model's vocabulary; PyTorch is loaded with the first."""

    def __init__(self, model: ResolvedModel) -> None:
        self._model = model

    @cached_property
    def _compiler(self) -> Any:
        from askmany.engine.grammar import GrammarCompiler

        return GrammarCompiler.load(self._model.folder, self._model.vocab_size, self._model.eos_token_ids)

    def __call__(self, grammar: str) -> object:
        return self._compiler.compile(grammar)


def build_engine(config: RunConfig, expected: Expected | None = None) -> Engine:
    """The engine that the configuration names, with its model loaded; `expected` is what the plan brings, where there is one."""
    model = resolve(config, weights=True)
    if config.engine.backend == "fake":
        from askmany.engine.fake import fake_engine

        return fake_engine(config.engine, kv_tokens=FAKE_KV_TOKENS, kv_bytes_per_token=model.kv_bytes_per_token(4), expected=expected)
    from askmany.engine.build import build_engine as build

    return build(model, config.engine, config.context_tokens, expected)


def informed(factory: Callable[..., Engine], expected: Expected | None) -> Callable[[RunConfig], Engine]:
    """The factory with what the plan brings, if it takes `expected`; any other is called with the configuration alone."""
    return partial(factory, expected=expected) if "expected" in inspect.signature(factory).parameters else factory


def build_group_engine(config: RunConfig, place: tuple[str, int], rank: int, ranks: int) -> Engine | None:
    """One rank's part of a context-parallel engine, met at `place` (host, port): the engine on rank 0; the others serve until it ends."""
    model = resolve(config, weights=True)
    from askmany.engine.context_parallel_build import build_group_engine as build
    from askmany.engine.context_parallel_join import join

    groups = join(*place, rank, ranks, config.engine.device)
    return build(model, config.engine, groups, config.context_tokens, config.workers.context_step_tokens)
