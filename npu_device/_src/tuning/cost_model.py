"""The cost model of a collective: a line through measured times, with its uncertainty.

The measurement is in ``measure``; the formulas for rings and trees of many ranks are in ``networks``.
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
"""The measurements, in the tuner's directory."""

# The minimum error of a median against the line, however close the repetitions are: this fraction of itself for the
# smallest size, which determines alpha; for the others, this fraction of the geometric mean of itself and the longest.
# Throughput differs by size; with these weights, beta is about the total time divided by the total bytes. If each
# counted relative to itself, small sizes, of which a step has few, would dominate.
_LEAST_ERROR = 0.02


@dataclass(frozen=True)
class CostModel:
    """One all-reduce of ``bytes`` takes ``alpha + beta * bytes`` seconds.

    Attributes:
        alpha: seconds that each collective takes whatever its size.
        beta: seconds per byte; concurrent collectives share the bandwidth.
        busy: the part of ``alpha``, in seconds, during which no other collective makes progress. 0 where collectives
            run side by side and only share the bandwidth, ``alpha`` where they run one after the other.
        alpha_error: standard error of ``alpha``, in seconds.
        beta_error: standard error of ``beta``, in seconds per byte.
        pack: seconds per byte to pack a segment's gradients before it travels, and the same again to unpack the result;
            other segments travel meanwhile. Where travelling keeps the processor busy too, packing is part of ``beta``.
        load: the fraction of a rank's cores that a collective takes from everything else while it runs at full speed, 0
            to 1.
        pace: the fraction of its full speed at which a collective runs while backward computes, above 0, at most 1:
            they share the cores.

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
        """Return the part of ``alpha``, in seconds, that the collectives spend side by side."""
        return self.alpha - self.busy

    def work(self, size: Any) -> Any:
        """Return the seconds for which a collective of ``size`` bytes (a number or an array of them) takes the
        bandwidth from the others.
        """
        return self.busy + self.beta * size

    def slower(self) -> CostModel:
        """Return the model with alpha and beta one standard error higher: the cautious reading of a prediction."""
        alpha = self.alpha + self.alpha_error
        busy = alpha * (self.busy / self.alpha) if self.alpha else 0.0  # so that rounding can't bring it above alpha
        return replace(self, alpha=alpha, beta=self.beta + self.beta_error, busy=busy, alpha_error=0.0, beta_error=0.0)

    def as_dict(self) -> dict[str, float]:
        """Return the model as a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """Return the model from the dict of ``as_dict``."""
        return cls(**{name: float(value) for name, value in values.items()})

    def write(self, path: Path) -> None:
        """Write the model as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """Read the model that ``write`` wrote."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))


def measured_in(directory: Path) -> CostModel | None:
    """Return the cost model that was measured into the tuner's directory, or the one above; None if there is none."""
    files = (place / MEASURED_FILE for place in (directory, directory.resolve().parent))
    return next((CostModel.read(path) for path in files if path.is_file()), None)


def fit(samples: Mapping[int, Sequence[float]], lanes: Mapping[int, Sequence[float]] | None = None) -> CostModel:
    """Fit a cost model to measured times.

    Args:
        samples: seconds that single collectives took, several for each size in bytes; at least two sizes.
        lanes: by number of collectives, the seconds that so many took when started at once, each of the smallest size.
            Without it, collectives are assumed to run side by side.

    Returns:
        The line by weighted least squares through the medians. The weights come from the spread of the repetitions; the
        smallest size mostly determines alpha, and larger sizes increasingly determine beta. A negative alpha or beta,
        which noise can cause, becomes 0. Packing, load and pace are not included.

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
    # If the times don't lie on a line, the misfit is part of the uncertainty.
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
    """Return the cost of one more collective beside the others, less the bandwidth that it takes."""
    found = [
        (statistics.median(times) - alpha - count * beta * size) / (count - 1)
        for count, times in lanes.items()
        if count > 1
    ]
    return min(alpha, max(0.0, statistics.fmean(found))) if found else 0.0


def _error_of_median(times: Sequence[float]) -> float:
    """Return the standard error: 1.25 standard deviations divided by the root of the count."""
    return 1.25 * statistics.stdev(times) / math.sqrt(len(times)) if len(times) > 1 else 0.0
