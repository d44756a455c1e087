"""What the launcher waits for: ``signal.Signals``, ends of ranks, and news of other launchers, in one queue."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Union

from npu_device.launch.reports import Report

Events = Union[queue.SimpleQueue[Any], queue.Queue[Any]]
Handlers = Mapping[type[Any], Callable[[Any], object]]  # the handler for each type of event


class Exit(NamedTuple):
    """The end of a rank's process."""

    rank: int
    status: int  # exit code, or minus the number of the signal that killed it
    time: float  # seconds since the epoch

    @property
    def code(self) -> int:
        # Numbered as a shell reports a signal.
        if self.status < 0:
            return 128 - self.status
        return self.status

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit code {self.status}"
        names = {int(number): number.name for number in signal.Signals}
        number = -self.status
        return f"killed by {names.get(number, f'signal {number}')}"


class HostReported(NamedTuple):
    node: int
    report: Report


class HostClosed(NamedTuple):
    """The client of a host has ended."""

    node: int
    exit_code: int


def handle_next(events: Events, handlers: Handlers, *moments: float | None) -> bool:
    """Pass the next event to the handler of its type; return False if none comes before the earliest moment.

    None stands for a moment that never comes. An event without a handler is dropped.
    """
    seconds = None
    limits = [moment for moment in moments if moment is not None]
    if limits:
        seconds = max(0.0, min(limits) - time.monotonic())
    try:
        event = events.get(timeout=seconds)
    except queue.Empty:
        return False
    handler = handlers.get(type(event))
    if handler is not None:
        handler(event)
    return True


def wait_for_signal(events: Events, seconds: float) -> int | None:
    """Return the number of a signal that the launcher receives in some seconds, or None; drop other events."""
    deadline = time.monotonic() + seconds
    signals: list[int] = []
    while handle_next(events, {signal.Signals: signals.append}, deadline):
        if signals:
            return signals[0]
    return None
