"""Parts for runs with context-parallel groups: a tiny real model behind the word tokenizer, and a rank that dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from askmany.pipeline import building
from askmany.pipeline.config import RunConfig
from askmany.pipeline.engine_loop import Engine
from tests.helpers.word_model import WORDS, word_model


def tiny_word_model(folder: Path, context_tokens: int) -> Path:
    """A folder that Transformers loads: random weights, one token a word."""
    from transformers import LlamaConfig

    from tests.helpers.tiny_models import random_model

    word_model(folder, context_tokens)
    config = LlamaConfig(
        vocab_size=WORDS + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        eos_token_id=None,
        bos_token_id=None,
    )
    random_model(config, seed=5).save_pretrained(folder)
    return folder


def mortal_group_engine(config: RunConfig, place: tuple[str, int], rank: int, ranks: int) -> Engine | None:
    """As `building.build_group_engine`, but the last rank of the first group ends its process in the group's second step."""
    mark = Path(config.output.uri) / "killed-once"
    if rank == ranks - 1 and not mark.exists():
        from askmany.engine.context_parallel import RankModel

        step = RankModel.step

        def dying(self: RankModel, message: Any) -> Any:
            if self._steps == 1:
                mark.touch()
                os._exit(9)
            return step(self, message)

        RankModel.step = dying  # type: ignore[method-assign]
    return building.build_group_engine(config, place, rank, ranks)
