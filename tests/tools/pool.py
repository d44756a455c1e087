"""Pools of ranks that also fail a test at a warning, and at a thread or a descriptor that a body leaves each time."""

from __future__ import annotations

from typing import Any, Callable

import leak_check
from ranks import clean_environment

from npu_device._src.pools.pool import Pool as PlainPool

_REPETITIONS = 3  # of a body that has left something
_WORN_SECONDS = 60.0  # of CPU time; memory grows with what bodies leave, by some 6 MB a second


class Pool(PlainPool):
    """See ``npu_device._src.pools.pool``."""

    def __init__(self, size: int, keras: str, **environment: str) -> None:
        path = clean_environment()["PYTHONPATH"]
        super().__init__(size, keras, **{"PYTHONPATH": path, **environment})
        self._growing: set[str] = set()  # bodies that have left something at their first run
        self._seconds = 0.0  # of CPU time that a rank has spent on bodies
        super().run(leak_check.prepare)

    @property
    def is_worn(self) -> bool:
        """Return True if new ranks would be faster."""
        return self._seconds > _WORN_SECONDS

    def run(self, body: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        """Call ``body(*arguments)`` on every rank; the results by rank.

        A body that has left something is run again, on the same arguments: what all later bodies use, such as a group's
        background thread, is made when a rank first needs it, which is at another run on another rank.
        """
        ends = super().run(leak_check.call, body, arguments, timeout=timeout)
        self._seconds += max(end.seconds for end in ends)
        if any(end.left for end in ends) and body.__qualname__ not in self._growing:
            self._growing.add(body.__qualname__)
            left = {rank: end.left for rank, end in enumerate(ends) if end.left}
            for _ in range(_REPETITIONS):
                again = super().run(leak_check.call, body, arguments, timeout=timeout)
                left = {rank: again[rank].left for rank in left if again[rank].left}
                if not left:
                    break
            if left:
                problems = [f"rank {rank}: {what}" for rank, what in left.items()]
                raise AssertionError(
                    "\n".join([f"each run of {body.__qualname__} leaves something:", *problems])
                )
        warned = [
            f"rank {rank} warned: {warning}"
            for rank, end in enumerate(ends)
            for warning in end.warnings
        ]
        assert not warned, "\n".join([*warned, self.tails()])
        return [end.value for end in ends]
