"""Tiny real models behind a character vocabulary, with grammars: text in, text out, in a few milliseconds a step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from xgrammar import VocabType

from askmany.engine.build import build_scheduler
from askmany.engine.config import EngineConfig
from askmany.engine.constraints import Constraints
from askmany.engine.engine import Engine
from askmany.engine.executor import TorchExecutor
from askmany.engine.grammar import GrammarCompiler
from askmany.engine.kv_pool import KVPool
from askmany.engine.model_transformers import TransformersModel
from askmany.engine.request import Document, StreamResult

END = 0  # the end-of-answer token
PIECES = ("", *map(chr, range(32, 127)), "\n", "é", "日", "no", "yes", "true", '":', '","', "  ", "20", "a b", "not", " sure", " stated")
IDS = {piece: token_id for token_id, piece in enumerate(PIECES) if piece}


class PieceDetokenizer:
    """Every token is a whole piece of text."""

    def stream(self) -> PieceDetokenizer:
        return self

    def push(self, token_id: int) -> str:
        return PIECES[token_id]

    def flush(self) -> str:
        return ""


def spell(text: str) -> tuple[int, ...]:
    """The tokens of a text, the longest piece first."""
    ids: list[int] = []
    while text:
        piece = max((piece for piece in IDS if text.startswith(piece)), key=len)
        ids.append(IDS[piece])
        text = text[len(piece) :]
    return tuple(ids)


def random_model(seed: int = 0, std: float = 0.2) -> PreTrainedModel:
    """A llama with random weights over `PIECES`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(PIECES),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=std)
    return model.eval()


def compiler() -> GrammarCompiler:
    return GrammarCompiler(PIECES, VocabType.RAW, len(PIECES), [END])


def typed_engine(model: PreTrainedModel, config: EngineConfig | None = None, kv_tokens: int = 16384) -> Engine:
    """An engine on a copy of `model`, in NaN-poisoned memory, with grammars; `END` ends an answer."""
    resolved = (config or EngineConfig()).resolve(device="cpu", dtype="float32", kv_tokens=kv_tokens)
    runner = TransformersModel(copy.deepcopy(model), resolved.deterministic)
    pool = KVPool(runner.kv_shape, resolved.kv_pages * resolved.page_size, runner.device, poisoned=True)
    executor = TorchExecutor(runner, pool, resolved.page_size, Constraints(compiler))
    return Engine(build_scheduler(resolved), executor, PieceDetokenizer(), [END])


def results(engine: Engine, documents: Iterable[Document]) -> dict[str, StreamResult]:
    """Submit everything at once and run to the end; by question id."""
    for document in documents:
        engine.submit(document)
    return {result.question_id: result for result in engine.drain()}


@torch.inference_mode()
def sequence_logprob(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Log-probability (nats) of `answer` after `prompt` by the plain model, teacher-forced."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum())
