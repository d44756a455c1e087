"""The memory of the members of a group: for each member a ring of slots that it writes and all read, and two counters.

All work is done in steps, which every member counts the same way. In a step each member may publish one slot, and
then reads what it needs of the others'. A slot is rewritten when all members have read it. The size of the mapping
is fixed: a longer message takes more steps, not more memory.

The counters are numbers that other processes can sleep on: Linux's futex, through the C library. A waiting thread spins
briefly first, since a peer on another core often comes within microseconds, and then sleeps in the kernel, where it
uses no core and wakes within tens of microseconds (measured, docs/notes.md). The sleep is cut into slices, so that the
waiting rank can check the others in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Callable

import numpy as np

from npu_device._src.cluster.time_limits import CHECK_SECONDS
from npu_device._src.collectives.engines.host.buffers import BufferPool
from npu_device._src.collectives.engines.host.channel import (
    HEAD_WORDS,
    Head,
    Program,
    Round,
    Wait,
    require_same,
)

_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_HALF = 1 << 31
_MASK = (1 << 32) - 1

# Only for processors whose stores become visible to other processes in program order: Python has no memory
# barriers. The number is that of the system call.
_SYSTEM_CALLS = {"x86_64": 202}
_slice = (ctypes.c_long * 2)(0, int(CHECK_SECONDS * 1e9))  # a timespec: seconds and nanoseconds
_number = _SYSTEM_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
_system_call = getattr(ctypes.CDLL(None), "syscall", None) if _number else None
if _system_call is not None:
    _system_call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    _system_call.restype = ctypes.c_long
_slice_address = ctypes.addressof(_slice)


def has_counters() -> bool:
    """Return whether this machine has what the counters need: Linux on x86-64."""
    return _system_call is not None


class Counter:
    """A number that increases, written by one process and read by others; it wraps around at 2**32. Its offset in the
    mapping is a multiple of 64.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    def advance_to(self, number: int) -> None:
        self._word.value = number & _MASK
        _system_call(_number, self._address, _WAKE, _ALL, None)  # type: ignore[misc]

    def has_reached(self, number: int) -> bool:
        return (self._word.value - number) & _MASK < _HALF

    def wait_for(self, number: int, looks: int) -> bool:
        """Spin ``looks`` times, then sleep until the counter reaches a number, for at most ``CHECK_SECONDS``. Return
        whether it has reached the number.
        """
        for _ in range(looks):
            if self.has_reached(number):
                return True
        seen = self._word.value
        if (seen - number) & _MASK >= _HALF:
            _system_call(_number, self._address, _WAIT, seen, _slice_address)  # type: ignore[misc]
        return self.has_reached(number)


# The ring

_PAGE = 4096
_COUNTER_BYTES = 64
_SLOT_BYTES = 512 << 10
_BUDGET_BYTES = 32 << 20
_MOST_SLOTS, _FEWEST_SLOTS = 8, 4
_LOOKS, _LOOKS_IN_HURRY = 200, 1000  # some 40 and 200 µs


