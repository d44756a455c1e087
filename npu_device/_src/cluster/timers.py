"""Calls that the hub makes later, unless they are cancelled."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Callable


class Timers:
    """Functions by the time at which they are called."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []
        self._acts: dict[int, Callable[[], None]] = {}  # those that haven't been cancelled
        self._numbers = itertools.count()

    def later(self, seconds: float, act: Callable[[], None]) -> Callable[[], None]:
        """Call a function after some seconds; return a function that cancels that."""
        number = next(self._numbers)
        if len(self._times) > 2 * len(self._acts) + 16:
            self._times = [each for each in self._times if each[1] in self._acts]
            heapq.heapify(self._times)
        self._acts[number] = act
        heapq.heappush(self._times, (time.monotonic() + seconds, number))

        def cancel() -> None:
            self._acts.pop(number, None)

        return cancel

    @property
    def first(self) -> float | None:
        """Return when ``run`` is to be called next, on the monotonic clock."""
        return self._times[0][0] if self._times else None

    def run(self, now: float) -> None:
        while self._times and self._times[0][0] <= now:
            act = self._acts.pop(heapq.heappop(self._times)[1], None)
            if act is not None:
                act()
