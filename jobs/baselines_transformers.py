"""A baseline without askmany's engine: `transformers.generate` on each full prompt, one after another, greedy.

What a document was answered is kept as a file of its own, named by everything that it depends on, so that a baseline of hours that is
stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from askmany.engine.models import ResolvedModel
from askmany.engine.prompts import PromptBuilder
from askmany.pipeline.eval_batch_prompt import legal_answer
from askmany.pipeline.score_items import Item
from askmany.pipeline.storage import ObjectStore

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Generated:
    """Items to score, and the seconds that generating took (in former calls, too, for what was kept)."""

    items: list[Item]
    seconds: float


@dataclass(frozen=True)
class PlainBaseline:
    """`transformers` with a model and prompts; answers end before the first of `stop`. `kept`: where answers are kept, if anywhere."""

    model: ResolvedModel
    prompts: PromptBuilder
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    kept: ObjectStore | None = None

    def answer(self, rows: Sequence[Row]) -> Generated:
        """Answer every question of every row by itself."""
        found = [self._kept(row) or self._keep(row, self._generate(row)) for row in rows]
        return Generated([item for done in found for item in done.items], sum(done.seconds for done in found))

    def _generate(self, row: Row) -> Generated:
        decoder = self._decoder  # loading it is not counted
        began = time.perf_counter()
        items = []
        for question in row["questions"]:
            text = self._answer(decoder, self.prompts.reference_ids(row["text"], question["question"]))
            answer, kind = legal_answer(question, text)
            status = "invalid_output" if answer is None else "ok"
            items.append(Item((row["doc_id"], question["qid"], 0), kind, status, answer or "", tuple(question["answers"])))
        return Generated(items, time.perf_counter() - began)

    @cached_property
    def _decoder(self) -> Any:
        maker: Any = AutoModelForCausalLM
        dtype = torch.float32 if self._device == "cpu" else "auto"
        return maker.from_pretrained(self.model.folder, dtype=dtype).to(self._device).eval()

    @property
    def _device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @torch.inference_mode()
    def _answer(self, decoder: Any, prompt: Sequence[int]) -> str:
        ids = torch.tensor([list(prompt)], device=decoder.device)
        ends = list(self.model.eos_token_ids)
        options = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0]}
        output = decoder.generate(ids, attention_mask=torch.ones_like(ids), **options)
        text = self.prompts.decode(output[0, ids.shape[1] :].tolist())
        cuts = [at for mark in self.stop if (at := text.find(mark)) >= 0]
        return text[: min(cuts)] if cuts else text

    def _kept(self, row: Row) -> Generated | None:
        if self.kept is None or not self.kept.exists(name := self._name(row)):
            return None
        values = json.loads(self.kept.get(name))
        return Generated([_item(item) for item in values["items"]], values["seconds"])

    def _keep(self, row: Row, done: Generated) -> Generated:
        if self.kept is not None:
            self.kept.put(self._name(row), json.dumps({"seconds": done.seconds, "items": list(map(asdict, done.items))}).encode())
        return done

    def _name(self, row: Row) -> str:
        prompts = [self.prompts.reference_ids(row["text"], question["question"]) for question in row["questions"]]
        what = [self.model.revision, self._device, self.max_new_tokens, self.stop, row["doc_id"], row["questions"], prompts]
        return f"{hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()}.json"


def _item(values: Mapping[str, Any]) -> Item:
    doc_id, question_id, chunk = values["key"]
    return Item(**{**values, "key": (doc_id, question_id, chunk), "references": tuple(values["references"])})
