"""Start the ranks. Stop them, with their children, if one fails or the launcher is told to stop: ask, wait, kill."""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import (
    KILL_SECONDS,
    RANKS_NOTICE_SECONDS,
    SAME_SIGNAL_SECONDS,
    SWEEP_SECONDS,
)
from npu_device._src.wording import counted
from npu_device.launch.arguments import Options


@dataclass(frozen=True)
class Exit:
    """The end of a process: exit code, or minus the number of the signal that killed it; seconds since the epoch."""

    status: int
    time: float

    @property
    def code(self) -> int:
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit code {self.status}"
        names = {int(each): each.name for each in signal.Signals}
        return f"killed by {names.get(-self.status, f'signal {-self.status}')}"


class Process:
    """A running rank.

    The ended process stays a zombie until ``reap``: its number, which is also its group's, can't be reused
    while signals may still be sent to it.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_exit: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.exit: Exit | None = None
        self._gone = False
        self._on_exit = on_exit
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,  # one terminal can't serve several readers
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C of the terminal goes to the launcher alone, which passes it on once
        )
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self.stdout, self.stderr = self._popen.stdout, self._popen.stderr
        self.pid = self._popen.pid
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def send(self, number: int, spares_children: bool = False) -> None:
        """Send a signal to the process and, unless ``spares_children``, to its children in the same process group."""
        if self._gone:  # another process may have the number by now
            return
        # PermissionError: the rest of the group runs as another user (sudo in the script).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if spares_children else os.killpg)(self.pid, number)

    def reap(self) -> bool:
        """Release the ended process. Return True while children of it are left in its group."""
        self._watcher.join()  # which looks at the zombie
        self._popen.wait()
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            self._gone = True
        return not self._gone

    def _watch(self) -> None:
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        self.exit = Exit(
            result.si_status if result.si_code == os.CLD_EXITED else -result.si_status, time.time()
        )
        self._on_exit()


class _Stage(enum.IntEnum):
    RUNNING = 0
    LEAVING = 1  # a rank was asked to stop, and has ended so that the job can be resumed; the others do the same
    FAILED = 2  # a rank has failed; the others have a moment to notice
    ASKED = 3
    KILLED = 4
    GIVEN_UP = 5


@dataclass(frozen=True)
class Stop:
    """An event: the attempt has failed elsewhere."""

    why: str  # what happened there
    count: int | None  # number of that attempt


@dataclass
class Supervisor:
    """Supervises an attempt on this node until its end."""

    _processes: Sequence[Process]
    _events: queue.SimpleQueue[Any]
    _options: Options
    _say: Callable[[str], object]
    _count: int
    _report: Callable[[str, str], None]
    signal: int | None = None  # the signal that ended the attempt
    interrupted: bool = False  # the launcher received a signal, perhaps after a failure
    preempted: bool = (
        False  # it received no other signal than the one that asks for a resumable end
    )
    asked_at: float | None = None  # when the ranks were asked to stop, in seconds since the epoch
    _stage: _Stage = _Stage.RUNNING
    _deadline: float | None = None
    _spared_children: bool = False

    def run(self) -> None:
        """Return when no rank is running, and no process that a rank started is left in its process group."""
        while self._running() and self._stage < _Stage.GIVEN_UP:
            self._wait(None)
            self._look_at_ended()
        left = [process for process in self._processes if process.exit and process.reap()]
        if left and (
            self._stage < _Stage.ASKED or (self._spared_children and self._stage is _Stage.ASKED)
        ):
            self._spared_children = False
            self._ask(signal.SIGTERM, left, self._options.grace)
        while left and self._stage < _Stage.GIVEN_UP:
            self._wait(SWEEP_SECONDS)
            left = [process for process in left if process.reap()]

    def _look_at_ended(self) -> None:
        ended = [
            (process.exit.time, process.rank, process.exit)
            for process in self._processes
            if process.exit
        ]
        failed = [one for one in ended if one[2].status not in (0, RESUMABLE)]
        if failed and self._stage < _Stage.FAILED:
            self._enter(_Stage.FAILED, RANKS_NOTICE_SECONDS)
            _, rank, how = min(failed)
            self._report("failed", f"rank {rank} failed ({how})")
            if self._running():
                self._say(f"rank {rank} failed ({how}); stopping the others")
        elif self._stage is _Stage.RUNNING and any(how.status == RESUMABLE for _, _, how in ended):
            self._enter(_Stage.LEAVING, self._options.preempt_timeout)

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.exit is None]

    def _wait(self, limit: float | None) -> None:
        until_deadline = (
            None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        )
        try:
            event = self._events.get(
                timeout=min((t for t in (limit, until_deadline) if t is not None), default=None)
            )
        except queue.Empty:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._escalate()
            return
        if isinstance(event, Stop):
            if self._stage < _Stage.FAILED and event.count == self._count:  # else it comes late
                self._enter(_Stage.FAILED, RANKS_NOTICE_SECONDS)
                self._say(f"{event.why}; stopping the ranks of this node")
        elif isinstance(event, int):
            self._on_signal(event)

    def _on_signal(self, number: int) -> None:
        is_request = number == self._options.preempt_signal
        self.preempted = is_request and (self.preempted or not self.interrupted)
        self.interrupted = True
        if is_request:
            self._report(
                "preempted", signal.Signals(number).name
            )  # before any rank ends because of it
        if self._stage < _Stage.FAILED:
            self.signal = number
        if self._stage < _Stage.ASKED:
            seconds = self._options.preempt_timeout if is_request else self._options.grace
            self._say(
                f"{signal.Signals(number).name}: asking {counted(len(self._running()), 'rank')} to stop within "
                f"{seconds:g} s; a second signal kills them at once"
            )
            # A rank that still has to finish its step needs its children, such as those that read data. A program that
            # isn't Python is the wrapper of one, and may not pass the signal on.
            self._spared_children = is_request and self._options.command[0] == sys.executable
            self._ask(number, self._processes, seconds)
        elif self.asked_at is not None and time.time() - self.asked_at > SAME_SIGNAL_SECONDS:
            self._kill()

    def _escalate(self) -> None:
        if self._stage in (_Stage.LEAVING, _Stage.FAILED):
            self._ask(signal.SIGTERM, self._processes, self._options.grace)
        elif self._stage is _Stage.ASKED:
            self._kill()
        else:
            self._enter(_Stage.GIVEN_UP, None)
            for process in self._running():
                self._say(
                    f"rank {process.rank} (process {process.pid}) can't be killed: it is stuck in the kernel"
                )

    def _ask(self, number: int, processes: Sequence[Process], seconds: float) -> None:
        self._enter(_Stage.ASKED, seconds)
        self.asked_at = self.asked_at or time.time()
        for process in processes:
            process.send(number, self._spared_children)

    def _kill(self) -> None:
        self._enter(_Stage.KILLED, KILL_SECONDS)
        for process in self._processes:
            process.send(signal.SIGKILL)

    def _enter(self, stage: _Stage, seconds: float | None) -> None:
        self._stage = stage
        self._deadline = None if seconds is None else time.monotonic() + seconds
