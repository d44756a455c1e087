"""The points of an iteration, known when its function is traced, and how they become a record.

Imports no TensorFlow: ``steps`` creates the schemas.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from npu_device._src.trace.records import GradientRecord, Iteration


@dataclass(frozen=True)
class PointSchema:
    """The points of an iteration, in this order: fp_start (with ``has_start``), bp_end (with ``has_bp_end``), when each
    gradient was there, the end of each segment, iteration_end (with ``has_end``).

    Attributes:
        gradients: segment by segment, in the order of production.
        shapes: their shapes, as text.
        segments: first and last gradient of each.
        group: name of the group.
        backend: the backend that reduces them.
        has_start: the start of forward is a point of its own; otherwise it is the end of the iteration before.
        has_bp_end: backward's end is a point of its own; otherwise it is the last gradient.
        has_end: the update's end is known; otherwise the last reduction ends the iteration.
        waits_for_all: no segment starts before all gradients are there.
    """

    gradients: tuple[GradientRecord, ...]
    shapes: tuple[str, ...]
    segments: tuple[tuple[int, int], ...]
    group: str
    backend: str
    has_start: bool = True
    has_bp_end: bool = False
    has_end: bool = False
    waits_for_all: bool = False

    @cached_property
    def model(self) -> str:
        """Return the fingerprint of the gradients."""
        described = [[gradient.dtype, shape] for gradient, shape in zip(self.gradients, self.shapes)]
        return hashlib.blake2b(json.dumps(described).encode(), digest_size=8).hexdigest()

    @cached_property
    def bytes(self) -> int:
        """Return the bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    def iteration(
        self, number: int, points: Sequence[float], offset_us: float, previous_end: float | None
    ) -> Iteration:
        """Return the record of an iteration.

        Args:
            number: of the iteration.
            points: in seconds.
            offset_us: added to all of them.
            previous_end: ``iteration_end`` of the iteration before.
        """
        # A tenth of a microsecond is finer than the clock.
        times = [round(point * 1e6 + offset_us, 1) for point in points]
        end = times.pop() if self.has_end else None
        fp_start = times.pop(0) if self.has_start else previous_end
        bp_end = times.pop(0) if self.has_bp_end else None
        ready, ends = times[: len(self.gradients)], times[len(self.gradients) :]
        last = max(ready)
        allreduce = []
        for (first, final), reduced in zip(self.segments, ends):
            start = last if self.waits_for_all else max(ready[first : final + 1])
            allreduce.append((start, max(start, reduced)))
        last_reduced = max(reduced for _, reduced in allreduce)
        return Iteration(
            iteration=number,
            fp_start=min(ready) if fp_start is None else min(fp_start, *ready),
            bp_end=last if bp_end is None else bp_end,
            iteration_end=last_reduced if end is None else max(end, last_reduced),
            allreduce=tuple(allreduce),
            ready=tuple(ready),
            previous_end=previous_end,
        )
