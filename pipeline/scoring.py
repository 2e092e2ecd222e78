"""Scores of a run: one family of metrics for each kind of answer, every mean with its interval, two runs compared item by item.

Pure: items in, a report (plain values, ready for JSON) out. An answer that is no legal value scores 0; what was never answered is not
scored, and the report says how many that are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from askmany.pipeline.score_items import LABELLED, NUMERIC, Item, Items, Key
from askmany.pipeline.score_labels import ClassCounts, Floats, calibration, class_counts, summed
from askmany.pipeline.score_stats import RESAMPLES, Interval, bootstrap, bootstrap_of, paired
from askmany.pipeline.score_text import best, exact_match, number_match, token_f1, token_recall

MAX_CLASSES = 200  # beyond, only accuracy is given


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """`tolerance`: how far a number may be off, as a share of the reference. `resamples`, `seed`: of every bootstrap."""

    tolerance: float = 0.0
    resamples: int = RESAMPLES
    seed: int = 0


def item_scores(item: Item, options: ScoreOptions) -> dict[str, float]:
    """The metrics of one item, each from 0 to 1."""
    if item.kind in LABELLED:
        return {"accuracy": float(_folded(item.answer) in map(_folded, item.references))}
    if item.kind in NUMERIC:
        return {"numeric_match": best(partial(number_match, tolerance=options.tolerance), item.answer, item.references)}
    if item.kind == "multi_choice":
        return {"exact_set": float(_labels(item.answer) == frozenset(map(_folded, item.references)))}
    if item.kind == "json":
        return {"exact_json": float(any(_same_json(item.answer, reference) for reference in item.references))}
    metrics: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "f1": token_f1, "token_recall": token_recall}
    return {name: best(metric, item.answer, item.references) for name, metric in metrics.items()}


def score(items: Items, options: ScoreOptions) -> dict[str, Any]:
    """The report of a run: by kind of answer, what was left out, calibration where labels were scored."""
    by_kind: dict[str, list[Item]] = defaultdict(list)
    for item in items.items:
        by_kind[item.kind].append(item)
    return {
        "items": len(items.items),
        "documents": len({item.document for item in items.items}),
        "left_out": dict(items.left_out),
        "options": asdict(options),
        "kinds": {kind: _kind_report(kind, found, options) for kind, found in sorted(by_kind.items())},
    }


def compare(ours: Items, theirs: Items, options: ScoreOptions) -> dict[str, Any]:
    """Ours minus theirs, item by item, over the questions that both answered and that are of the same kind in both."""
    other = {item.key: item for item in theirs.items}
    pairs = [(item, other[item.key]) for item in ours.items if item.key in other and other[item.key].kind == item.kind]
    differences: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
    for one, two in pairs:
        first, second = item_scores(one, options), item_scores(two, options)
        for name in first:
            differences[one.kind, name].append((first[name], second[name], one.document))
    report = {
        f"{kind}.{name}": {
            "ours": float(np.mean([a for a, _, _ in values])),
            "theirs": float(np.mean([b for _, b, _ in values])),
            "difference": asdict(_paired(values, options)),
            "agreement": float(np.mean([a == b for a, b, _ in values])),
        }
        for (kind, name), values in sorted(differences.items())
    }
    same = float(np.mean([one.answer == two.answer for one, two in pairs])) if pairs else None
    unmatched = len(ours.items) + len(theirs.items) - 2 * len(pairs)
    return {"pairs": len(pairs), "unmatched": unmatched, "same_answer": same, "metrics": report}


def reliability(items: Sequence[Item]) -> Any:
    """The calibration of the items whose labels were scored; None when there are none."""
    stated = [item for item in items if item.confidence is not None]
    if not stated:
        return None
    right = [bool(item_scores(item, ScoreOptions())["accuracy"]) for item in stated]
    return calibration([item.confidence or 0.0 for item in stated], right)


def item_rows(items: Items, options: ScoreOptions) -> dict[Key, dict[str, float]]:
    """Every item's own scores, by key."""
    return {item.key: item_scores(item, options) for item in items.items}


