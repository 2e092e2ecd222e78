import numpy as np
import pytest

from askmany.pipeline.fitting import ENOUGH, Measured, fit, non_negative_least_squares, speeds


def _measured(kind: str, count: int, scale: float, noise: float, seed: int) -> list[Measured]:
    """Groups whose true seconds are scale * (0.01 documents + 1e-4 tokens + 2e-9 tokens squared + 3e-4 answer tokens)."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        lengths = generator.lognormal(8.5, 1.0, generator.integers(1, 40))
        answers = int(generator.integers(8, 400) * len(lengths))
        true = scale * (0.01 * len(lengths) + 1e-4 * lengths.sum() + 2e-9 * (lengths**2).sum() + 3e-4 * answers)
        seconds = true * generator.lognormal(0, noise)
        found.append(Measured(kind, len(lengths), int(lengths.sum()), float((lengths**2).sum()), answers, float(seconds)))
    return found


def test_it_finds_the_coefficients_behind_exact_measurements() -> None:
    found = fit(_measured("A", 60, 1.0, 0.0, seed=1))["A"]
    assert found.document_s == pytest.approx(0.01, rel=0.02)
    assert found.token_s == pytest.approx(1e-4, rel=0.02)
    assert found.token_squared_s == pytest.approx(2e-9, rel=0.02)
    assert found.answer_token_s == pytest.approx(3e-4, rel=0.02)
    assert found.error < 1e-3
    model = found.model()
    assert model is not None
    assert model.per_answer_token == pytest.approx(3.0, rel=0.03)


def test_noisy_measurements_predict_new_groups_and_speeds() -> None:
    measured = _measured("A", 200, 1.0, 0.3, seed=2) + _measured("B", 200, 1 / 0.45, 0.3, seed=3)
    fits = fit(measured)
    assert all(min(one.document_s, one.token_s, one.token_squared_s, one.answer_token_s) >= 0 for one in fits.values())
    fresh = _measured("A", 50, 1.0, 0.0, seed=4)
    ratios = [fits["A"].seconds(one.documents, one.tokens, one.tokens_squared, one.answer_tokens) / one.seconds for one in fresh]
    assert 0.85 < float(np.median(ratios)) < 1.15
    assert speeds(fits, measured) == pytest.approx({"A": 1.0, "B": 0.45}, rel=0.1)


def test_too_few_groups_fit_nothing() -> None:
    assert fit(_measured("A", ENOUGH - 1, 1.0, 0.0, seed=5)) == {}
    assert set(fit(_measured("A", ENOUGH, 1.0, 0.0, seed=5))) == {"A"}


def test_non_negative_least_squares_against_a_fine_search() -> None:
    generator = np.random.default_rng(6)
    for _ in range(20):
        matrix, target = generator.normal(size=(12, 2)), generator.normal(size=12)
        found, error = non_negative_least_squares(matrix, target)
        assert (found >= 0).all()
        assert error == pytest.approx(float(np.linalg.norm(matrix @ found - target)))
        grid = np.stack(np.meshgrid(np.linspace(0, 2, 201), np.linspace(0, 2, 201)), -1).reshape(-1, 2)
        assert error <= np.linalg.norm(grid @ matrix.T - target, axis=1).min() + 1e-9
