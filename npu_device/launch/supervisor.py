"""Start the ranks. Stop them, with their children, if one fails or the launcher is told to stop: ask, wait, kill."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import (
    KILL_SECONDS,
    LATE_RANK_SECONDS,
    RANKS_NOTICE_SECONDS,
    SAME_SIGNAL_SECONDS,
    SWEEP_SECONDS,
)
from npu_device._src.wording import counted
from npu_device.launch.arguments import Options
from npu_device.launch.events import Events, Handlers, RankEnded, SignalReceived, StopOrdered


@dataclass(frozen=True)
class Exit:
    """The end of a process: exit code, or minus the number of the signal that killed it; seconds since the epoch."""

    status: int
    time: float

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


class RankProcess:
    """The process of a rank.

    The ended process stays a zombie until ``reap``: its number, which is also its group's, can't be reused
    while signals may still be sent to it.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        events: Events,
    ) -> None:
        self.rank = rank
        self.exit: Exit | None = None
        self._gone = False
        self._events = events
        self._popen = subprocess.Popen(
            command,
            env=environment,
            # One terminal can't serve several readers.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C of the terminal goes to the launcher alone, which passes it on once.
            start_new_session=True,
        )
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self.stdout = self._popen.stdout
        self.stderr = self._popen.stderr
        self.pid = self._popen.pid
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def send(self, number: int, spares_children: bool = False) -> None:
        """Send a signal to the process and, unless ``spares_children``, to its children in the same process group."""
        # Another process may have the number by now.
        if self._gone:
            return
        # A PermissionError tells that the rest of the group runs as another user (sudo in the script).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if spares_children:
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)

    def reap(self) -> bool:
        """Release the ended process. Return True while children of it are left in its group."""
        # Waited for first, since the watcher looks at the zombie, which ``wait`` below removes.
        self._watcher.join()
        self._popen.wait()
        # Signal 0 only asks whether the group still has members.
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            self._gone = True
        return not self._gone

    def _watch(self) -> None:
        # WNOWAIT leaves the zombie, which keeps its number from being used again.
        child = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert child is not None
        status = child.si_status
        if child.si_code != os.CLD_EXITED:
            status = -status
        self.exit = Exit(status, time.time())
        self._events.put(RankEnded(self.rank))


class _Stage(enum.IntEnum):
    RUNNING = 0
    LEAVING = 1  # a rank was asked to stop, and has ended so that the job can be resumed; the others do the same
    FAILED = 2  # a rank has failed; the others have a moment to notice
    ASKED = 3
    KILLED = 4
    GIVEN_UP = 5


