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

import ctypes
import mmap
import os
import platform
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, Callable

import numpy as np

from npu_device._src.cluster.time_limits import CHECK_SECONDS
from npu_device._src.collectives.engines.host.buffers import BufferPool
from npu_device._src.collectives.engines.host.channel import (
    HEAD_WORDS,
    Channel,
    Head,
    Program,
    Round,
    Rounds,
    Wait,
    require_same,
)

# FUTEX_WAIT and FUTEX_WAKE of <linux/futex.h>; not the private ones, which work in one process
# only.
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL = 0x7FFFFFFF
# Numbers are compared modulo 2**32; members are never half of that apart.
_HALF = 1 << 31
_MASK = (1 << 32) - 1

# On x86-64. On others, such as ARM, processes may see stores out of order, and Python has no memory barriers.
_FUTEX = 202
_longest_wait = (ctypes.c_long * 2)(0, int(CHECK_SECONDS * 1e9))  # a timespec: seconds, nanoseconds
_system_call: Any = None
if sys.platform == "linux" and platform.machine() == "x86_64":
    _system_call = ctypes.CDLL(None).syscall
    _system_call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    _system_call.restype = ctypes.c_long
_longest_wait_address = ctypes.addressof(_longest_wait)


def is_supported() -> bool:
    """Return whether this process can share memory in this way: on Linux and x86-64, which the counters need."""
    return _system_call is not None and hasattr(os, "memfd_create")


