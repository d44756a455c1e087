"""What a rank may ask of the hub, so that none can fill its memory: the number of unanswered requests, and the bytes
that are kept.
"""

from __future__ import annotations

from typing import Any, Callable

from npu_device._src.cluster.frames import ranks_of

_LONGEST_SECONDS = 1e6
_MOST_REQUESTS = 1000  # of a rank
_MOST_BYTES = 1 << 28  # of all ranks together


class HubLimits:
    """The requests of a job's ranks that wait for an answer, and what is kept of them.

    Args:
        size: number of ranks.
        later: calls a function after some seconds; returns a function that cancels it.
    """

    def __init__(self, size: int, later: Callable[[float, Callable[[], None]], Callable[[], None]]) -> None:
        self._size = size
        self._later = later
        self._requests: list[dict[int, Callable[[], None] | None]] = [{} for _ in range(size)]
        self._bytes = 0

    def expect(self, rank: int, request: int, seconds: float = 0.0, give_up: Callable[[], None] | None = None) -> None:
        """Expect the answer to a request; call a function if there is none in time.

        Raises:
            ValueError: the rank has made too many requests, or this one twice.
        """
        mine = self._requests[rank]
        if request in mine or len(mine) >= _MOST_REQUESTS:
            raise ValueError("too many requests, or one twice")
        mine[request] = None if give_up is None else self._later(seconds, give_up)

    def answered(self, rank: int, request: int) -> None:
        """End the waiting for an answer."""
        cancel = self._requests[rank].pop(request, None)
        if cancel is not None:
            cancel()

    def hold(self, size: int) -> None:
        """Count bytes that are kept from now on.

        Raises:
            ValueError: there are too many.
        """
        if self._bytes + size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB are kept")
        self._bytes += size

    def release(self, size: int) -> None:
        """Count bytes that are no longer kept."""
        self._bytes -= size

    def ranks(self, text: str | None) -> set[int]:
        """Return the ranks that a message names; all if it names none.

        Raises:
            ValueError: there are no such ranks.
        """
        found = set(range(self._size) if text is None else ranks_of(text))
        if max(found, default=0) >= self._size:
            raise ValueError("no such rank")
        return found


def seconds_of(message: dict[str, Any]) -> float:
    """Return how long a rank wants to wait.

    Raises:
        ValueError: not a time.
    """
    seconds = float(message["seconds"])
    if not -1.0 <= seconds <= _LONGEST_SECONDS:  # nor NaN
        raise ValueError("no such time")
    return seconds
