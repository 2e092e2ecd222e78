"""`transformers.generate` as a contender of the engine benchmark: one question after the other on the document's cache.

For trying the benchmark out on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from askmany.jobs.bench_cells import Cell, Drawn


class PlainContender:
    """A model on the CPU, in fp32."""

    def __init__(self, folder: Path, random_weights: bool) -> None:
        torch.manual_seed(0)
        maker: Any = AutoModelForCausalLM
        if random_weights:
            self._model = maker.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        else:
            self._model = maker.from_pretrained(folder, dtype=torch.float32, local_files_only=True)

    def run(self, cell: Cell, drawn: Drawn) -> float:
        """Seconds for all questions; the document's prefill counts for every document, cached or not, once."""
        started_s = perf_counter()
        with torch.inference_mode():
            for ids, tails, lengths in zip(drawn.documents, drawn.tails, drawn.lengths, strict=True):
                for tail, length in zip(tails, lengths, strict=True):
                    prompt = torch.tensor([ids + tail])
                    options: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
                    output = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
                    if output.shape[1] != prompt.shape[1] + length:
                        raise RuntimeError(f"transformers gave {output.shape[1] - prompt.shape[1]} answer tokens of {length}")
        return perf_counter() - started_s

    def notes(self) -> dict[str, Any]:
        """Nothing beside the times."""
        return {}

    def close(self) -> None:
        """Nothing was started."""
