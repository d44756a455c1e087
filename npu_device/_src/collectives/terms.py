"""The agreement on one call, which an operation passes on to its backend.

``agreement`` makes it. The ranks may agree before the call, or with the first data that the call sends: then the first
collective takes the terms and carries them.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Union

import tensorflow as tf

from npu_device._src.collectives.job import Job


class Terms(NamedTuple):
    """The part of an agreement that the ranks compare before they read each other's data.

    Attributes:
        head: two 32-bit numbers that are the same on all ranks.
        row: returns the call as the stall watch shows it.
        overlaps: whether another thread of this rank is in a call of the group; if so, every rank refuses.
        refuse: makes the error for ranks whose heads differ; takes the position of the call in the group's
            sequence.
    """

    head: tuple[int, int]
    row: Callable[[], dict[str, Any]]
    overlaps: bool
    refuse: Callable[[int], Exception]


Shapes = Union[int, tf.Tensor]
"""A 32-bit number that is the same on all ranks if the tensors' shapes are; int32 if only the running graph knows
it.
"""


class Agreement:
    """The agreement on one call.

    Args:
        job: the job.
        terms: what the call's first collective has to compare; None if nothing is left to be compared.
        shapes: belongs to the terms.
        carries: whether small data travel with the terms, instead of through the group's own backend
            (``choice.carries``).

    Attributes:
        job: the job.
        carries: see above.
    """

    def __init__(
        self, job: Job, terms: Terms | None = None, shapes: Shapes = 0, carries: bool | tf.Tensor | None = None
    ) -> None:
        self.job = job
        self.carries = carries
        self._open: tuple[Terms | None, Shapes] = terms, shapes

    @property
    def is_open(self) -> bool:
        """Return True while no collective has taken the terms."""
        return self._open[0] is not None

    def take(self) -> tuple[Terms | None, Shapes]:
        """Return terms and shapes for the first collective of the call, and ``(None, 0)`` for those that follow."""
        taken, self._open = self._open, (None, 0)
        return taken
