"""Start the ranks. Stop them, with their children, if one fails or the launcher is told to stop: ask, wait, kill."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Callable

from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import (
    KILL_SECONDS,
    LATE_RANK_SECONDS,
    RANKS_NOTICE_SECONDS,
    SAME_SIGNAL_SECONDS,
    SWEEP_SECONDS,
)
from npu_device._src.environment import NPU_DEVICE_ERROR_FILE, opened_mark
from npu_device._src.threads import start_thread
from npu_device._src.wording import counted
from npu_device.launch.events import Exit, handle_next
from npu_device.launch.node_protocol import NodePreempted, RankFailed, StopOrder
from npu_device.launch.output import Console, Pump
from npu_device.launch.preparation import Launch
from npu_device.launch.reports import PREEMPTED


class RankProcess:
    """The process of a rank.

    The ended process stays a zombie until ``reap``: its number, which is also its group's, can't be reused
    while signals may still be sent to it.
    """

    def __init__(
        self, launch: Launch, rank: int, environment: Mapping[str, str], log_file: str | None
    ) -> None:
        self.rank = rank
        self.exit: Exit | None = None
        # Its children have not got the signal that asks it to stop, or there was none yet.
        self.has_spared_children = True
        self._is_gone = False
        self._launch = launch
        self._opened_mark = opened_mark(environment[NPU_DEVICE_ERROR_FILE.name])
        self._log: BinaryIO | None = None
        console: Console | None = launch.console
        if log_file is not None:
            self._log = open(log_file, "wb", buffering=0)  # noqa: SIM115
            if not launch.options.tee:
                console = None
        self._popen = subprocess.Popen(
            launch.options.command,
            env=environment,
            # One terminal can't serve several readers.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C of the terminal goes to the launcher alone, which passes it on once.
            start_new_session=True,
        )
        self.pid = self._popen.pid
        # The guard learns of each process at once, since the launcher may be killed between two ranks.
        launch.guard.tell(self.pid)
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self._stdout = Pump(self._popen.stdout, console, 1, rank, self._log)
        self._stderr = Pump(self._popen.stderr, console, 2, rank, self._log)
        self._watcher = start_thread("npurun-rank", self._watch)

    def send(self, signum: int, spares_children: bool = False) -> None:
        """Send a signal to the process group: to all, or with ``spares_children`` to the training process alone, if
        that is known.
        """
        # Another process may have the number by now.
        if self._is_gone:
            return
        training_process = self._training_process() if spares_children else None
        self.has_spared_children = training_process is not None
        # A PermissionError tells that the rest of the group runs as another user (sudo in the script).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if training_process is not None:
                os.kill(training_process, signum)
            else:
                os.killpg(self.pid, signum)

    def _training_process(self) -> int | None:
        """Return the number of the process that opened npu_device, or of the rank if it is Python; None for another
        program: a wrapper may not pass signals on.
        """
        with contextlib.suppress(OSError, ValueError):
            pid = int(Path(self._opened_mark).read_text())
            # A container numbers its processes anew, and the number may be another process here.
            if os.getpgid(pid) == self.pid:
                return pid
        with contextlib.suppress(OSError):
            # Asked of the kernel, since env, a shell's exec or a script's first line become Python.
            program = os.path.basename(os.readlink(f"/proc/{self.pid}/exe"))
            if program.startswith("python"):
                return self.pid
        return None

    def reap(self) -> bool:
        """Release the ended process. Return True while children of it are left in its group."""
        # Waited for first, since the watcher looks at the zombie, which ``wait`` below removes.
        self._watcher.join()
        self._popen.wait()
        # Orphans that end stay in the group until their new parent waits for them: the first process of a container,
        # which may be this one.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        # Signal 0 only asks whether the group still has members.
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            self._is_gone = True
        return not self._is_gone

    def finish(self) -> None:
        """Return when all output of the process has arrived."""
        self._stdout.finish()
        self._stderr.finish()
        if self._log is not None:
            self._log.close()
        if self.exit is not None:
            # A negative number: the guard forgets the process group.
            self._launch.guard.tell(-self.pid)

    def last_lines(self) -> list[str]:
        """Return the last lines of its stderr."""
        return [line.decode(errors="replace") for line in self._stderr.tail]

    def _watch(self) -> None:
        # WNOWAIT leaves the zombie, which keeps its number from being used again.
        child = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert child is not None
        status = child.si_status
        if child.si_code != os.CLD_EXITED:
            status = -status
        self.exit = Exit(self.rank, status, time.time())
        self._launch.events.put(self.exit)


def exits(processes: Iterable[RankProcess]) -> list[Exit]:
    """Return the ends of the processes that have ended."""
    return [process.exit for process in processes if process.exit is not None]


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
    _launch: Launch
    _notify: Callable[[Any], object]  # gets messages for node 0
    signal: int | None = None  # the signal that ended the attempt
    is_interrupted: bool = False  # the launcher received a signal, perhaps after a failure
    is_preempted: bool = False  # all of its signals asked for a resumable end
    asked_at: float | None = None  # when the ranks were asked to stop, in seconds since the epoch
    _stage: _Stage = _Stage.RUNNING
    _deadline: float | None = None
    _named_late_ranks: bool = False
    # A console whose reader is stopped must not hold up the supervisor. One thread keeps the order of the messages.
    _speaker: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def run(self) -> None:
        """Return when no rank is running, and no process that a rank started is left in its process group."""
        with self._speaker:
            while self._running() and self._stage < _Stage.GIVEN_UP:
                self._wait(self._name_late_ranks())
                self._check_ended()
            # Ranks that ended may have left children, such as readers of data.
            families = [process for process in self._processes if process.exit and process.reap()]
            unasked = [process for process in families if process.has_spared_children]
            if unasked:
                self._ask(signal.SIGTERM, unasked, self._launch.options.grace)
            while families and self._stage < _Stage.GIVEN_UP:
                self._wait(time.monotonic() + SWEEP_SECONDS)
                families = [process for process in families if process.reap()]

    def _say(self, text: str) -> None:
        self._speaker.submit(self._launch.console.say, text)

    def _check_ended(self) -> None:
        ended = exits(self._processes)
        failures = [failure for failure in ended if failure.status not in (0, RESUMABLE)]
        if failures and self._stage < _Stage.FAILED:
            self._enter(_Stage.FAILED, RANKS_NOTICE_SECONDS)
            # The earliest failure counts, so that the rank is named that failed first.
            failure = min(failures, key=attrgetter("time", "rank"))
            text = f"rank {failure.rank} failed ({failure})"
            self._notify(RankFailed(text))
            if self._running():
                self._say(f"{text}; stopping the others")
        elif self._stage is _Stage.RUNNING and any(end.status == RESUMABLE for end in ended):
            self._enter(_Stage.LEAVING, self._launch.options.preempt_timeout)

    def _name_late_ranks(self) -> float | None:
        """Say once which ranks run long after the others have ended; return the moment of that if it is to come."""
        ends = [end.time for end in exits(self._processes)]
        if not ends or self._named_late_ranks or self._stage is not _Stage.RUNNING:
            return None
        seconds_left = max(ends) + LATE_RANK_SECONDS - time.time()
        if seconds_left > 0:
            return time.monotonic() + seconds_left
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

    def _wait(self, moment: float | None) -> None:
        """Handle the next event, or the deadline; return at a moment at the latest."""
        # The end of a rank needs no handler: which ranks have ended is looked up after each event.
        has_event = handle_next(
            self._launch.events,
            {signal.Signals: self._on_signal, StopOrder: self._on_stop},
            moment,
            self._deadline,
        )
        if not has_event and self._deadline is not None and time.monotonic() >= self._deadline:
            self._escalate()

    def _on_stop(self, stop: StopOrder) -> None:
        # A stop that comes late is dropped.
        if self._stage < _Stage.FAILED:
            self._enter(_Stage.FAILED, RANKS_NOTICE_SECONDS)
            self._say(f"{stop.why}; stopping the ranks of this node")

    def _on_signal(self, signum: int) -> None:
        name = signal.Signals(signum).name
        is_request = signum == self._launch.options.preempt_signal
        self.is_preempted = is_request and (self.is_preempted or not self.is_interrupted)
        self.is_interrupted = True
        if is_request:
            # Told before any rank ends because of the signal.
            self._speaker.submit(self._launch.reporter.tell, PREEMPTED)
            self._notify(NodePreempted())
        if self._stage < _Stage.FAILED:
            self.signal = signum
        if self._stage < _Stage.ASKED:
            seconds = self._launch.options.grace
            if is_request:
                seconds = self._launch.options.preempt_timeout
            ranks = counted(len(self._running()), "rank")
            if not seconds:
                self._say(f"{name}: killing {ranks} at once")
                self._kill()
                return
            self._say(
                f"{name}: asking {ranks} to stop within {seconds:g} s; a second signal kills them at once"
            )
            # A rank that still has to finish its step needs its children, such as readers of data.
            self._ask(signum, self._processes, seconds, spares_children=is_request)
        elif self.asked_at is not None and time.time() - self.asked_at > SAME_SIGNAL_SECONDS:
            self._kill()

    def _escalate(self) -> None:
        if self._stage in (_Stage.LEAVING, _Stage.FAILED):
            self._ask(signal.SIGTERM, self._processes, self._launch.options.grace)
        elif self._stage is _Stage.ASKED:
            self._kill()
        else:
            self._stage = _Stage.GIVEN_UP
            for process in self._running():
                self._say(
                    f"rank {process.rank} (process {process.pid}) can't be killed: it is stuck in the kernel"
                )

    def _ask(
        self,
        signum: int,
        processes: Sequence[RankProcess],
        seconds: float,
        spares_children: bool = False,
    ) -> None:
        self._enter(_Stage.ASKED, seconds)
        # The first time is kept: what ended before it has ended by itself.
        self.asked_at = self.asked_at or time.time()
        for process in processes:
            process.send(signum, spares_children)

    def _kill(self) -> None:
        self._enter(_Stage.KILLED, KILL_SECONDS)
        for process in self._processes:
            process.send(signal.SIGKILL)

    def _enter(self, stage: _Stage, seconds: float) -> None:
        self._stage = stage
        self._deadline = time.monotonic() + seconds