@dataclass
class Supervisor:
    """Supervises an attempt on this node until its end."""

    _processes: Sequence[RankProcess]
    _events: Events
    _options: Options
    _say: Callable[[str], object]
    _attempt: int  # number of the attempt
    _on_failure: Callable[[str], None]
    _on_preemption: Callable[[], None]
    signal: int | None = None  # the signal that ended the attempt
    interrupted: bool = False  # the launcher received a signal, perhaps after a failure
    preempted: bool = False  # all of its signals asked for a resumable end
    asked_at: float | None = None  # when the ranks were asked to stop, in seconds since the epoch
    _stage: _Stage = _Stage.RUNNING
    _deadline: float | None = None
    _spared_children: bool = False
    _named_late_ranks: bool = False

    def run(self) -> None:
        """Return when no rank is running, and no process that a rank started is left in its process group."""
        while self._running() and self._stage < _Stage.GIVEN_UP:
            self._wait(self._name_late_ranks())
            self._look_at_ended()
        # Ranks that ended may have left children, such as readers of data.
        families = [process for process in self._processes if process.exit and process.reap()]
        spares_children = self._spared_children and self._stage is _Stage.ASKED
        if families and (self._stage < _Stage.ASKED or spares_children):
            self._spared_children = False
            self._ask(signal.SIGTERM, families, self._options.grace)
        while families and self._stage < _Stage.GIVEN_UP:
            self._wait(SWEEP_SECONDS)
            families = [process for process in families if process.reap()]

    def _look_at_ended(self) -> None:
        exits = []
        for process in self._processes:
            if process.exit:
                exits.append((process.exit.time, process.rank, process.exit))
        failures = [failure for failure in exits if failure[2].status not in (0, RESUMABLE)]
        if failures and self._stage < _Stage.FAILED:
            self._enter(_Stage.FAILED, RANKS_NOTICE_SECONDS)
            # The earliest failure counts, so that the rank is named that failed first.
            _, rank, end = min(failures)
            self._on_failure(f"rank {rank} failed ({end})")
            if self._running():
                self._say(f"rank {rank} failed ({end}); stopping the others")
        elif self._stage is _Stage.RUNNING and any(end.status == RESUMABLE for _, _, end in exits):
            self._enter(_Stage.LEAVING, self._options.preempt_timeout)

    def _name_late_ranks(self) -> float | None:
        """Say once which ranks run long after the others have ended; return the seconds until then."""
        ends = [process.exit.time for process in self._processes if process.exit]
        if not ends or self._named_late_ranks or self._stage is not _Stage.RUNNING:
            return None
        seconds_left = max(ends) + LATE_RANK_SECONDS - time.time()
        if seconds_left > 0:
            return seconds_left
        self._named_late_ranks = True
        for process in self._running():
            self._say(
                f"rank {process.rank} (process {process.pid}) still runs, {LATE_RANK_SECONDS:g} s after another rank "
                "ended. If its script is over, an iterator over Python code that it left may keep Python from ending: "
                "delete the iterator at the end of the script"
            )
        return None

    def _running(self) -> list[RankProcess]:
        return [process for process in self._processes if process.exit is None]

    def _wait(self, seconds: float | None) -> None:
        """Handle the next event, or the deadline."""
        if self._deadline is not None:
            until_deadline = max(0.0, self._deadline - time.monotonic())
            seconds = min(until_deadline, seconds or until_deadline)
        # The end of a rank needs no handler: which ranks have ended is looked up after each event.
        handlers: Handlers = {SignalReceived: self._on_signal, StopOrdered: self._on_stop}
        has_event = self._events.handle_next(seconds, handlers)
        if not has_event and self._deadline is not None and time.monotonic() >= self._deadline:
            self._escalate()

    def _on_stop(self, stop: StopOrdered) -> None:
        # A stop that comes late, or belongs to another attempt, is dropped.
        if self._stage < _Stage.FAILED and stop.attempt == self._attempt:
            self._enter(_Stage.FAILED, RANKS_NOTICE_SECONDS)
            self._say(f"{stop.why}; stopping the ranks of this node")

    def _on_signal(self, received: SignalReceived) -> None:
        number = received.number
        name = signal.Signals(number).name
        is_request = number == self._options.preempt_signal
        self.preempted = is_request and (self.preempted or not self.interrupted)
        self.interrupted = True
        if is_request:
            # Told before any rank ends because of the signal.
            self._on_preemption()
        if self._stage < _Stage.FAILED:
            self.signal = number
        if self._stage < _Stage.ASKED:
            seconds = self._options.grace
            if is_request:
                seconds = self._options.preempt_timeout
            ranks = counted(len(self._running()), "rank")
            self._say(
                f"{name}: asking {ranks} to stop within {seconds:g} s; a second signal kills them at once"
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

    def _ask(self, number: int, processes: Sequence[RankProcess], seconds: float) -> None:
        self._enter(_Stage.ASKED, seconds)
        # The first time is kept: what ended before it has ended by itself.
        self.asked_at = self.asked_at or time.time()
        for process in processes:
            process.send(number, self._spared_children)

    def _kill(self) -> None:
        self._enter(_Stage.KILLED, KILL_SECONDS)
        for process in self._processes:
            process.send(signal.SIGKILL)

    def _enter(self, stage: _Stage, seconds: float | None) -> None:
        self._stage = stage
        self._deadline = None
        if seconds is not None:
            self._deadline = time.monotonic() + seconds
