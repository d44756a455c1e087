"""A trial tells a mean over the samples from a sum, and both from rounding."""

from __future__ import annotations

import numpy as np
import pytest

from npu_device._src.comparison.trial import Trial

SAMPLES = np.array([[1.0, 2.0], [3.0, 5.0], [8.0, 13.0]])
WEIGHTS = (1 / 3, 2 / 3)


@pytest.mark.parametrize("reduce", [np.mean, np.sum, np.max])
def test_of_two_parts(reduce: np.ufunc) -> None:
    whole, *parts = (reduce(rows, axis=0) for rows in (SAMPLES, SAMPLES[:1], SAMPLES[1:]))
    trial = Trial(whole, [], parts, WEIGHTS)
    allowed = trial.allowed(1e-6)
    assert trial.is_mean(allowed) == (reduce is np.mean)
    assert trial.is_sum(allowed) == (reduce is np.sum)


def test_rounding_is_what_the_farthest_repeat_shows() -> None:
    whole = np.array([3.0, 4.0])
    repeat = np.array([3.0, 4.01])
    trial = Trial(whole, [whole, repeat], [np.array([3.0, 4.2])], [1.0])
    assert trial.rounding == pytest.approx(0.01)
    assert trial.allowed(0.01, absolute=0.5) == pytest.approx(0.05 + 30 * 0.01 + 0.5)
    assert trial.is_mean(trial.allowed(0.0))
    assert not Trial(whole, [], trial.parts, [1.0]).is_mean(0.1)


def test_numbers() -> None:
    trial = Trial(6.0, [6.5], [2.0, 4.0], [0.5, 0.5])
    assert (trial.mean_of_parts, trial.sum_of_parts, trial.rounding) == (3.0, 6.0, 0.5)
    assert (trial.error_of_mean, trial.error_of_sum) == (3.0, 0.0)
