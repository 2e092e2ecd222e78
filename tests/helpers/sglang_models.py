"""Tiny models of the tested families inside SGLang, with recorded logits, and SGLang's own attention to compare with."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel

from askmany.engine import sglang_compat
from askmany.engine.batch import StepBatch
from askmany.engine.kv_pool import KVPool
from askmany.engine.model import StepModel
from askmany.engine.model_sglang import SglangModel
from tests.helpers.tiny_models import _COMMON, CONFIGS, random_model
from tests.helpers.torch_engines import Key

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
FAMILIES: dict[str, PreTrainedConfig] = {
    **CONFIGS,
    "mistral": MistralConfig(**_COMMON, **_HEADS, sliding_window=None),
    "gemma": GemmaConfig(**_COMMON, **(_HEADS | {"num_key_value_heads": 1})),
}
REFUSED: dict[str, PreTrainedConfig] = {  # families whose attention is not ours
    "windowed mistral": MistralConfig(**_COMMON, **_HEADS, sliding_window=64),
    "gemma2": Gemma2Config(**_COMMON, **_HEADS, sliding_window=512),
    "gemma3": Gemma3TextConfig(**_COMMON, **_HEADS, sliding_window=64, query_pre_attn_scalar=12),
}


class Loader:
    """Saves models under a folder and loads them; closes each before the next, as a process can hold only one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: SglangModel | None = None

    def folder(self, name: str) -> tuple[Path, PreTrainedModel]:
        """A folder with a model of `FAMILIES` or `REFUSED`, and the model itself."""
        model = random_model((FAMILIES | REFUSED)[name])
        path = self._folder / name.replace(" ", "-")
        model.save_pretrained(path)
        return path, model

    def __call__(self, name: str) -> tuple[SglangModel, PreTrainedModel]:
        """The model in SGLang, and the same in Transformers."""
        path, model = self.folder(name)
        if name == "gemma":  # SGLang's class computes the exact GELU where the checkpoints mean its tanh approximation
            for layer in model.model.layers:
                layer.mlp.act_fn = torch.nn.GELU()
        return self.open(path), model

    def open(self, path: Path, **how: Any) -> SglangModel:
        self.close()
        self._loaded = SglangModel.load(path, DEVICE, torch.float32, **how)
        return self._loaded

    def close(self) -> None:
        if self._loaded:
            self._loaded.close()
            self._loaded = None


class Recorder:
    """A model that keeps the logits of every draw, by question, in `logits`."""

    def __init__(self, inner: StepModel) -> None:
        self._inner = inner
        self.logits: dict[Key, list[Tensor]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        logits = self._inner.forward(batch, pool)
        for stream, row in zip(batch.sampled_streams, logits, strict=True):
            self.logits[stream.document.document.key, stream.question.question_id].append(row.cpu().clone())
        return logits


class StockAttention:
    """SGLang's own attention (`torch_native` on a CPU, `triton` on a GPU) and pools under the same weights, one sequence at a time."""

    def __init__(self, model: SglangModel, slots: int = 1024) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        self._hosted, shape = model._hosted, model.kv_shape
        runner = self._hosted.runner
        runner.req_to_token_pool = ReqToTokenPool(size=2, max_context_len=slots, device=DEVICE.type, enable_memory_saver=False)
        runner.token_to_kv_pool = MHATokenToKVPool(
            size=slots, page_size=1, dtype=shape.dtype, head_num=shape.kv_heads, head_dim=shape.head_dim, layer_num=shape.layers,
            device=DEVICE.type, enable_memory_saver=False,
        )  # fmt: skip
        self._table = runner.req_to_token_pool.req_to_token
        self._backend = TorchNativeAttnBackend(runner)

    @torch.inference_mode()
    def logits(self, prompt: list[int], answer: tuple[int, ...]) -> Tensor:
        """[len(answer), V]: the logits before each answer token, the answer fed as given."""
        slots = torch.arange(1, len(prompt) + len(answer) + 1, device=DEVICE)
        self._table[1, : len(slots)] = slots.to(self._table.dtype)
        rows = [self._step("EXTEND", prompt, 0, slots)]
        rows += [self._step("DECODE", [token], len(prompt) + i, slots) for i, token in enumerate(answer[:-1])]
        return torch.cat(rows).cpu()

    def _step(self, mode: str, tokens: list[int], start: int, slots: Tensor) -> Tensor:
        stop = start + len(tokens)
        extend = {"extend_seq_lens": _one(len(tokens)), "extend_prefix_lens": _one(start)} if mode == "EXTEND" else {}
        ids, positions = torch.tensor(tokens, device=DEVICE), torch.arange(start, stop, device=DEVICE)
        batch = sglang_compat._forward_batch(mode, ids, positions, slots[start:stop], 1, **extend)
        batch.req_pool_indices, batch.seq_lens = _one(1).long(), _one(stop).long()
        return self._hosted.run(self._backend, batch).clone()


def _one(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)
