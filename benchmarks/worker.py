"""One process of a set (``process_set``): joins its side's cluster, then makes and times steps on command."""

from __future__ import annotations

import ctypes
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, Callable

from benchmarks.sides import SIDES


class Worker:
    """The steps that this process has made, by key.

    Args:
        side: an object whose methods make steps.
    """

    def __init__(self, side: Any) -> None:
        self._side = side
        self._steps: dict[str, Callable[[], Any]] = {}

    def prepare(self, key: str, method: str, arguments: tuple[Any, ...]) -> None:
        """Make a step, replacing the one with the same key, and run it once, which traces it."""
        step = getattr(self._side, method)(*arguments)
        _finish(step())
        self._steps[key] = step

    def measure(self, key: str, steps: int) -> tuple[float, float]:
        """Return the seconds per step, and the processor's seconds that this process spends on it. One untimed step
        goes first: it wakes the ranks and brings them into line.
        """
        step = self._steps[key]
        _finish(step())
        started, used = time.perf_counter(), time.process_time()
        for _ in range(steps - 1):
            step()
        _finish(step())
        return (time.perf_counter() - started) / steps, (time.process_time() - used) / steps


def _finish(result: Any) -> None:
    """Wait for a tensor that may still be computed on a GPU, without copying all of it. None needs no wait."""
    if result is not None:
        (result[:1] if result.shape.rank else result).numpy()


def _give_memory_back() -> None:
    """Free memory that this process doesn't use while it sleeps, several GB with BERT's gradients, for the other set.
    The untimed step of the next turn takes it again.
    """
    trim = getattr(
        ctypes.CDLL(None), "malloc_trim", None
    )  # glibc keeps freed memory, and only glibc has this
    if trim is not None:
        trim(0)


def main() -> None:
    descriptor, side_name, rank, ranks = (
        int(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    with Connection(descriptor) as connection:
        worker = Worker(SIDES[side_name].make(rank, ranks))
        while True:
            try:
                name, *arguments = connection.recv()
            except (EOFError, OSError):  # the coordinator has no more commands
                return
            try:
                answer = (True, getattr(worker, name)(*arguments))
            except Exception as error:
                traceback.print_exc()
                answer = (False, f"{type(error).__name__}: {error}")
            _give_memory_back()
            connection.send(answer)


if __name__ == "__main__":
    main()
