"""Stock SGLang as a contender of the engine benchmark and of the comparison of answers: its own engine, unchanged, at its best.

Radix cache on, CUDA graphs for every batch size that the cells need, all questions of a cell in one `generate` call. Token ids in and out:
no tokenizer on either side. The random weights are SGLang's own (`load_format` dummy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from askmany.jobs.bench_cells import Cell, Drawn

BACKENDS = ("fa3", "flashinfer", "triton")
GRAPH_ROWS = (1, 2, 4, 8, 12, 16, 24, *range(32, 513, 16))


class StockContender:
    """`sglang.Engine` with one attention backend."""

    def __init__(self, folder: Path, backend: str, most_rows: int, context_tokens: int, random_weights: bool, memory: float = 0.85) -> None:
        """`most_rows`: the largest batch that will decode; `memory`: SGLang's `mem_fraction_static`."""
        import sglang
        from sglang.srt.server_args import ServerArgs

        options: dict[str, Any] = {
            "model_path": str(folder), "attention_backend": backend, "skip_tokenizer_init": True, "log_level": "error", "random_seed": 0,
            "mem_fraction_static": memory, "max_running_requests": most_rows, "context_length": context_tokens, "dtype": "bfloat16",
            "load_format": "dummy" if random_weights else "auto",
        }  # fmt: skip
        self._engine = sglang.Engine(**options, **_graph_options(ServerArgs, most_rows))

    def run(self, cell: Cell, drawn: Drawn) -> float:
        """Seconds of the one call that answers all questions. SGLang is told each answer's length: it cannot be kept from it."""
        self._engine.flush_cache()
        if cell.cached:
            self._engine.generate(input_ids=drawn.documents, sampling_params=_sampling(1))
        prompts = [ids + tail for ids, tails in zip(drawn.documents, drawn.tails, strict=True) for tail in tails]
        lengths = [length for own in drawn.lengths for length in own]
        started_s = perf_counter()
        outputs = self._engine.generate(input_ids=prompts, sampling_params=[_sampling(length) for length in lengths])
        taken_s = perf_counter() - started_s
        produced = [int(output["meta_info"]["completion_tokens"]) for output in outputs]
        if produced != lengths:
            raise RuntimeError(f"sglang gave {sum(produced)} answer tokens of {sum(lengths)} for {cell}")
        return taken_s

    def answers(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[dict[str, Any]]:
        """Greedy answers: for each prompt its `token_ids`, their `logprobs`, and the `gaps` of the two largest log-probabilities."""
        outputs = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts], sampling_params=_sampling(new_tokens), return_logprob=True, top_logprobs_num=2
        )
        return [_answer(output["meta_info"]) for output in outputs]

    def notes(self) -> dict[str, Any]:
        """Nothing beside the times."""
        return {}

    def close(self) -> None:
        self._engine.shutdown()


def _answer(meta: dict[str, Any]) -> dict[str, Any]:
    chosen = [(float(logprob), int(token)) for logprob, token, *_ in meta["output_token_logprobs"]]
    tops = [sorted((float(entry[0]) for entry in top), reverse=True) for top in meta["output_top_logprobs"]]
    return {
        "token_ids": [token for _, token in chosen], "logprobs": [logprob for logprob, _ in chosen],
        "gaps": [first - second for first, second, *_ in tops],
    }  # fmt: skip


def _sampling(new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}


def _graph_options(arguments: type, most_rows: int) -> dict[str, Any]:
    """CUDA graphs up to `most_rows` rows, under whichever names the release has for it: fewer sizes than by default, which changes the
    time that a start takes and not the steps of a batch that has one of these sizes."""
    known = {field.name for field in fields(arguments)} if is_dataclass(arguments) else set(getattr(arguments, "__annotations__", {}))
    sizes = sorted({rows for rows in GRAPH_ROWS if rows < most_rows} | {most_rows})
    for most, listed in (("cuda_graph_max_bs_decode", "cuda_graph_bs_decode"), ("cuda_graph_max_bs", "cuda_graph_bs")):
        if most in known:
            return {most: most_rows} | ({listed: sizes} if listed in known else {})
    return {}