class Layout:
    """The layout of the mapping for a group of a given size.

    Slots are a compromise between the cost of a step, some microseconds of Python, and that of leaving one core's
    cache (512 KiB), and so many that ranks may run apart for a while, but no more: a ring that is written anew stays in
    the cache (docs/notes.md). All rings together take at most 32 MiB.
    """

    def __init__(self, size: int) -> None:
        share = _BUDGET_BYTES // size
        self.slots = max(_FEWEST_SLOTS, min(_MOST_SLOTS, share // _SLOT_BYTES))
        self.slot_bytes = min(_SLOT_BYTES, share // self.slots // _PAGE * _PAGE) or _PAGE
        self.heads = _round_up(2 * size * _COUNTER_BYTES)
        self.rings = _round_up(self.heads + size * self.slots * HEAD_WORDS * 4)
        self.bytes = self.rings + size * self.slots * self.slot_bytes


class MemoryRing:
    """The end of one member; see ``channel.Channel``. The mapping is zeros from ``first`` on, when the first one comes.

    Args:
        while_waiting: called between two slices of a long wait; raises when waiting is pointless.
        spins: look for a while before sleeping; with more ranks than cores, that takes the core from the awaited ones.
    """

    reaches_all = True
    ahead = 3  # more would leave the core's cache: a member also reads what it has published itself

    def __init__(
        self,
        memory: mmap.mmap,
        size: int,
        rank: int,
        while_waiting: Callable[[], None],
        first: int = 0,
        settle: Callable[[], None] = lambda: None,
        spins: bool = False,
    ) -> None:
        layout = Layout(size)
        self.size, self.rank, self.counts = size, rank, (1,) * size
        self.slots, self.slot_bytes, self._step = layout.slots, layout.slot_bytes, 0
        self.buffers, self.settle = BufferPool(), settle
        self._while_waiting, self._spins = while_waiting, spins
        self._written = [
            Counter(memory, first + 2 * member * _COUNTER_BYTES) for member in range(size)
        ]
        self._read = [
            Counter(memory, first + (2 * member + 1) * _COUNTER_BYTES) for member in range(size)
        ]
        words = np.frombuffer(
            memory, np.int32, size * self.slots * HEAD_WORDS, first + layout.heads
        )
        self._heads = words.reshape(size, self.slots, HEAD_WORDS)
        rings = np.frombuffer(
            memory, np.uint8, size * self.slots * self.slot_bytes, first + layout.rings
        )
        self._rings = rings.reshape(size, self.slots, self.slot_bytes)

    def run(self, rounds: Iterator[Round], head: Head | None) -> Program:
        """Run rounds: in each, members publish a slot, and all read what they need of it. With a head, no member
        publishes a second slot before all heads agree.
        """
        published: deque[Round] = deque()  # and not read yet
        rounds_read = 0
        upcoming = next(rounds, None)
        while upcoming is not None or published:
            # Publish ahead, as far as slots are free and sources are there. At the end there is a round to be read.
            ahead = self.ahead if head is None else 0
            while (
                upcoming is not None and len(published) <= ahead and upcoming.after <= rounds_read
            ):
                step = self._step + len(published)
                late = _late(
                    self._read, step - self.slots + 1
                )  # the members that haven't read what the slot held
                if published and next(late, None) is not None:
                    break
                yield from late
                if upcoming.source is not None:
                    upcoming.fill(self._rings.view(upcoming.dtype)[self.rank, step % self.slots])
                self._publish(step, head)
                published.append(upcoming)
                upcoming = next(rounds, None)
            # Read the oldest. Its slot is given back even if the heads differ.
            exchange = published.popleft()
            publishers = exchange.publishers if head is None else range(self.size)
            yield from _late([self._written[member] for member in publishers], self._step + 1)
            with self._oldest_slot(head) as slot:
                exchange.take(self._rings.view(exchange.dtype)[:, slot], self.rank)
            rounds_read += 1
            head = None

    def _publish(self, step: int, head: Head | None) -> None:
        if head is not None:
            self._heads[self.rank, step % self.slots] = head
        self._written[self.rank].advance_to(step + 1)

    @contextlib.contextmanager
    def _oldest_slot(self, head: Head | None) -> Iterator[int]:
        """Compare the heads, if there is one; yield the position of the slots to be read, and give this one back."""
        self._step += 1
        slot = (self._step - 1) % self.slots
        try:
            if head is not None:
                # A few numbers: faster than with numpy.
                require_same(self._heads[:, slot].tolist())
            yield slot
        finally:
            self._read[self.rank].advance_to(self._step)

    def close(self) -> None:
        self.settle()  # the memory goes with its last reader

    def advance(self, program: Program, wait: Wait) -> bool:
        """Run a program, which yields the counter and the number to wait for; see ``channel.Channel``."""
        looks = (_LOOKS_IN_HURRY if wait is Wait.SPINNING else _LOOKS) if self._spins else 0
        for counter, number in program:
            if wait is Wait.NOT:
                return False
            if not counter.wait_for(number, looks):
                self._while_waiting()
        return True


def _late(counters: Iterable[Counter], number: int) -> Program:
    """Yield each counter that hasn't reached a number yet, until it has."""
    for counter in counters:
        while not counter.has_reached(number):
            yield counter, number


def _round_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
