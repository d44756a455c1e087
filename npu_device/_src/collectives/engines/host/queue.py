"""Run the programs of a channel: in the thread that needs a result, and in a background thread for long ones.

Operations run in the order in which they were started, which is the same on all members. Starting never waits for
others. A short operation's data is published at once, and the thread that asks for its result does the rest. A long
one goes to a background thread, so that it proceeds while TensorFlow computes.

The members send the head of an operation with its first data, so that they compare their calls before they read each
other's data.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol

import numpy as np

from npu_device._src.cluster.errors import PeerError

if TYPE_CHECKING:
    from npu_device._src.collectives.call import Terms
    from npu_device._src.collectives.engines.host.host_engine import OnArrays
    from npu_device._src.collectives.engines.host.programs import Round

Program = Iterator[Any]
"""One operation, which pauses where it would have to wait, and yields what its channel has to wait for."""

Head = Sequence[int]
"""A member's description of a call, in 32-bit words. It must be the same on all members."""

HEAD_WORDS = 4
_AGREED, _COMPARES, _OVERLAPS = range(3)  # its last word


class Mismatch(Exception):
    """The members' heads of a call differ. All members detect it in the same step, before any data is read."""


def head_of(terms: Terms | None) -> Head:
    """Return the head of a call; without terms, the ranks have agreed on it before."""
    if terms is None:
        return (_AGREED,) * HEAD_WORDS
    return (*terms.head, int(terms.shapes), _OVERLAPS if terms.overlaps else _COMPARES)


def compares(head: Head) -> bool:
    """Return whether the members have not agreed on the call before."""
    return head[-1] != _AGREED


def require_same(heads: list[Head]) -> None:
    """Raise Mismatch if the members' heads differ, or a member is in two calls at once, which all members refuse."""
    if heads.count(heads[0]) < len(heads) or heads[0][-1] == _OVERLAPS:
        raise Mismatch


# Memory. Fresh pages cost more than the reduction that writes to them: a buffer is lent by a lease, to which all arrays
# in it refer, and is used again when the lease goes. TensorFlow takes a result without a copy, and holds a reference to
# the array as long as the tensor lives.

ALIGNMENT = 64  # bytes; TensorFlow copies arrays that aren't aligned to this
_IDLE_ROUNDS = 64
_POOLED_FROM_BYTES = 32 << 10  # smaller buffers come from the allocator's own free lists, which are as fast


class _Buffer:
    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.empty(size + ALIGNMENT, np.uint8)
        address = self._memory.__array_interface__["data"][0]
        aligned = address + -address % ALIGNMENT
        self.interface = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (aligned, False)}


class _Lease:
    """What an array in a buffer, and all views of it, keep alive."""

    def __init__(self, buffer: _Buffer, returned: deque[_Buffer]) -> None:
        self.__array_interface__ = buffer.interface
        self._buffer, self._returned = buffer, returned

    def __del__(self) -> None:
        # In whichever thread drops the last tensor, also amid ``take``: no lock, and nothing that waits.
        self._returned.append(self._buffer)


class BufferPool:
    """Buffers of one rank. A size that wasn't requested during the last 64 requests is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)  # by size
        self._returned: deque[_Buffer] = deque()
        self._last_used: dict[int, int] = {}
        self._round = 0

    def take(self, size: int) -> np.ndarray:
        """Return aligned memory: uint8, shape [size]. It is free again when the last array based on it is gone."""
        if size < _POOLED_FROM_BYTES:
            memory = np.empty(size + ALIGNMENT, np.uint8)
            start = -memory.__array_interface__["data"][0] % ALIGNMENT
            return memory[start : start + size]
        with self._lock:
            self._round += 1
            self._last_used[size] = self._round
            while self._returned:
                buffer = self._returned.popleft()
                if buffer.size in self._last_used:
                    self._free[buffer.size].append(buffer)
            if self._free[size]:
                buffer = self._free[size].pop()
            else:
                self._forget_idle()
                buffer = _Buffer(size)
        return np.asarray(_Lease(buffer, self._returned))

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return aligned memory as an array."""
        return self.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def _forget_idle(self) -> None:
        for size in [size for size, used in self._last_used.items() if self._round - used > _IDLE_ROUNDS]:
            del self._last_used[size]
            self._free.pop(size, None)


class Wait(enum.Enum):
    """How a thread that advances a program waits for other members."""

    NOT = enum.auto()
    SLEEPING = enum.auto()
    SPINNING = enum.auto()  # for a while before it sleeps, as it needs the result


