"""Waits for the ranks, and stops all of them when one fails or the launcher is told to stop: ask, wait, kill."""

from __future__ import annotations

import enum
import queue
import signal
import time
from collections.abc import Sequence
from typing import Callable

from npu_device.launch.processes import Process

# Survivors of a failure raise errors of their own that say what they were doing; they get this long to do it.
_NOTICE_SECONDS = 2.0
# A process that SIGKILL doesn't end within this time hangs in the kernel (a dead network file system, a driver).
_KILL_SECONDS = 10.0
# A Ctrl-C can come by two roads at once: from the terminal, and handed on by the program that started npurun (uv run).
_SAME_SIGNAL_SECONDS = 0.2
_SWEEP_SECONDS = 0.02


class _Stage(enum.IntEnum):
    RUNNING = 0
    FAILED = 1  # a rank has failed; the others have a moment to notice
    ASKED = 2
    KILLED = 3
    GIVEN_UP = 4


class Supervisor:
    """Sees a launch to its end.

    Args:
        processes: the running ranks.
        events: the number of a signal that the launcher got, or None when a rank has ended.
        grace: seconds between asking and killing.
        say: prints a message of the launcher.

    Attributes:
        signal: the signal that ended the launch, or None.
        asked_at: when the ranks were asked to stop, in seconds since the epoch; None when they weren't.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        events: queue.SimpleQueue[int | None],
        grace: float,
        say: Callable[[str], None],
    ) -> None:
        self.signal: int | None = None
        self.asked_at: float | None = None
        self._processes = processes
        self._events = events
        self._grace = grace
        self._say = say
        self._stage = _Stage.RUNNING
        self._deadline: float | None = None

    def run(self) -> None:
        """Return when no rank is running, and nothing that a rank started is left in its process group."""
        while self._running() and self._stage < _Stage.GIVEN_UP:
            self._wait(None)
            failed = [(p.exit.time, p.rank, p.exit) for p in self._processes if p.exit and p.exit.status != 0]
            if self._stage is _Stage.RUNNING and failed:
                self._enter(_Stage.FAILED, _NOTICE_SECONDS)
                if self._running():
                    _, rank, how = min(failed)
                    self._say(f"rank {rank} failed ({how}); stopping the others")
        left = [process for process in self._processes if process.exit and process.reap()]
        if left and self._stage < _Stage.ASKED:
            self._ask(signal.SIGTERM, left)
        while left and self._stage < _Stage.GIVEN_UP:
            self._wait(_SWEEP_SECONDS)
            left = [process for process in left if process.reap()]

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.exit is None]

    def _wait(self, limit: float | None) -> None:
        """Wait for an event, the deadline or the limit, and act on what came."""
        until_deadline = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            event = self._events.get(timeout=min((t for t in (limit, until_deadline) if t is not None), default=None))
        except queue.Empty:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._escalate()
            return
        if event is not None:
            self._on_signal(event)

    def _on_signal(self, number: int) -> None:
        if self._stage is _Stage.RUNNING:
            self.signal = number
        if self._stage < _Stage.ASKED:
            name = signal.Signals(number).name
            self._say(f"{name}: asking {len(self._running())} rank(s) to stop; the same again kills them at once")
            self._ask(number, self._processes)
        elif self.asked_at is not None and time.time() - self.asked_at > _SAME_SIGNAL_SECONDS:
            self._kill()

    def _escalate(self) -> None:
        if self._stage is _Stage.FAILED:
            self._ask(signal.SIGTERM, self._processes)
        elif self._stage is _Stage.ASKED:
            self._kill()
        else:
            self._enter(_Stage.GIVEN_UP, None)
            for process in self._running():
                self._say(f"rank {process.rank} (process {process.pid}) can't be killed, it hangs in the kernel")

    def _ask(self, number: int, processes: Sequence[Process]) -> None:
        self._enter(_Stage.ASKED, self._grace)
        self.asked_at = time.time()
        for process in processes:
            process.send(number)

    def _kill(self) -> None:
        self._enter(_Stage.KILLED, _KILL_SECONDS)
        for process in self._processes:
            process.send(signal.SIGKILL)

    def _enter(self, stage: _Stage, seconds: float | None) -> None:
        self._stage = stage
        self._deadline = None if seconds is None else time.monotonic() + seconds
