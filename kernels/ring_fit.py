"""What each way round is expected to take for any lengths, from measured cells: the empirical fit behind `ring_choice`.

Times of a way as a surface over log T and log(T + C): a plane (the form that arXiv 2411.01783, appendix D, fits to the ratio of two ways)
and what bends it, so that it passes through every measured cell and goes on as a plane beyond them. Plain numbers: the rank that fits
sends the result to the others, and all that ask the same get the same. Letters: T new tokens, C cached tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[float, float]  # log T, log(T + C)


@dataclass(frozen=True, slots=True)
class Surface:
    """log seconds at (x, y) = a + b * x + c * y + the sum of weights * distance to the measured points."""

    plane: tuple[float, float, float]
    weights: tuple[float, ...]

    def at(self, point: Point, points: Sequence[Point]) -> float:
        bend = math.fsum(w * math.dist(point, one) for w, one in zip(self.weights, points, strict=True))
        return self.plane[0] + self.plane[1] * point[0] + self.plane[2] * point[1] + bend


@dataclass(frozen=True, slots=True)
class Fit:
    """A surface for each way that was measured."""

    points: tuple[Point, ...]
    surfaces: Mapping[str, Surface]

    def seconds(self, new_tokens: int, cached_tokens: int) -> dict[str, float]:
        """The expected time of each way."""
        point = _point(new_tokens, cached_tokens)
        return {way: math.exp(surface.at(point, self.points)) for way, surface in self.surfaces.items()}


def fit_ways(cells: Sequence[tuple[int, int, Mapping[str, float]]]) -> Fit:
    """From cells (T, C, seconds by way). Raises ValueError unless three of the cells, at different lengths, span a plane."""
    measured = {_point(new, cached): seconds for new, cached, seconds in cells}
    points = tuple(measured)
    design = np.array([[1.0, x, y] for x, y in points]).reshape(-1, 3)
    if np.linalg.matrix_rank(design, tol=1e-6) < 3:
        raise ValueError(f"a fit needs at least 3 cells that differ in new and in cached tokens, got {[cell[:2] for cell in cells]}")
    distances = np.array([[math.dist(one, other) for other in points] for one in points])
    system = np.block([[distances, design], [design.T, np.zeros((3, 3))]])
    ways = next(iter(measured.values()))
    surfaces = {way: _solved(system, [math.log(measured[point][way]) for point in points]) for way in ways}
    return Fit(points, surfaces)


def _solved(system: np.ndarray, logs: Sequence[float]) -> Surface:
    solution = np.linalg.solve(system, np.array([*logs, 0.0, 0.0, 0.0])).tolist()
    a, b, c = solution[-3:]
    return Surface((a, b, c), tuple(solution[:-3]))


def _point(new: int, cached: int) -> Point:
    return math.log(new), math.log(new + cached)
