"""Which documents are too long for one worker, and so go to a context-parallel group. Arithmetic on token counts alone."""

from __future__ import annotations

from askmany.engine.errors import ConfigError
from askmany.pipeline.config import RunConfig
from askmany.pipeline.preparing import Preparer

OWN_QUESTION_TOKENS = 512  # set aside for a question that the document brings itself; a longer one may be refused as too long
ROUNDING_PAGES = 3  # instruction, document and question each end within a page


def long_above(config: RunConfig, preparer: Preparer) -> int | None:
    """The most document tokens that one worker is given; None when all documents go to single workers.

    Raises ConfigError when the bound leaves no room for any document.
    """
    workers, engine = config.workers, config.engine
    if workers.context_ranks is None:
        return None
    above = workers.context_above_tokens if workers.context_above_tokens != "auto" else engine.kv_tokens
    assert above != "auto", "checked with the configuration"
    own = OWN_QUESTION_TOKENS + config.sampling.max_new_tokens if config.input.questions else 0
    beside = len(preparer.prompts.instruction_ids) + max(preparer.longest_ask_tokens, own) + ROUNDING_PAGES * engine.page_size
    if above <= beside:
        key = "engine.kv_tokens" if workers.context_above_tokens == "auto" else "workers.context_above_tokens"
        raise ConfigError(f"{key} {above} leaves no room for a document: instruction, question and answer may take {beside} tokens")
    return above - beside
