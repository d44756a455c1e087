"""Run the programs of a channel: in the thread that needs a result, and in a background thread for long ones.

Operations run in the order in which they were started, which is the same on all members. Starting never waits for
others. Where TensorFlow computes between start and finish, a short operation's data is published at once, and the
thread that asks for its result does the rest; a long one goes to a background thread. In eager mode the finish follows
at once, and the thread of the script does all of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.rank_errors import PeerError
from npu_device._src.collectives.call import Terms
from npu_device._src.collectives.call_count import CallCount
from npu_device._src.collectives.engines.host.buffers import BufferPool
from npu_device._src.collectives.engines.host.channel import (
    Channel,
    Mismatch,
    Program,
    Wait,
    head_of,
)

ProgramMaker = tuple[Callable[..., Any], list[np.ndarray]]
"""The action of an operation, and the arrays that it fills: in a group it makes a program, ``act(channel, head=...)``;
between two ranks a transfer.
"""


class OnArrays(NamedTuple):
    """One program, or one transfer, on arrays: what it returns, and how it is made of the inputs. It references no part
    of the graph in which it was made: what a graph calls lives as long as the graph.
    """

    outputs: Sequence[tf.TensorSpec]
    prepare: Callable[[list[np.ndarray], BufferPool], ProgramMaker]


Finish = Callable[[], tuple[int, list[np.ndarray]]]
"""Waits for an operation; returns when it ended, in ns since the epoch, and its results. To be called once."""


@dataclass(eq=False)
class PendingOperation:
    """One operation in progress; ``make`` makes its program once the channel exists."""

    make: Callable[[Any], Program]
    results: list[np.ndarray]
    refuse: Callable[[], Exception]
    program: Optional[Program] = None
    error: Optional[BaseException] = None
    ended_at: int = 0
    ended: bool = False


class HostQueue:
    """The operations of one group on this rank; each begins when the one before it has ended (``in_order``). Those of
    more than ``background_from`` bytes go to the background thread if TensorFlow computes before their finish.
    """

    in_order = True

    def __init__(
        self,
        connect: Callable[[], Channel],
        count: CallCount,
        buffers: BufferPool,
        background_from: int,
    ) -> None:
        self._connect = connect
        self._count = count
        self._buffers = buffers
        self._background_from = background_from
        self.channel: Channel | None = None
        self._queue: deque[PendingOperation] = deque()
        # Counts all operations, so that the thread that drives notices those that came while it looked.
        self._arrivals = 0
        # Held by the only thread that advances the channel at this moment.
        self._driving = threading.Lock()
        # Set while the background thread has something to run.
        self._work = threading.Event()
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None
        # The first error that isn't a mismatch: all later operations fail with it.
        self._broken: BaseException | None = None
        self._all_have_joined = False
        self._closed = False

    def start(
        self,
        operation: OnArrays,
        terms: Terms | None,
        arrays: list[np.ndarray],
        *,
        computes_meanwhile: bool,
    ) -> Finish:
        """Start an operation without waiting for others, and return the function that finishes it.

        ``computes_meanwhile``: TensorFlow computes before it calls that function.
        """
        act, results = operation.prepare(arrays, self._buffers)
        refuse = partial(refusal, terms, self._count.begin(terms))
        pending = PendingOperation(partial(act, head=head_of(terms)), results, refuse)
        self._queue.append(pending)
        # Counted after the append, so that a thread which publishes at this moment looks again.
        self._arrivals += 1
        # Where nothing is computed meanwhile, the finish follows at once, and publishes.
        if computes_meanwhile:
            self._publish()
            size = sum(array.nbytes for array in arrays or results)
            if size > self._background_from and not pending.ended:
                self._run_in_background()
        return partial(self._finish, pending)

    def _run_in_background(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_queue, name="npu_device-shared", daemon=True
            )
            self._thread.start()
        self._work.set()

    def _finish(self, pending: PendingOperation) -> tuple[int, list[np.ndarray]]:
        try:
            # The lock is held while driving, so an operation of another thread can end in between.
            while not pending.ended:
                # The background thread runs the operation, or one before it.
                if self._work.is_set():
                    with self._ended:
                        self._ended.wait_for(lambda: pending.ended)
                    break
                with self._driving:
                    while not pending.ended:
                        self._drive_first(Wait.SPINNING)
            # Operations that were started meanwhile could not publish while this thread had the
            # lock.
            self._publish()
            if pending.error is not None:
                raise pending.error
            return pending.ended_at, pending.results
        finally:
            self._count.end()

    def close(self) -> None:
        """Give up the channel and its memory; operations in progress and later ones fail."""
        self._closed = True
        # The background thread wakes up, and ends.
        self._work.set()
        with self._driving:
            if self.channel is not None:
                self.channel.close()
            self.channel = None
            self._broken = RuntimeError("its group was destroyed on this rank")
            # With ``_broken`` set, each one fails at once, and its waiting thread gets the error.
            while self._queue:
                self._drive_first(Wait.NOT)

    def _publish(self) -> None:
        """Advance as far as possible without waiting. If another thread is driving, it does so when it has finished."""
        arrivals = -1
        while arrivals != self._arrivals and self._queue and self._driving.acquire(blocking=False):
            try:
                arrivals = self._arrivals
                while self._queue and self._drive_first(Wait.NOT):
                    pass
            finally:
                self._driving.release()

    def _run_queue(self) -> None:
        while not self._closed:
            self._work.wait()
            while self._queue:
                with self._driving:
                    if self._queue:
                        self._drive_first(Wait.SLEEPING)
            # The event is cleared before the last look: an operation that is started after it sets it again.
            self._work.clear()
            # An operation was started since the event was cleared.
            if self._queue:
                self._work.set()

    def _drive_first(self, wait: Wait) -> bool:
        """Run the first operation, to its end or as far as it goes; return whether it has ended. Needs the lock."""
        pending = self._queue[0]
        try:
            if self._broken is not None:
                raise _broken_by(self._broken)
            # The channel is made at the first operation, since members may never use a group that they made.
            channel = self.channel or self._connect()
            self.channel = channel
            if pending.program is None:
                pending.program = pending.make(channel)
            try:
                if not channel.advance(pending.program, wait):
                    return False
            # All members see the mismatch in the same step, so the channel stays usable.
            except Mismatch:
                pending.error = pending.refuse()
            if not self._all_have_joined:
                self._all_have_joined = True
                channel.note_joined()
        except BaseException as error:
            pending.error = error
            # After any other error the members are no longer at the same step, so that the channel is useless.
            self._broken = self._broken or error
        self._queue.popleft()
        # The program holds views of the results; without it they are free as soon as the caller
        # drops them.
        pending.program = None
        pending.ended_at = time.time_ns()
        with self._ended:
            pending.ended = True
            self._ended.notify_all()
        return True


def refusal(terms: Terms | None, position: int) -> Exception:
    """Return the error for members whose calls differ."""
    if terms is None:
        return RuntimeError("the ranks of a group called different collectives")
    return terms.refuse(position)


def _broken_by(error: BaseException) -> Exception:
    if isinstance(error, PeerError):
        return PeerError(str(error))
    return RuntimeError(
        f"the connection of this group can't be used any more, since a collective operation has ended in "
        f"{type(error).__name__}: {error}\n"
        "What to do: start the job again; if the group was destroyed, make it again and retrace its functions."
    )
