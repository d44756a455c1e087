"""The iterations of a long run that are recorded. Imports no TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass

_DENSE = 100


@dataclass(frozen=True)
class Schedule:
    """The iterations to record: those in the windows, or without windows the first 100 and then fewer and fewer (every
    2nd up to 200, every 4th up to 400, …), so that a run of a million steps leaves some 800 lines.
    """

    windows: tuple[tuple[int, int], ...] = ()

    def wants(self, iteration: int) -> bool:
        """Return True for an iteration to record; they count from 1.

        >>> [number for number in range(95, 112) if Schedule().wants(number)]
        [95, 96, 97, 98, 99, 100, 102, 104, 106, 108, 110]
        >>> Schedule(((3, 4), (10, 10))).wants(4)
        True
        """
        if self.windows:
            return any(first <= iteration <= last for first, last in self.windows)
        doublings = ((iteration - 1) // _DENSE).bit_length()
        return iteration % (1 << doublings) == 0
