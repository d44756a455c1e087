"""Calls that the hub makes later. Knows no sockets: the loop of the hub asks when the next call is due."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Callable


class Timers:
    """Calls that the hub makes later, unless they are cancelled."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []
        # The functions of timers that haven't been cancelled, by number.
        self._acts: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def later(self, seconds: float, act: Callable[[], None]) -> Callable[[], object]:
        """Call a function after some seconds; return a function that cancels that."""
        # The number tells timers of equal times apart: the earlier call comes first.
        number = next(self._numbers)
        if len(self._times) > 2 * len(self._acts) + 16:
            # Most have been cancelled: without them, the heap stays as small as the number of open requests.
            self._times = [(due, number) for due, number in self._times if number in self._acts]
            heapq.heapify(self._times)
        self._acts[number] = act
        heapq.heappush(self._times, (time.monotonic() + seconds, number))
        return lambda: self._acts.pop(number, None)

    @property
    def next_due(self) -> float | None:
        """Return when ``run`` is to be called next, on the monotonic clock."""
        if not self._times:
            return None
        return self._times[0][0]

    def run(self, time_now: float) -> None:
        while self._times and self._times[0][0] <= time_now:
            _, number = heapq.heappop(self._times)
            act = self._acts.pop(number, None)
            if act is not None:
                act()
