"""Run the programs of a channel: in the thread that needs a result, and in a background thread for long ones.

Operations run in the order in which they were started, which is the same on all members. Starting never waits for
others. A short operation's data is published at once, and the thread that asks for its result does the rest. A long
one goes to a background thread, so that it proceeds while TensorFlow computes.

With an operation's first data the members send its head, so that they compare their calls before they read each other's
data.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable, Protocol

from npu_device._src.cluster.errors import PeerError
from npu_device._src.collectives.call import Terms

if TYPE_CHECKING:
    from npu_device._src.collectives.engines.host.programs import Round
    from npu_device._src.collectives.engines.host.stream import BufferPool

Program = Iterator[Any]
"""One operation, which pauses where it would have to wait, and yields what its channel has to wait for."""

Head = Sequence[int]
"""A member's description of a call, in 32-bit words. It must be the same on all members."""

HEAD_WORDS = 4
"""Number of words of a head."""

_AGREED, _COMPARES, _OVERLAPS = range(3)  # the last word


class Mismatch(Exception):
    """The members' heads of a call differ. All members detect it in the same step, before any data is read."""


def head_of(terms: Terms | None, shapes: int) -> Head:
    """Return the head of a call; without terms, the ranks have agreed on it before."""
    if terms is None:
        return (_AGREED,) * HEAD_WORDS
    return (*terms.head, shapes, _OVERLAPS if terms.overlaps else _COMPARES)


def compares(head: Head) -> bool:
    """Return whether the members have not agreed on the call before."""
    return head[-1] != _AGREED


def require_same(heads: list[Head]) -> None:
    """Compare all members' heads.

    Raises:
        Mismatch: they differ, or a member is in two calls at once, which all members refuse.
    """
    if heads.count(heads[0]) < len(heads) or heads[0][-1] == _OVERLAPS:
        raise Mismatch


class Channel(Protocol):
    """The connection that carries the members' data. Its contract: a member publishes, and others read a view of that.

    Attributes:
        size: number of members.
        rank: this member's number.
        counts: for each member, the number of ranks whose sum it contributes.
        reaches_all: what a member publishes reaches all at the cost of one copy; else each reader is sent its part.
        ahead: how many rounds a member publishes before it has to read.
        buffers: memory for what is neither the script's nor a result.
    """

    size: int
    rank: int
    counts: tuple[int, ...]
    reaches_all: bool
    ahead: int
    buffers: BufferPool

    @property
    def slot_bytes(self) -> int:
        """Return how much a member publishes in one round at most."""

    def run(self, rounds: Iterator[Round], head: Head | None) -> Program:
        """Return the program that runs rounds, which pauses where it would have to wait.

        Args:
            rounds: alike on all members; one is asked for when it can be published.
            head: what the members compare before anybody reads; None if they don't.
        """

    def advance(self, program: Any, block: bool, hurry: bool = False) -> bool:
        """Run a program to its end, or as far as it goes without blocking; return whether it has ended.

        Args:
            program: it is resumed where the previous call has left it.
            block: wait for the others.
            hurry: the calling thread needs the result, and may use its core while it waits.
        """

    def settle(self) -> None:
        """Note that the first operation has ended, and so all members have come; or that the group is destroyed."""

    def close(self) -> None:
        """Give up the channel."""


class PendingOperation:
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
        self.ended_at = 0  # ns since the epoch
        self.ended = False


class HostQueue:
    """The pending operations of one group on this rank.

    Args:
        connect: makes the channel when the first operation is started.
    """

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self._connect = connect
        self._channel: Channel | None = None
        self._queue: deque[PendingOperation] = deque()
        self._arrivals = 0
        self._driving = threading.Lock()
        self._work = threading.Event()
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._settled = False
        self._closed = False

    def start(self, pending: PendingOperation, in_background: bool) -> None:
        """Start an operation, without waiting for others."""
        self._queue.append(pending)
        self._arrivals += 1
        self._publish()
        if in_background and not pending.ended:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="npu_device-shared", daemon=True)
                self._thread.start()
            self._work.set()

    def finish(self, pending: PendingOperation) -> Any:
        """Wait for an operation, and return its results.

        Raises:
            Exception: the error that ended it, the same on every member.
        """
        while not pending.ended:
            if self._work.is_set():  # the background thread is running it
                with self._ended:
                    self._ended.wait_for(lambda: pending.ended)
                break
            with self._driving:
                while not pending.ended:
                    self._drive_first(block=True, hurry=True)
        self._publish()
        if pending.error is not None:
            raise pending.error
        return pending.results

    def close(self) -> None:
        """Give up the channel and its memory; operations in progress and later ones fail."""
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
        """Run the first operation, to its end or as far as it goes; return whether it has ended. Needs the lock."""
        pending = self._queue[0]
        try:
            if self._broken is not None:
                raise _broken_by(self._broken)
            channel = self._channel = self._channel or self._connect()
            if pending.program is None:
                pending.program = pending.make(channel)
            try:
                if not channel.advance(pending.program, block, hurry):
                    return False
            except Mismatch:
                pending.error = pending.refuse()
            if not self._settled:
                self._settled = True
                channel.settle()
        except BaseException as error:
            pending.error = error
            # The members are no longer at the same step.
            self._broken = self._broken or error
        self._queue.popleft()
        pending.program = None
        pending.ended_at = time.time_ns()
        with self._ended:
            pending.ended = True
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