class Channel(Protocol):
    """The connection that carries the members' data. Its contract: a member publishes, others read a view of that."""

    size: int
    rank: int
    counts: tuple[int, ...]  # for each member, the number of ranks whose sum it contributes
    reaches_all: bool  # what a member publishes reaches all at the cost of one copy; else each reader is sent its part
    ahead: int  # how many rounds a member publishes before it has to read
    buffers: BufferPool  # memory for what is neither the script's nor a result
    slot_bytes: int  # the most that a member publishes in one round

    def run(self, rounds: Iterator[Round], head: Head | None) -> Program:
        """Return the program that runs rounds, alike on all members, and pauses where it would have to wait. A head is
        compared before anybody reads.
        """

    def advance(self, program: Any, wait: Wait) -> bool:
        """Run a program to its end, or as far as it goes without blocking; return whether it has ended. The next call
        resumes it.
        """

    def settle(self) -> None:
        """Note that the first operation has ended, and so all members have come; or that the group is destroyed."""

    def close(self) -> None: ...


Finish = Callable[[], tuple[int, list[np.ndarray]]]
"""Waits for an operation; returns when it ended, in ns since the epoch, and its results. To be called once."""


class CallCount:
    """How many collectives of a group this rank has begun and ended, for the stall watch."""

    def __init__(self) -> None:
        self.begun = self._ended = 0
        self._row: Callable[[], dict[str, Any] | None] = lambda: None

    def begin(self, terms: Terms | None) -> int:
        """Note a collective, without terms as part of the last call; return its position in the group."""
        self.begun += 1
        self._row = terms.row if terms is not None else self._row
        return self.begun - 1

    def end(self) -> None:
        self._ended += 1

    def position(self) -> dict[str, Any]:
        return {"begun": self.begun, "waiting": self.begun > self._ended, "call": self._row()}


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
        self, connect: Callable[[], Channel], count: CallCount, buffers: BufferPool, background_from: int
    ) -> None:
        self._connect, self._count, self._buffers = connect, count, buffers
        self._background_from = background_from
        self._channel: Channel | None = None
        self._queue: deque[PendingOperation] = deque()
        self._arrivals = 0
        self._driving = threading.Lock()
        self._work = threading.Event()
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._settled = self._closed = False

    def start(self, operation: OnArrays, terms: Terms | None, arrays: list[np.ndarray], overlaps: bool) -> Finish:
        """Start an operation without waiting for others, and return the function that finishes it; ``overlaps``:
        TensorFlow computes meanwhile.
        """
        act, results = operation.prepare(arrays, self._buffers)
        refuse = partial(refusal, terms, self._count.begin(terms))
        pending = PendingOperation(partial(act, head=head_of(terms)), results, refuse)
        self._queue.append(pending)
        self._arrivals += 1
        self._publish()
        if overlaps and not pending.ended and sum(each.nbytes for each in arrays or results) > self._background_from:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="npu_device-shared", daemon=True)
                self._thread.start()
            self._work.set()
        return partial(self._finish, pending)

    def _finish(self, pending: PendingOperation) -> tuple[int, list[np.ndarray]]:
        try:
            while not pending.ended:
                if self._work.is_set():  # the background thread is running it
                    with self._ended:
                        self._ended.wait_for(lambda: pending.ended)
                    break
                with self._driving:
                    while not pending.ended:
                        self._drive_first(Wait.SPINNING)
            self._publish()
            if pending.error is not None:
                raise pending.error
            return pending.ended_at, pending.results
        finally:
            self._count.end()

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
                self._drive_first(Wait.NOT)

    def _publish(self) -> None:
        """Advance as far as possible without waiting. If another thread is driving, it does so when it has finished."""
        seen = -1
        while seen != self._arrivals and self._queue and self._driving.acquire(blocking=False):
            try:
                seen = self._arrivals
                while self._queue and self._drive_first(Wait.NOT):
                    pass
            finally:
                self._driving.release()

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            while self._queue:
                with self._driving:
                    if self._queue:
                        self._drive_first(Wait.SLEEPING)
            self._work.clear()
            if self._queue:  # started in between
                self._work.set()

    def _drive_first(self, wait: Wait) -> bool:
        """Run the first operation, to its end or as far as it goes; return whether it has ended. Needs the lock."""
        pending = self._queue[0]
        try:
            if self._broken is not None:
                raise _broken_by(self._broken)
            channel = self._channel = self._channel or self._connect()
            if pending.program is None:
                pending.program = pending.make(channel)
            try:
                if not channel.advance(pending.program, wait):
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
