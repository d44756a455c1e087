"""How long a collective takes: a line through measured times, with its uncertainty.

What is measured, and how, is ``measure``'s part; the formulas for rings and trees of many ranks are ``networks``'s.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MEASURED_FILE = "collectives.json"
"""What was measured, in the tuner's directory."""

CALIBRATED_FILE = "calibrated.json"
"""What the tuner's runs have made of it, beside it."""

# How far off the line a median may be, however alike the repetitions are: this part of itself for the smallest size,
# which is to say what alpha is; for the others of the geometric mean of itself and the longest. Bytes aren't equally
# fast in all sizes; with these weights beta is about what all of them took by what all of them had. If each counted by
# its own part, small ones, of which a step has few, would decide.
_LEAST_ERROR = 0.02


@dataclass(frozen=True)
class CostModel:
    """One all-reduce of ``bytes`` takes ``alpha + beta * bytes`` seconds.

    Attributes:
        alpha: seconds that each collective takes whatever its size.
        beta: seconds a byte; collectives under way at once share the bandwidth.
        busy: the part of ``alpha``, in seconds, during which no other collective gets on. 0 where collectives run side
            by side and only share the bandwidth, ``alpha`` where they run one after the other.
        alpha_error: standard error of ``alpha``, in seconds.
        beta_error: standard error of ``beta``, in seconds a byte.
        pack: seconds a byte to put a segment's gradients together before it travels, and as many to take the result
            apart; other segments travel meanwhile. Where travelling keeps the processor busy, too, it's in ``beta``.
        load: the part of a rank's cores that a collective takes from everything else while it goes on at full speed, 0
            to 1.
        pace: the part of its full speed at which a collective goes on while backward computes, above 0, at most 1: they
            share the cores.

    Raises:
        ValueError: a negative figure, ``busy`` above ``alpha``, ``load`` above 1, or ``pace`` 0 or above 1.
    """

    alpha: float
    beta: float
    busy: float = 0.0
    alpha_error: float = 0.0
    beta_error: float = 0.0
    pack: float = 0.0
    load: float = 0.0
    pace: float = 1.0

    def __post_init__(self) -> None:
        seconds = 0 <= self.busy <= self.alpha and self.beta >= 0 and self.pack >= 0
        if not (seconds and 0 <= self.load <= 1 and 0 < self.pace <= 1):
            raise ValueError(f"{self}: expected seconds from 0, busy <= alpha, load from 0 to 1, pace above 0 up to 1")

    @property
    def latency(self) -> float:
        """The part of ``alpha``, in seconds, that the collectives spend side by side."""
        return self.alpha - self.busy

    def work(self, size: Any) -> Any:
        """Seconds that a collective of ``size`` bytes (a number, or an array of them) keeps the others from their
        bandwidth.
        """
        return self.busy + self.beta * size

    def slower(self) -> CostModel:
        """The same with alpha and beta one standard error up: what a prediction should be read with."""
        alpha = self.alpha + self.alpha_error
        busy = alpha * (self.busy / self.alpha) if self.alpha else 0.0  # so that rounding can't bring it above alpha
        return replace(self, alpha=alpha, beta=self.beta + self.beta_error, busy=busy, alpha_error=0.0, beta_error=0.0)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """What ``as_dict`` gave."""
        return cls(**{name: float(value) for name, value in values.items()})

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """What ``write`` wrote."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))


def best_known(directory: Path) -> CostModel | None:
    """The calibrated cost model of the tuner's directory, else the measured one; None where there is neither. A run's
    directory stands in it, and has that of the tuner's.
    """
    places = (directory, directory.resolve().parent)
    found = (place / name for place in places for name in (CALIBRATED_FILE, MEASURED_FILE))
    return next((CostModel.read(path) for path in found if path.is_file()), None)


def fit(samples: Mapping[int, Sequence[float]], lanes: Mapping[int, Sequence[float]] | None = None) -> CostModel:
    """A cost model from measured times.

    Args:
        samples: seconds that single collectives took, several for each size in bytes; at least two sizes.
        lanes: seconds that several collectives took which were started at once with the smallest of the sizes each, by
            their number. Without them the collectives count as running side by side.

    Returns:
        The line by weighted least squares through the medians. The weights come from how much the repetitions differ;
        the smallest size counts for alpha above all, and the more bytes another one has, the more it does for beta. A
        negative alpha or beta, which noise can bring, becomes 0. Packing, load and pace aren't in it.

    Raises:
        ValueError: fewer than two sizes, or a size without times.
    """
    if len(samples) < 2 or not all(samples.values()):
        raise ValueError(f"times of {len(samples)} size(s) were given; expected some for each of at least two sizes")
    medians = {size: statistics.median(times) for size, times in sorted(samples.items())}
    smallest, longest = min(medians), max(medians.values())
    points = []
    for size, median in medians.items():
        least = _LEAST_ERROR * math.sqrt(median * (median if size == smallest else longest))
        points.append((float(size), median, max(_error_of_median(samples[size]), least, 1e-9)))
    weights = [1 / error**2 for _, _, error in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _, _) in zip(weights, points)) / total
    mean_time = sum(w * time for w, (_, time, _) in zip(weights, points)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _, _) in zip(weights, points))
    slope = sum(w * (size - mean_size) * (time - mean_time) for w, (size, time, _) in zip(weights, points)) / spread
    beta = max(0.0, slope)
    alpha = max(0.0, mean_time - beta * mean_size)
    # Where the times don't lie on a line, the misfit is part of the uncertainty.
    misfit = sum(w * (time - alpha - beta * size) ** 2 for w, (size, time, _) in zip(weights, points))
    scale = max(1.0, misfit / max(1, len(points) - 2))
    return CostModel(
        alpha=alpha,
        beta=beta,
        busy=_busy(alpha, beta, smallest, lanes or {}),
        alpha_error=math.sqrt(scale * (1 / total + mean_size**2 / spread)),
        beta_error=math.sqrt(scale / spread),
    )


def _busy(alpha: float, beta: float, size: int, lanes: Mapping[int, Sequence[float]]) -> float:
    """What one more collective beside the others costs, less the bandwidth that it takes."""
    found = [
        (statistics.median(times) - alpha - count * beta * size) / (count - 1)
        for count, times in lanes.items()
        if count > 1
    ]
    return min(alpha, max(0.0, statistics.fmean(found))) if found else 0.0


def _error_of_median(times: Sequence[float]) -> float:
    """The standard error: 1.25 standard deviations by the root of the number."""
    return 1.25 * statistics.stdev(times) / math.sqrt(len(times)) if len(times) > 1 else 0.0
