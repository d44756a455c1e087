"""Run the programs of a channel: in the thread that needs a result, and in a background thread for long ones.

Jobs run in the order in which they were started, which is the same on all members. Starting never waits for
others. A short job's data is published at once, and the thread that asks for its result does the rest. A long
one goes to a background thread, so that it proceeds while TensorFlow computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable, Protocol

from npu_device._src.cluster.errors import PeerError
from npu_device._src.collectives.backends.arrays.heads import Mismatch

Program = Iterator[Any]
"""One operation, which pauses where it would have to wait."""


class Channel(Protocol):
    """What carries the members' data."""

    def advance(self, program: Any, block: bool, hurry: bool = False) -> bool:
        """Run a program to its end, or as far as it goes without blocking; return whether it has ended.

        Args:
            program: it is resumed where the previous call has left it.
            block: wait for the others.
            hurry: the calling thread needs the result, and may use its core while it waits.
        """

    def settle(self) -> None:
        """Note that a job has ended, and so all members have come; or that the group is destroyed."""

    def close(self) -> None:
        """Give up the channel."""


class Job:
    """One operation in progress.

    Args:
        make: makes the program once the channel exists.
        results: what to return when it has ended.
        refuse: makes the error for members whose heads differ.
    """

    def __init__(self, make: Callable[[Any], Program], results: Any, refuse: Callable[[], Exception]) -> None:
        self.make = make
        self.results = results
        self.refuse = refuse
        self.program: Program | None = None
        self.error: BaseException | None = None
        self.ended_at = 0.0  # seconds since the epoch
        self.ended = False


class Engine:
    """The jobs of one group on this rank.

    Args:
        connect: makes the channel when the first job is started.
    """

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self._connect = connect
        self._channel: Channel | None = None
        self._queue: deque[Job] = deque()
        self._arrivals = 0
        self._driving = threading.Lock()
        self._work = threading.Event()
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._closed = False

    def start(self, job: Job, in_background: bool) -> None:
        """Start a job, without waiting for others."""
        self._queue.append(job)
        self._arrivals += 1
        self._publish()
        if in_background and not job.ended:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="npu_device-shared", daemon=True)
                self._thread.start()
            self._work.set()

    def finish(self, job: Job) -> Any:
        """Wait for a job, and return its results.

        Raises:
            Exception: the error that ended it, the same on every member.
        """
        while not job.ended:
            if self._work.is_set():  # the background thread is running it
                with self._ended:
                    self._ended.wait_for(lambda: job.ended)
                break
            with self._driving:
                while not job.ended:
                    self._drive_first(block=True, hurry=True)
        self._publish()
        if job.error is not None:
            raise job.error
        return job.results

    def close(self) -> None:
        """Give up the channel and its memory; jobs in progress and later ones fail."""
        self._closed = True
        self._work.set()  # the background thread ends, too
        with self._driving:
            if self._channel is not None:
                self._channel.close()
            self._channel = None
            self._broken = RuntimeError("its group was destroyed on this rank")
            while self._queue:
                self._drive_first(block=False)

    def _publish(self) -> None:
        """Advance as far as possible without waiting. If another thread is driving, it does so when it has finished."""
        seen = -1
        while seen != self._arrivals and self._queue and self._driving.acquire(blocking=False):
            try:
                seen = self._arrivals
                while self._queue and self._drive_first(block=False):
                    pass
            finally:
                self._driving.release()

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            while self._queue:
                with self._driving:
                    if self._queue:
                        self._drive_first(block=True)
            self._work.clear()
            if self._queue:
                self._work.set()

    def _drive_first(self, block: bool, hurry: bool = False) -> bool:
        """Run the first job, to its end or as far as it goes; return whether it has ended. Call with the lock held."""
        job = self._queue[0]
        try:
            if self._broken is not None:
                raise _broken_by(self._broken)
            channel = self._channel = self._channel or self._connect()
            if job.program is None:
                job.program = job.make(channel)
            try:
                if not channel.advance(job.program, block, hurry):
                    return False
            except Mismatch:
                job.error = job.refuse()
            channel.settle()
        except BaseException as error:
            job.error = error
            # The members are no longer at the same step.
            self._broken = self._broken or error
        self._queue.popleft()
        job.program = None
        job.ended_at = time.time()
        with self._ended:
            job.ended = True
            self._ended.notify_all()
        return True


def _broken_by(error: BaseException) -> Exception:
    if isinstance(error, PeerError):
        return PeerError(str(error))
    return RuntimeError(
        f"the connection of this group can't be used any more, since a collective operation has ended in "
        f"{type(error).__name__}: {error}\n"
        "What to do: start the job again; if the group was destroyed, make it again and retrace its functions."
    )
