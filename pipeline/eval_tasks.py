"""The evaluation tasks: which loader, which prompt, how long an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from askmany.pipeline.eval_loaders import (
    Loader,
    load_cuad,
    load_drop,
    load_loogle,
    load_plain,
    load_qmsum,
    load_quac,
    load_quality,
    load_squad,
)

SHORT = "Read the text and answer the question with a short phrase from the text."
FREE = "Read the text and answer the question."
BRIEF = "Question: {{ question }}\nAnswer with as few words as possible."


@dataclass(frozen=True, slots=True)
class Task:
    """`shape`: whether paragraphs stay documents, are joined into articles, or into pieces of articles of at most `chunk_tokens`."""

    loader: Loader
    about: str
    instruction: str = FREE
    question: str = "Question: {{ question }}"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    shape: str = "as_is"
    chunk_tokens: int = 8192

    @property
    def prompt(self) -> dict[str, Any]:
        return {"instruction": self.instruction, "question": self.question}


_SPAN = {"max_new_tokens": 32, "stop": ["\n"]}
TASKS: dict[str, Task] = {
    "squad": Task(load_squad, "SQuAD by paragraph", SHORT, BRIEF, _SPAN),
    "squad-articles": Task(load_squad, "SQuAD, whole articles", SHORT, BRIEF, _SPAN, "articles"),
    "squad-8k": Task(load_squad, "SQuAD, articles in pieces of at most 8k tokens", SHORT, BRIEF, {"max_new_tokens": 32}, "chunks"),
    "quality": Task(load_quality, "QuALITY, multiple choice", FREE, "{{ question }}\nAnswer with the letter of the right option."),
    "loogle": Task(load_loogle, "LooGLE, long documents", sampling={"max_new_tokens": 128}),
    "qmsum": Task(load_qmsum, "QMSum, questions about meetings", sampling={"max_new_tokens": 128}),
    "quac": Task(load_quac, "QuAC, dialogues", SHORT, sampling={"max_new_tokens": 64}),
    "drop": Task(load_drop, "DROP, numbers, dates and spans", SHORT, BRIEF, _SPAN),
    "cuad": Task(load_cuad, "CUAD, clauses of contracts", "Read the contract.", "{{ question }}\nAnswer yes or no."),
    "jsonl": Task(load_plain, "documents in JSON lines with questions that have answers", SHORT, BRIEF, _SPAN),
}