class Counter:
    """A number that increases, written by one process and read by others; it wraps around at 2**32. Its offset in the
    mapping is a multiple of 64.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    def advance_to(self, count: int) -> None:
        self._word.value = count & _MASK
        _system_call(_FUTEX, self._address, _FUTEX_WAKE, _ALL, None)

    def has_reached(self, count: int) -> bool:
        return (self._word.value - count) & _MASK < _HALF

    def wait_for(self, count: int, looks: int) -> bool:
        """Spin ``looks`` times, then sleep until the counter reaches a count, for at most ``CHECK_SECONDS``. Return
        whether it has reached the count.
        """
        for _ in range(looks):
            if self.has_reached(count):
                return True
        current = self._word.value
        if (current - count) & _MASK >= _HALF:
            # The call returns at once if the counter has moved on since: the kernel compares it with ``current``.
            _system_call(_FUTEX, self._address, _FUTEX_WAIT, current, _longest_wait_address)
        return self.has_reached(count)


# The ring

_PAGE = 4096
# The size of a cache line: counters of two members in one line would slow down both.
_COUNTER_BYTES = 64
_SLOT_BYTES = 512 << 10
# The bytes of all rings of a group, whatever its size: more members get smaller slots.
_BUDGET_BYTES = 32 << 20
_MOST_SLOTS = 8
_FEWEST_SLOTS = 4
_LOOKS = 200  # some 40 µs
_LOOKS_IN_HURRY = 1000  # some 200 µs


class Layout:
    """The layout of the mapping for a group of a given size.

    A slot is large enough to outweigh the cost of a step, some microseconds of Python, and small enough for the cache
    of a core (512 KiB). There are so many slots that ranks may run apart for a while, but no more: a ring that is
    written anew stays in the cache (docs/notes.md). All rings together take at most 32 MiB.
    """

    def __init__(self, size: int) -> None:
        share = _BUDGET_BYTES // size
        self.slots = max(_FEWEST_SLOTS, min(_MOST_SLOTS, share // _SLOT_BYTES))
        # At least one page, even for so many members that the budget doesn't reach.
        self.slot_bytes = min(_SLOT_BYTES, share // self.slots // _PAGE * _PAGE) or _PAGE
        self.heads_offset = _round_up(2 * size * _COUNTER_BYTES)
        self.rings_offset = _round_up(self.heads_offset + size * self.slots * HEAD_WORDS * 4)
        self.bytes = self.rings_offset + size * self.slots * self.slot_bytes


class MemoryRing(Channel):
    """The end of one member; see ``channel.Channel``. The mapping begins as zeros from ``offset`` on.

    Args:
        while_waiting: called between two slices of a long wait; raises when waiting is pointless.
        offset: where in the mapping the counters, heads and rings begin.
        withdraw_offer: called when a transfer has ended, as all members have come, and when the channel closes.
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
        offset: int = 0,
        withdraw_offer: Callable[[], None] = lambda: None,
        spins: bool = False,
    ) -> None:
        super().__init__(size, rank, (1,) * size, BufferPool())
        layout = Layout(size)
        self.slots = layout.slots
        self.slot_bytes = layout.slot_bytes
        self._withdraw_offer = withdraw_offer
        self._step = 0
        self._while_waiting = while_waiting
        self._spins = spins
        # How many slots each member has written, and how many it has read.
        self._write_counters = []
        self._read_counters = []
        for member in range(size):
            start = offset + 2 * member * _COUNTER_BYTES
            self._write_counters.append(Counter(memory, start))
            self._read_counters.append(Counter(memory, start + _COUNTER_BYTES))
        heads = (size, self.slots, HEAD_WORDS)
        self._heads = np.ndarray(heads, np.int32, memory, offset + layout.heads_offset)
        rings = (size, self.slots, self.slot_bytes)
        self._rings = np.ndarray(rings, np.uint8, memory, offset + layout.rings_offset)

    def run(self, rounds: Rounds, head: Head | None) -> Program:
        """Run rounds: in each, members publish a slot, and all read what they need of it. With a head, no member
        publishes a second slot before all heads agree.
        """
        published = deque[Round]()  # rounds that this member has published and not yet read
        rounds_read = 0
        upcoming = next(rounds, None)
        while upcoming is not None or published:
            # Publish ahead, as far as slots are free and sources are there. This leaves at least one published round.
            ahead = self.ahead
            # The heads travel with one round.
            if head is not None:
                ahead = 0
            while (
                upcoming is not None and len(published) <= ahead and upcoming.after <= rounds_read
            ):
                step = self._step + len(published)
                # The members that haven't read what the slot held.
                unreached = _unreached(self._read_counters, step - self.slots + 1)
                if not published:
                    yield from unreached
                elif next(unreached, None) is not None:
                    # The oldest round can be read meanwhile, which the other members may be waiting for.
                    break
                if upcoming.source is not None:
                    upcoming.fill(self._rings.view(upcoming.dtype)[self.rank, step % self.slots])
                self._publish(step, head)
                published.append(upcoming)
                upcoming = next(rounds, None)
            # Read the oldest.
            oldest = published.popleft()
            # All heads are compared, also of members that publish nothing.
            publishers = oldest.publishers
            if head is not None:
                publishers = range(self.size)
            published_counters = [self._write_counters[member] for member in publishers]
            yield from _unreached(published_counters, self._step + 1)
            slot = self._step % self.slots
            # The step is counted before reading, and this member's slot given back after it, even if the heads differ.
            self._step += 1
            try:
                if head is not None:
                    # For a few numbers, lists are faster than numpy.
                    require_same(self._heads[:, slot].tolist())
                oldest.read_slots(self._rings.view(oldest.dtype)[:, slot], self.rank)
            finally:
                self._read_counters[self.rank].advance_to(self._step)
            rounds_read += 1
            head = None

    def _publish(self, step: int, head: Head | None) -> None:
        # The head and the slot are written before the counter: on x86-64, whoever sees the counter sees them, too.
        if head is not None:
            self._heads[self.rank, step % self.slots] = head
        self._write_counters[self.rank].advance_to(step + 1)

    def close(self) -> None:
        # Once every member has mapped the memory, it needs no name: it goes with its last reader.
        self._withdraw_offer()

    def advance(self, program: Program, wait: Wait) -> bool:
        """Run a program, which yields the counter and the count to wait for; see ``channel.Channel``."""
        # Without a core of its own, a spinning thread would take it from the peer it waits for.
        looks = 0
        if self._spins:
            looks = _LOOKS
            if wait is Wait.SPINNING:
                looks = _LOOKS_IN_HURRY
        for counter, count in program:
            if wait is Wait.NOT:
                return False
            if not counter.wait_for(count, looks):
                self._while_waiting()
        # The first transfer has ended, and so all members have come: later ones find nothing to withdraw.
        self._withdraw_offer()
        return True


def _unreached(counters: Iterable[Counter], count: int) -> Program:
    """Yield each counter that hasn't reached a count yet, until it has."""
    for counter in counters:
        while not counter.has_reached(count):
            yield counter, count


def _round_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
