"""What a labelling run costs: choice questions over long documents, three ways in one process.

(a) `alone`: one request per question, constrained decoding, the document's KV reused; (b) `together`: all questions of a document at once,
constrained decoding; (c) `labels`: all labels of all questions scored in one pass, nothing decoded. The ways take turns document by
document, in changing order. Wall seconds are what a user waits; CPU seconds are fair on a machine that has other work, too. The last line
is one JSON document.

    python -m askmany.jobs.bench_labels DATA.jsonl.gz --articles 27 --questions 20
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from askmany.engine.answer_types import answer_type
from askmany.engine.build import build_engine
from askmany.engine.config import EngineConfig
from askmany.engine.engine import Engine
from askmany.engine.labels import label_trie
from askmany.engine.models import ResolvedModel, resolve_model
from askmany.engine.prompts import PromptBuilder, PromptConfig
from askmany.engine.request import Document, Question, Sampling, StreamResult
from askmany.pipeline.eval_loaders import load_plain, read_data, rows_of

OPTIONS = ("main subject", "mentioned in passing", "not mentioned", "cannot be told")
TOPICS = (
    *("geography", "science", "sports", "politics", "economy", "religion", "war", "education", "technology", "art"),
    *("law", "medicine", "music", "nature", "industry", "transport", "language", "ancient history", "the twentieth century", "America"),
)
Segments = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Way:
    """One way of labelling: its engine and questions, and what they came to so far."""

    engine: Engine
    questions: tuple[Question, ...]
    wall_s: float = 0.0
    cpu_s: float = 0.0
    results: dict[tuple[str, str], StreamResult] = field(default_factory=dict)

    def label(self, doc_id: str, segments: Segments) -> None:
        """Answer all questions of a document."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.submit(Document(doc_id, segments, self.questions))
        found = list(self.engine.drain())
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu
        self.results |= {(doc_id, result.question_id): result for result in found}

    @property
    def figures(self) -> dict[str, float]:
        metrics = self.engine.metrics
        times = {"wall_s": self.wall_s, "cpu_s": self.cpu_s, "prefill_wall_s": metrics.prefill_s}
        return {name: round(value, 2) for name, value in times.items()} | {"decode_tokens": metrics.decode_tokens, "steps": metrics.steps}


def make_ways(model: ResolvedModel, prompts: PromptBuilder, questions: int, kv_tokens: int) -> dict[str, Way]:
    """The three ways, each with an engine of its own that has answered once already."""
    texts = [f"What is {topic} in this text? Answer with one of: {', '.join(OPTIONS)}." for topic in TOPICS[:questions]]
    decoded, scored = _decoded(prompts, texts), _scored(model, prompts, texts)
    asked = {"alone": decoded, "together": decoded, "labels": scored}
    ways = {}
    for name, own in asked.items():
        config = EngineConfig(kv_tokens=kv_tokens, streams=1 if name == "alone" else "auto")
        engine = build_engine(model, config, context_tokens=kv_tokens // 2)
        engine.submit(Document("warm", ((5, 6, 7),), own))
        list(engine.drain())
        ways[name] = Way(engine, own)
    return ways


def _decoded(prompts: PromptBuilder, texts: Sequence[str]) -> tuple[Question, ...]:
    kind = answer_type({"type": "choice", "options": OPTIONS, "answer": "decode"}, "bench")
    sampling = Sampling(kind.max_new_tokens or 1)
    return tuple(Question(f"q{i}", prompts.tail(text), sampling, grammar=kind.grammar) for i, text in enumerate(texts))


def _scored(model: ResolvedModel, prompts: PromptBuilder, texts: Sequence[str]) -> tuple[Question, ...]:
    questions = []
    for number, text in enumerate(texts):
        trie = label_trie(OPTIONS, [prompts.answer_ids(text, option) for option in OPTIONS], model.eos_token_ids[0])
        questions.append(Question(f"q{number}", prompts.tail(text), Sampling(1), labels=trie))
    return tuple(questions)


def report(ways: dict[str, Way], documents: int, tokens: int) -> dict[str, Any]:
    """Times of each way, and how often they agree."""
    labels, together, alone = (ways[name].results for name in ("labels", "together", "alone"))
    differing = [result.margin for key, result in labels.items() if together[key].text != result.text]
    mass = [result.labels.legal_mass for result in labels.values() if result.labels]
    return {
        "documents": documents,
        "document_tokens": tokens,
        "answers": len(labels),
        "threads": torch.get_num_threads(),
        **{name: way.figures for name, way in ways.items()},
        "labels_agree_with_decoding": 1 - len(differing) / len(labels),
        "largest_margin_nats_of_a_difference": max(differing, default=None),
        "together_agrees_with_alone": sum(alone[key].text == together[key].text for key in alone) / len(alone),
        "mean_legal_mass": sum(mass) / len(mass),
    }


def main(
    data: Annotated[str, typer.Argument(help="JSON lines of documents, as `askmany evaluate jsonl` takes them.")],
    articles: Annotated[int, typer.Option(min=1)] = 27,
    questions: Annotated[int, typer.Option(min=1, max=len(TOPICS))] = 20,
    max_tokens: Annotated[int, typer.Option(help="Longer documents are passed over.")] = 7168,
    model: str = "smollm2",
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Run the three ways and print their figures, after each document what they come to so far."""
    torch.set_num_threads(threads)
    resolved = resolve_model(model)
    prompts = PromptBuilder(resolved.folder, PromptConfig(instruction="Read the text and answer the question."))
    documents = [(row["doc_id"], prompts.segments(row["text"])) for row in rows_of(load_plain, read_data(data, {}), data)]
    sized = sorted((sum(map(len, segments)), doc_id, segments) for doc_id, segments in documents)
    chosen = [entry for entry in sized if entry[0] <= max_tokens][:articles]
    ways = make_ways(resolved, prompts, questions, 2 * max_tokens)
    names = list(ways)
    for number, (_, doc_id, segments) in enumerate(chosen):
        for name in names[number % 3 :] + names[: number % 3]:
            ways[name].label(doc_id, segments)
        print(json.dumps(report(ways, number + 1, sum(tokens for tokens, _, _ in chosen[: number + 1]))), flush=True)


if __name__ == "__main__":
    typer.run(main)
