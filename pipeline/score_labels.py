"""Classification scores: accuracy, precision, recall and F1 of each class, their macro and micro means, sets of labels, calibration.

Works on counts, so that resampled documents are scored by adding their counts up. Classes are the labels that occur as truth or as answer;
an answer that is no label (None) is a miss of its true class and a false alarm of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """For each of K classes: `hits` (truth and answer), `truths` and `answers`. Leading dimensions, if any, are samples."""

    hits: Floats  # [..., K]
    truths: Floats  # [..., K]
    answers: Floats  # [..., K]

    @property
    def precision(self) -> Floats:
        """[..., K]; 0 where a class is never answered."""
        return _ratio(self.hits, self.answers)

    @property
    def recall(self) -> Floats:
        """[..., K]; 0 where a class never occurs."""
        return _ratio(self.hits, self.truths)

    @property
    def f1(self) -> Floats:
        """[..., K]"""
        return _ratio(2 * self.hits, self.truths + self.answers)

    @property
    def macro_f1(self) -> Floats:
        """[...]: the mean over classes."""
        return np.asarray(self.f1.mean(axis=-1))

    @property
    def micro_f1(self) -> Floats:
        """[...]: over the counts of all classes; the accuracy where every answer is a label."""
        return _ratio(2 * self.hits.sum(axis=-1), (self.truths + self.answers).sum(axis=-1))


def class_counts(truths: Sequence[frozenset[str]], answers: Sequence[frozenset[str]], classes: Sequence[str]) -> ClassCounts:
    """Counts item by item, [N, K]; an item may have any number of true and answered labels."""
    place = {label: index for index, label in enumerate(classes)}
    truth, answer = np.zeros((len(truths), len(classes))), np.zeros((len(truths), len(classes)))
    for row, (wanted, found) in enumerate(zip(truths, answers, strict=True)):
        truth[row, [place[label] for label in wanted]] = 1
        answer[row, [place[label] for label in found]] = 1
    return ClassCounts(truth * answer, truth, answer)


def summed(counts: ClassCounts, weights: Floats) -> ClassCounts:
    """Counts of samples: `weights` [..., N] says how often each item is in a sample."""
    return ClassCounts(weights @ counts.hits, weights @ counts.truths, weights @ counts.answers)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far stated confidence is from being right. Bins of equal width over (0, 1]; empty bins have NaN means.

    `ece`: expected calibration error, the bins' |accuracy - confidence| weighted by their counts (Guo et al. 2017). `brier`: mean squared
    error of the stated probability of the chosen label.
    """

    counts: Ints  # [bins]
    confidence: Floats  # [bins]
    accuracy: Floats  # [bins]
    ece: float
    brier: float


def calibration(confidences: Sequence[float], correct: Sequence[bool], bins: int = 10) -> Calibration:
    """Calibration of chosen labels. ValueError for a confidence that is no probability."""
    stated, right = np.asarray(confidences, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if stated.size and not ((stated >= 0) & (stated <= 1 + 1e-9)).all():
        raise ValueError(f"confidence {stated[(stated < 0) | (stated > 1)][0]} is no probability")
    which = np.clip(np.ceil(stated * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(which, minlength=bins)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(which, weights=stated, minlength=bins) / counts
        accuracy = np.bincount(which, weights=right, minlength=bins) / counts
    gaps = np.abs(np.nan_to_num(accuracy) - np.nan_to_num(confidence))
    ece = float((counts * gaps).sum() / max(1, counts.sum()))
    return Calibration(counts, confidence, accuracy, ece, float(((stated - right) ** 2).mean()) if stated.size else float("nan"))


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(np.asarray(part, dtype=np.float64)), where=np.asarray(whole) > 0)
