"""Stock SGLang as a contender of the engine benchmark and of the comparison of answers: its own engine, unchanged, at its best.

Radix cache on, CUDA graphs for every batch size that the cells need, all questions of a cell in one `generate` call. Token ids in and out:
no tokenizer on either side. The random weights are SGLang's own (`load_format` dummy).

A contender is named by its attention backend and what else is not SGLang's default: `fa3`, `fa3-lpm` (waiting requests go by the longest
cached prefix, and of several with one new prefix one goes first), `fa3-512` (up to 512 requests at once), `fa3-lpm-512`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from askmany.engine.errors import ConfigError
from askmany.engine.models import context_limit
from askmany.jobs.bench_cells import Cell, Drawn

BACKENDS = ("fa3", "flashinfer", "triton")
GRAPH_ROWS = (1, 2, 4, 8, 12, 16, 24, *range(32, 513, 16))
LEAST_CONTEXT = 8200  # SGLang captures no prefill graph above its context length, and has them up to 8,192 tokens
KEPT_TOKENS = 8  # SGLang refuses prompts that come closer to its context than this, and cuts answers that do


@dataclass(frozen=True, slots=True)
class Variant:
    """How a stock contender differs from SGLang's defaults."""

    backend: str
    policy: str = "fcfs"
    most_rows: int | None = None

    @staticmethod
    def parse(name: str) -> Variant:
        """`BACKEND[-lpm][-ROWS]`. Raises ConfigError for anything else."""
        backend, *rest = name.split("-")
        policy = rest.pop(0) if rest[:1] == ["lpm"] else "fcfs"
        rows = int(rest.pop(0)) if rest and rest[0].isdigit() else None
        if backend not in BACKENDS or rest:
            raise ConfigError(f"stock contender {name!r} is none of {', '.join(BACKENDS)}, with -lpm, -ROWS or both behind it")
        return Variant(backend, policy, rows)


class StockContender:
    """`sglang.Engine` with one attention backend."""

    def __init__(
        self, folder: Path, name: str, most_rows: int, context_tokens: int, random_weights: bool, memory: float = 0.85,
        kv_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """`name`: see `Variant`; `most_rows`: the largest batch that will decode; `context_tokens`: the longest prompt with its answer;
        `memory`: SGLang's `mem_fraction_static`; `kv_tokens`: of its pool, where that is not what memory leaves. ConfigError for an unknown
        name, or a context that the model has not."""
        variant, context = Variant.parse(name), context_length(folder, context_tokens)
        import sglang
        from sglang.srt.server_args import ServerArgs

        rows = variant.most_rows or most_rows
        options: dict[str, Any] = {
            "model_path": str(folder), "attention_backend": variant.backend, "skip_tokenizer_init": True, "log_level": "error",
            "random_seed": 0, "mem_fraction_static": memory, "max_running_requests": rows, "schedule_policy": variant.policy,
            "context_length": context, "dtype": "bfloat16", "max_total_tokens": kv_tokens,
            "load_format": "dummy" if random_weights else "auto",
        }  # fmt: skip
        self._engine = sglang.Engine(**options, **_graph_options(ServerArgs, rows))

    def run(self, cell: Cell, drawn: Drawn) -> float:
        """Seconds of the one call that answers all questions. SGLang is told each answer's length: it cannot be kept from it.

        Emptying its cache also gives its memory back to the device: where documents are in the cache before the clock starts, so is a batch
        of other questions, so that no allocation is timed."""
        emptied = self._engine.flush_cache()
        if not getattr(emptied, "success", True):
            raise RuntimeError(f"sglang did not empty its cache before {cell}: {emptied}")
        if cell.cached:
            self._engine.generate(input_ids=drawn.documents, sampling_params=_sampling(1))
            self._engine.generate(input_ids=_others(drawn), sampling_params=_sampling(1))
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
        """Greedy answers: for each prompt its `token_ids`, their `logprobs`, and the `gaps` of the two largest log-probabilities.

        Raises RuntimeError when an answer is shorter than `new_tokens`: it would pass for one that differs.
        """
        outputs = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts], sampling_params=_sampling(new_tokens), return_logprob=True, top_logprobs_num=2
        )
        found = [_answer(output["meta_info"]) for output in outputs]
        for prompt, (answer, output) in enumerate(zip(found, outputs, strict=True)):
            if {len(values) for values in answer.values()} != {new_tokens}:
                why = output["meta_info"].get("finish_reason")
                raise RuntimeError(f"sglang gave {len(answer['token_ids'])} of {new_tokens} answer tokens for prompt {prompt}: {why}")
        return found

    def notes(self) -> dict[str, Any]:
        """Nothing beside the times."""
        return {}

    def close(self) -> None:
        self._engine.shutdown()


def context_length(folder: Path, context_tokens: int) -> int:
    """What SGLang is given as its context: LEAST_CONTEXT, or more where the longest prompt with its answer (`context_tokens`) needs more.

    Never above what the model's config allows, with which SGLang would not start. ConfigError when that is too little.
    """
    limit, needed = context_limit(folder), context_tokens + KEPT_TOKENS
    if needed > limit:
        raise ConfigError(
            f"model {folder}: its context has {limit} tokens; prompt and answer take {context_tokens}, and stock SGLang keeps {KEPT_TOKENS}"
        )
    return min(limit, max(needed, LEAST_CONTEXT))


def _others(drawn: Drawn) -> list[list[int]]:
    """Prompts of the same lengths that share the documents alone: each question begins with another token."""
    return [
        [*ids, tail[0] - 1 if tail[0] else 1, *tail[1:]] for ids, tails in zip(drawn.documents, drawn.tails, strict=True) for tail in tails
    ]


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
