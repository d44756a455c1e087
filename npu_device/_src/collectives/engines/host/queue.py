"""Run the transfers of a group, one after the other: in the thread that needs a result, and in a background thread for
long ones.

Transfers run in the order in which they were started, which is the same on all members. Starting never waits for
others. Where TensorFlow computes between start and finish, a short transfer publishes its data at once, and the thread
that asks for its result does the rest; a long one goes to a background thread. In eager mode the finish follows at
once, and the thread of the script does all of it.

How a call becomes data, from outside to inside: an engine makes an ``ArrayTransfer``; its ``prepare(arrays, buffers)``
gives the results' memory and ``make_rounds``; ``make_rounds(channel)`` gives the ``Rounds`` (``transfer_rounds``);
``channel.run(rounds, head)`` makes a ``Program`` of them, which ``channel.advance`` runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import tensorflow as tf

from npu_device._src.cluster.rank_errors import PeerError
from npu_device._src.collectives.call import Terms
from npu_device._src.collectives.call_count import HostTransferCount
from npu_device._src.collectives.dtypes import ArrayList
from npu_device._src.collectives.engines.host.buffers import BufferPool
from npu_device._src.collectives.engines.host.channel import (
    Channel,
    Mismatch,
    Program,
    Rounds,
    Wait,
    head_of,
)
from npu_device._src.threads import start_thread

Prepared = tuple[Callable, ArrayList]
"""What makes the rounds of a transfer, ``make_rounds(channel)``, and the arrays that the rounds fill. Between two
ranks, the first is what makes their ``PairTransfer``.
"""

Finished = tuple[int, ArrayList]
"""When a transfer ended, in ns since the epoch, and its results."""


class ArrayTransfer(NamedTuple):
    """One transfer of a call: what it returns, and how it is made of arrays. It references no part of the graph in
    which it was made: what a graph calls lives as long as the graph.
    """

    outputs: Sequence[tf.TensorSpec]
    prepare: Callable[[ArrayList, BufferPool], Prepared]


@dataclass(eq=False)
class StartedTransfer:
    """One transfer in progress. Its program is made when the transfers before it have ended."""

    make_rounds: Callable[[Channel], Rounds]
    results: ArrayList
    terms: Terms
    position: int  # position of the transfer in the group
    program: Optional[Program] = None
    error: Optional[BaseException] = None
    ended_at: int = 0  # nanoseconds since the epoch; 0 until then


class HostQueue:
    """The transfers of one group on this rank; each begins when the one before it has ended (``in_order``). Those of
    more than ``background_from`` bytes go to the background thread if TensorFlow computes before their finish.

    A transfer is started, advanced as the first of the queue, and finished: the methods stand in this order.
    """

    in_order = True

    def __init__(
        self,
        connect: Callable[[], Channel],
        count: HostTransferCount,
        buffers: BufferPool,
        background_from: int,
    ) -> None:
        self._connect = connect
        self._count = count
        self._buffers = buffers
        self._background_from = background_from
        # The channel is made at the first transfer, since members may never use a group that they made.
        self.channel: Channel | None = None
        self._queue = deque[StartedTransfer]()
        # Counts all transfers, so that the thread that advances them notices new ones.
        self._arrivals = 0
        # Held by the only thread that advances the channel at this moment.
        self._advancing = threading.Lock()
        # Set while the background thread has something to run.
        self._work = threading.Event()
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None
        # The first error that isn't a mismatch: all later transfers fail with it.
        self._broken: BaseException | None = None
        self._is_closed = False

    def start(
        self, transfer: ArrayTransfer, terms: Terms, arrays: ArrayList, *, computes_meanwhile: bool
    ) -> StartedTransfer:
        """Start a transfer without waiting for others; ``finish`` has to follow.

        ``computes_meanwhile``: TensorFlow computes before it finishes the transfer.
        """
        make_rounds, results = transfer.prepare(arrays, self._buffers)
        started = StartedTransfer(make_rounds, results, terms, self._count.begin(terms))
        self._queue.append(started)
        # Counted after the append, so that a thread which publishes at this moment looks again.
        self._arrivals += 1
        # Where nothing is computed meanwhile, the finish follows at once, and publishes.
        if computes_meanwhile:
            self._publish()
            size = sum(array.nbytes for array in arrays or results)
            if size > self._background_from and not started.ended_at:
                self._run_in_background()
        return started

    def _publish(self) -> None:
        """Advance as far as possible without waiting. If another thread is advancing, that one does it afterwards."""
        arrivals = -1
        while (
            arrivals != self._arrivals and self._queue and self._advancing.acquire(blocking=False)
        ):
            try:
                arrivals = self._arrivals
                while self._queue and self._advance_first(Wait.NOT):
                    pass
            finally:
                self._advancing.release()

    def _run_in_background(self) -> None:
        if self._thread is None:
            self._thread = start_thread("npu_device-transfers", self._run_queue)
        self._work.set()

    def _run_queue(self) -> None:
        while not self._is_closed:
            self._work.wait()
            while self._queue:
                with self._advancing:
                    if self._queue:
                        self._advance_first(Wait.SLEEPING)
            # The event is cleared before the last look: a transfer that is started after it sets it again.
            self._work.clear()
            # A transfer was started since the event was cleared.
            if self._queue:
                self._work.set()

    def _advance_first(self, wait: Wait) -> bool:
        """Run the first transfer, to its end or as far as it goes; return whether it has ended. Needs the lock."""
        started = self._queue[0]
        try:
            if self._broken is not None:
                raise _broken_by(self._broken)
            channel = self.channel or self._connect()
            self.channel = channel
            if started.program is None:
                started.program = channel.run(started.make_rounds(channel), head_of(started.terms))
            if not channel.advance(started.program, wait):
                return False
        except Mismatch:
            # All members see the mismatch in the same step, so the channel stays usable.
            started.error = self._mismatch(started)
        except BaseException as error:
            started.error = error
            # The members are no longer at the same step, so that the channel is useless.
            self._broken = self._broken or error
        self._queue.popleft()
        # The program holds views of the results; without it they are free as soon as the caller drops them.
        started.program = None
        with self._ended:
            started.ended_at = time.time_ns()
            self._ended.notify_all()
        return True

    def _mismatch(self, started: StartedTransfer) -> BaseException:
        """Return the error for calls that differ. In a graph it stops the rank, before the next segment is started."""
        try:
            return started.terms.error_for_mismatch(started.position)
        except BaseException as error:
            self._broken = error
            return error

    def finish(self, started: StartedTransfer) -> Finished:
        """Wait for a transfer, and return its results; to be called once."""
        try:
            # The lock is held while advancing, so a transfer of another thread can end in between.
            while not started.ended_at:
                # The background thread runs the transfer, or one before it. It has ended if the group was destroyed.
                if self._work.is_set() and not self._is_closed:
                    with self._ended:
                        self._ended.wait_for(lambda: started.ended_at > 0)
                    break
                with self._advancing:
                    while not started.ended_at:
                        self._advance_first(Wait.SPINNING)
            # Transfers that were started meanwhile could not publish while this thread had the lock.
            self._publish()
            if started.error is not None:
                raise started.error
            return started.ended_at, started.results
        finally:
            self._count.end()

    def close(self) -> None:
        """Give up the channel and its memory; transfers in progress and later ones fail."""
        self._is_closed = True
        # The background thread wakes up, and ends.
        self._work.set()
        with self._advancing:
            if self.channel is not None:
                self.channel.close()
            self.channel = None
            self._broken = RuntimeError("its group was destroyed on this rank")
            # With ``_broken`` set, each one fails at once, and its waiting thread gets the error.
            while self._queue:
                self._advance_first(Wait.NOT)


def _broken_by(error: BaseException) -> Exception:
    if isinstance(error, PeerError):
        return PeerError(str(error))
    return RuntimeError(
        f"the connection of this group can't be used any more, since a collective operation has ended in "
        f"{type(error).__name__}: {error}\n"
        "What to do: start the job again; if the group was destroyed, make it again and retrace its functions."
    )