def _kind_report(kind: str, items: list[Item], options: ScoreOptions) -> dict[str, Any]:
    scored = [item_scores(item, options) for item in items]
    documents = [item.document for item in items]
    report: dict[str, Any] = {"items": len(items), "illegal": sum(item.status != "ok" for item in items)}
    report["metrics"] = {
        name: asdict(bootstrap([scores[name] for scores in scored], documents, options.resamples, options.seed)) for name in scored[0]
    }
    if kind in LABELLED or kind == "multi_choice":
        report |= _class_report(kind, items, documents, options)
    found = reliability(items) if kind in LABELLED else None
    if found is not None:
        report["calibration"] = {
            "ece": found.ece,
            "brier": found.brier,
            "counts": found.counts.tolist(),
            "confidence": _plain(found.confidence),
            "accuracy": _plain(found.accuracy),
        }
    return report


def _class_report(kind: str, items: list[Item], documents: list[str], options: ScoreOptions) -> dict[str, Any]:
    answers = [_labels(item.answer) if kind == "multi_choice" else frozenset([_folded(item.answer)] * bool(item.answer)) for item in items]
    truths = [_truth(kind, item, answer) for item, answer in zip(items, answers, strict=True)]
    classes = sorted(frozenset().union(*truths, *answers))
    if len(classes) > MAX_CLASSES:
        return {"classes_omitted": len(classes)}
    counts = class_counts(truths, answers, classes)
    whole = summed(counts, np.ones(len(items)))
    rows = {
        name: {
            "precision": float(whole.precision[i]),
            "recall": float(whole.recall[i]),
            "f1": float(whole.f1[i]),
            "truths": int(whole.truths[i]),
            "answers": int(whole.answers[i]),
        }
        for i, name in enumerate(classes)
    }
    means = {
        "macro_f1": asdict(_over(counts, "macro_f1", documents, options)),
        "micro_f1": asdict(_over(counts, "micro_f1", documents, options)),
    }
    return {"classes": rows, "means": means}


def _over(counts: ClassCounts, name: str, documents: list[str], options: ScoreOptions) -> Interval:
    """A mean over classes with its interval, from counts added up document by document."""
    place = {document: index for index, document in enumerate(dict.fromkeys(documents))}
    member = np.zeros((len(place), len(documents)))
    member[[place[document] for document in documents], np.arange(len(documents))] = 1
    by_document = summed(counts, member)

    def statistic(weights: Floats) -> Floats:
        return np.asarray(getattr(summed(by_document, weights), name))

    return bootstrap_of(statistic, len(place), len(documents), options.resamples, options.seed)


def _truth(kind: str, item: Item, answer: frozenset[str]) -> frozenset[str]:
    """The true labels; of several that are right for a single choice, the one that was answered, else the first."""
    references = [_folded(reference) for reference in item.references]
    if kind == "multi_choice":
        return frozenset(references)
    right = answer.intersection(references)
    return right or frozenset(references[:1])


def _paired(values: list[tuple[float, float, str]], options: ScoreOptions) -> Interval:
    ours, theirs, documents = zip(*values, strict=True)
    return paired(ours, theirs, documents, options.resamples, options.seed)


def _labels(answer: str) -> frozenset[str]:
    try:
        found = json.loads(answer)
    except ValueError:
        return frozenset()
    return frozenset(_folded(str(label)) for label in found) if isinstance(found, list) else frozenset()


def _same_json(answer: str, reference: str) -> bool:
    try:
        return bool(json.loads(answer) == json.loads(reference))
    except ValueError:
        return False


def _folded(label: str) -> str:
    return label.strip().casefold()


def _plain(values: Any) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def means_of(report: Mapping[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """(kind, metric, interval) of every mean in a report, for printing."""
    return [
        (kind, name, interval)
        for kind, found in report["kinds"].items()
        for name, interval in {**found["metrics"], **found.get("means", {})}.items()
    ]
