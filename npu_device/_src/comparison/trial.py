"""A quantity that is computed once and again, and from parts of the samples: what of its differences is rounding, and
is it the mean over the parts, or their sum? Numpy only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TIMES_ROUNDING = 30.0  # sums over parts are rounded more often than a repeat shows


def norm(array: Any) -> float:
    """Return the Euclidean norm of an array of any shape, or the size of a number."""
    return float(np.linalg.norm(np.ravel(array)))


@dataclass(frozen=True)
class Trial:
    """A quantity of a step: a gradient, a loss, the change of a variable. Its arrays have one shape.

    Args:
        whole: computed from all samples.
        repeats: from all samples again, with inputs or weights that differ by rounding only.
        parts: from parts of the samples, one for each rank, say.
        weights: each part's fraction of the samples; nothing if no mean is asked for.
        doubled: computed from all samples twice, which tells a sum from a quotient of sums; None if that isn't known.
    """

    whole: Any
    repeats: Sequence
    parts: Sequence = ()
    weights: Sequence[float] = ()
    doubled: Any = None

    @functools.cached_property
    def size(self) -> float:
        """Return the norm of the whole."""
        return norm(self.whole)

    @functools.cached_property
    def rounding(self) -> float:
        """Return the largest distance of a repeat from the whole."""
        return max(map(self.distance, self.repeats), default=0.0)

    @property
    def mean_of_parts(self) -> Any:
        """Return the mean over the parts, weighted by their samples."""
        return sum(part * weight for part, weight in zip(self.parts, self.weights))

    @property
    def sum_of_parts(self) -> Any:
        """Return the sum over the parts."""
        return sum(self.parts)

    @functools.cached_property
    def error_of_mean(self) -> float:
        """Return how far the mean over the parts is from the whole."""
        return self.distance(self.mean_of_parts)

    @functools.cached_property
    def error_of_sum(self) -> float:
        """Return how far the sum over the parts is from the whole."""
        return self.distance(self.sum_of_parts)

    @functools.cached_property
    def error_of_doubled(self) -> float:
        """Return how far half of what the samples give twice is from the whole: 0 for a sum."""
        if self.doubled is None:
            return 0.0
        return self.distance(self.doubled / 2)

    def distance(self, array: Any) -> float:
        """Return the norm of the difference from the whole; NaN if both are infinite."""
        with np.errstate(invalid="ignore"):
            return norm(array - self.whole)

    def allowed(self, relative: float, absolute: float = 0.0) -> float:
        """Return the largest distance that rounding explains, beside two tolerances."""
        return relative * self.size + TIMES_ROUNDING * self.rounding + absolute

    def is_mean(self, allowed: float) -> bool:
        """Return True if the whole is the mean over the parts."""
        return self.error_of_mean <= allowed

    def is_sum(self, allowed: float) -> bool:
        """Return True if the whole is the sum over the parts, and twice as large for the samples twice."""
        # A quotient is the sum over the parts, too, if one of them has nothing to count.
        return self.error_of_sum <= allowed and self.error_of_doubled <= allowed
