"""Who runs the programs of a channel: whoever needs a result, and a thread that goes on with long ones meanwhile.

Jobs are taken in the order in which they were started, which is the same on all members. Starting never waits for
others. A short job's data is published at once, and the rest is done by the thread that asks for its result. A long
one is handed to a background thread, so that it proceeds while TensorFlow computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Callable

from npu_device.collectives.shared_memory.channel import Channel, Waiting
from npu_device.collectives.shared_memory.programs import Mismatch


class Job:
    """One operation under way.

    Args:
        make: makes the program once the channel is there.
        results: what to hand out when it has ended.
        refuse: makes the error for members whose heads differ.
    """

    def __init__(self, make: Callable[[Channel], Waiting], results: Any, refuse: Callable[[], Exception]) -> None:
        self.make = make
        self.results = results
        self.refuse = refuse
        self.program: Waiting | None = None
        self.error: BaseException | None = None
        self.ended_at = 0.0  # seconds since the epoch
        self.ended = threading.Event()


class Engine:
    """The jobs of one group on this rank.

    Args:
        connect: makes the channel, when the first job is started.
    """

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self._connect = connect
        self._channel: Channel | None = None
        self._queue: deque[Job] = deque()
        self._arrivals = 0
        self._driving = threading.Lock()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None

    def start(self, job: Job, in_background: bool) -> None:
        """Begin a job, without waiting for others."""
        self._queue.append(job)
        self._arrivals += 1
        self._publish()
        if in_background and not job.ended.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="npu_device-shared", daemon=True)
                self._thread.start()
            self._work.set()

    def finish(self, job: Job) -> Any:
        """Wait for a job, and get its results.

        Raises:
            Exception: what ended it, on every member alike.
        """
        while not job.ended.is_set():
            if self._work.is_set():  # the background thread is at it
                job.ended.wait()
                break
            with self._driving:
                while not job.ended.is_set():
                    self._drive_first(block=True)
        self._publish()
        if job.error is not None:
            raise job.error
        return job.results

    def _publish(self) -> None:
        """Go as far as possible without waiting. Whoever drives at the moment does it for us when it is finished."""
        seen = -1
        while seen != self._arrivals and self._queue and self._driving.acquire(blocking=False):
            try:
                seen = self._arrivals
                while self._queue and self._drive_first(block=False):
                    pass
            finally:
                self._driving.release()

    def _run(self) -> None:
        while True:
            self._work.wait()
            while self._queue:
                with self._driving:
                    if self._queue:
                        self._drive_first(block=True)
            self._work.clear()
            if self._queue:
                self._work.set()

    def _drive_first(self, block: bool) -> bool:
        """Run the first job, to its end or as far as it goes; whether it has ended. The caller holds the lock."""
        job = self._queue[0]
        try:
            if self._broken is not None:
                raise self._broken
            if self._channel is None:
                self._channel = self._connect()
            if job.program is None:
                job.program = job.make(self._channel)
            if not self._channel.advance(job.program, block):
                return False
        except Mismatch:
            job.error = job.refuse()
        except BaseException as error:
            # The members don't stand at the same step any more.
            job.error = self._broken = error
        self._queue.popleft()
        job.program = None
        job.ended_at = time.time()
        job.ended.set()
        return True
