"""The time until a waiting process wakes up: the counters of the shared-memory backend (futex), asleep and spinning
first, beside an eventfd and a pipe.

``python -m benchmarks.wake`` plays ping-pong between two processes; a time is half of a round.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Callable

from npu_device._src.collectives.backends.shared_memory.futex import Counter
from npu_device._src.collectives.backends.shared_memory.mapping import PAGE, Offer

_ROUNDS, _WARM_UP = 3000, 300
_LOOKS = 10_000
_THINK_SECONDS = 200e-6  # long enough for the other one to fall asleep

_Way = tuple[Callable[[int, int], None], Callable[[int, int], None]]
"""``notify(end, number)`` and ``wait(end, number)``; the end of the first process is 0."""


def main() -> None:
    print("| way | µs until the other one goes on | µs that had slept for 0.2 ms |")
    print("|---|--:|--:|")
    for name, way in (
        ("futex", _counters(0)),
        ("futex, looking first", _counters(_LOOKS)),
        ("eventfd", _eventfds()),
        ("pipe", _pipes()),
    ):
        print(f"| {name} | {_ping_pong(way, 0) * 1e6:.1f} | {_ping_pong(way, _THINK_SECONDS) * 1e6:.1f} |", flush=True)


def _ping_pong(way: _Way, think: float) -> float:
    """Return the median seconds from a notification until the other process goes on."""
    notify, wait = way
    child = os.fork()
    rounds = range(1, _WARM_UP + _ROUNDS + 1)
    if child == 0:
        for number in rounds:
            wait(1, number)
            notify(0, number)
        os._exit(0)
    times = []
    for number in rounds:
        end = time.perf_counter() + think
        while think and time.perf_counter() < end:
            pass
        began = time.perf_counter()
        notify(1, number)
        wait(0, number)
        times.append(time.perf_counter() - began)
    os.waitpid(child, 0)
    notify(0, 0)  # resets a counter for the next game
    notify(1, 0)
    return statistics.median(times[_WARM_UP:]) / 2


def _counters(looks: int) -> _Way:
    memory = Offer(PAGE).memory
    ends = Counter(memory, 0), Counter(memory, 64)

    def wait(end: int, number: int) -> None:
        while not ends[end].wait_for(number, looks):
            pass

    return lambda end, number: ends[end].advance_to(number), wait


def _eventfds() -> _Way:
    import ctypes

    # Python has os.eventfd from 3.10 only.
    ends = [ctypes.CDLL(None).eventfd(0, 0) for _ in range(2)]
    return (lambda end, number: _write(ends[end], number)), (lambda end, _: _read(ends[end]))


def _write(descriptor: int, number: int) -> None:
    if number:
        os.write(descriptor, (1).to_bytes(8, "little"))


def _read(descriptor: int) -> None:
    os.read(descriptor, 8)


def _pipes() -> _Way:
    ends = os.pipe(), os.pipe()
    return (lambda end, number: _write(ends[end][1], number)), (lambda end, _: _read(ends[end][0]))


if __name__ == "__main__":
    main()
