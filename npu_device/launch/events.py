"""What the launcher waits for: signals, the ends of ranks, and news of other launchers, in one queue."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

from npu_device.launch.reports import Report


@dataclass(frozen=True)
class SignalReceived:
    number: int


@dataclass(frozen=True)
class RankEnded:
    rank: int


@dataclass(frozen=True)
class StopOrdered:
    """The attempt has failed on another node."""

    why: str
    attempt: int | None  # number of the attempt


@dataclass(frozen=True)
class AttemptOrdered:
    """Node 0 lets an attempt begin."""

    count: int  # number of the attempt
    nodes: Sequence[int]
    job_id: str
    port: int
    copies: Sequence[str]  # where each node takes copies in memory: host and port
    saves_copies: bool  # the attempt is that of the processes that write such copies to the disk


@dataclass(frozen=True)
class TextReceived:
    """Node 0 has a message for the user."""

    text: str


@dataclass(frozen=True)
class HostReported:
    node: int
    report: Report


@dataclass(frozen=True)
class HostClosed:
    """The client of a host has ended."""

    node: int
    exit_code: int


Event = Union[
    SignalReceived,
    RankEnded,
    StopOrdered,
    AttemptOrdered,
    TextReceived,
    HostReported,
    HostClosed,
]
Handlers = Mapping[type[Any], Callable[[Any], object]]  # the handler for each type of event


class Events:
    """The queue."""

    def __init__(self) -> None:
        # A signal handler can put an event in while its own thread takes one out.
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def handle_next(self, seconds: float | None, handlers: Handlers) -> bool:
        """Pass the next event to the handler of its type, if there is one; return False if none comes in time."""
        try:
            event = self._queue.get(timeout=seconds)
        except queue.Empty:
            return False
        handler = handlers.get(type(event))
        if handler is not None:
            handler(event)
        return True

    def wait_for_signal(self, seconds: float) -> int | None:
        """Return the number of a signal that the launcher receives in some seconds, or None; drop other events."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                event = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if isinstance(event, SignalReceived):
                return event.number
