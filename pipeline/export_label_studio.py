"""Label Studio: a task a document whose predictions hold the answers, with a score and the model's version.

`label_studio.json` is imported as it is; `label_studio.xml` is a labelling interface whose controls bear the question ids. A task's data
holds what the run passed through from its input; keep the column of the text (`input.keep`) to have it shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import quoteattr

from askmany.pipeline.export_shapes import ANSWERED, Answers
from askmany.pipeline.schema import NAMES
from askmany.pipeline.storage import ObjectStore

TASKS, INTERFACE = "label_studio.json", "label_studio.xml"
_CONTROLS = {"choice": "Choices", "bool": "Choices", "multi_choice": "Choices", "int": "Number", "number": "Number", "date": "DateTime"}


def export_label_studio(answers: Answers, target: ObjectStore) -> list[str]:
    """Write tasks and interface."""
    kinds: dict[str, tuple[str, str, dict[str, None]]] = {}
    with target.writer(TASKS) as stream:
        stream.write(b"[")
        for number, task in enumerate(_tasks(answers, kinds)):
            stream.write((b",\n" if number else b"\n") + json.dumps(task, ensure_ascii=False, allow_nan=False).encode("utf-8"))
        stream.write(b"\n]\n")
    target.put(INTERFACE, _interface(kinds).encode("utf-8"))
    return [TASKS, INTERFACE]


def _tasks(answers: Answers, kinds: dict[str, tuple[str, str, dict[str, None]]]) -> Iterator[dict[str, Any]]:
    for document in answers.documents():
        chunks: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in document:
            chunks.setdefault((row["doc_id"], row["chunk"]), []).append(row)
        for (doc_id, chunk), rows in chunks.items():
            results = []
            for row in rows:
                _, _, labels = kinds.setdefault(
                    row["question_id"], (row["answer_type"] or "text", row["question"] or row["question_id"], {})
                )
                labels.update(dict.fromkeys([entry["label"] for entry in row["label_probabilities"] or ()] + _labels_of(row)))
                if row["status"] in ANSWERED:
                    results.append(_result(row))
            scores = [result["score"] for result in results]
            prediction = {"model_version": answers.model, "score": min(scores, default=0.0), "result": results}
            kept = {name: value for name, value in rows[0].items() if name not in NAMES}
            yield {"data": {**kept, "doc_id": doc_id, "chunk": chunk}, "predictions": [prediction]}


def _result(row: Mapping[str, Any]) -> dict[str, Any]:
    kind = row["answer_type"] or "text"
    control = _CONTROLS.get(kind, "TextArea") if row["status"] == "ok" and row["value"] not in (None, "null") else "TextArea"
    values = {
        "Choices": {"choices": _labels_of(row)},
        "Number": {"number": row["value_number"]},
        "DateTime": {"datetime": row["answer"]},
        "TextArea": {"text": [row["answer"] or ""]},
    }
    name = "choices" if control == "Choices" else control.lower()
    return {"from_name": row["question_id"], "to_name": "text", "type": name, "value": values[control], "score": _score(row)}


def _labels_of(row: Mapping[str, Any]) -> list[str]:
    """The labels that a record chose."""
    if row["answer_type"] == "multi_choice":
        return list(json.loads(row["value"] or "[]") or [])
    return [row["answer"]] if row["answer"] is not None and row["answer_type"] in ("choice", "bool") else []


def _score(row: Mapping[str, Any]) -> float:
    """The chosen label's probability, else that of the answer's tokens by their geometric mean."""
    for entry in row["label_probabilities"] or ():
        if entry["label"] == row["answer"]:
            return float(entry["probability"])
    tokens = len(row["answer_token_ids"] or ())
    return math.exp(row["logprob"] / tokens) if tokens and row["logprob"] is not None else 0.0


def _interface(kinds: Mapping[str, tuple[str, str, dict[str, None]]]) -> str:
    lines = ["<View>", '  <Text name="text" value="$text"/>']
    for question_id, (kind, question, labels) in kinds.items():
        control, name = _CONTROLS.get(kind, "TextArea"), quoteattr(question_id)
        lines.append(f"  <Header value={quoteattr(question)}/>")
        if control == "Choices":
            many = ' choice="multiple"' if kind == "multi_choice" else ""
            choices = "".join(f"<Choice value={quoteattr(label)}/>" for label in labels)
            lines.append(f'  <Choices name={name} toName="text"{many}>{choices}</Choices>')
        else:
            lines.append(f'  <{control} name={name} toName="text"/>')
    return "\n".join([*lines, "</View>\n"])
