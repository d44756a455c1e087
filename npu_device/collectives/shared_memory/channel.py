"""What the members of a group share: for each a ring of slots that it writes and all read, and two counters.

Everything goes in steps, which every member counts alike. In a step each member may publish one slot of its ring, and
then reads what it wants of the others'. A slot is written again when all members have read it. The size of the mapping
is fixed: a longer message takes more steps, not more memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Callable

import numpy as np

from npu_device.collectives.shared_memory.futex import Counter

HEAD_WORDS = 4
"""32-bit words of a member that stand beside each of its slots: what it says about the job that begins there."""

_PAGE = 4096
_COUNTER_BYTES = 64
_SLOT_BYTES = 256 << 10
_BUDGET_BYTES = 32 << 20
_MOST_SLOTS, _FEWEST_SLOTS = 32, 4
_LOOKS = 200  # some 40 µs

Waiting = Iterator[tuple[Counter, int]]
"""A program that stops where it would have to wait, and says for which counter to reach which number."""


class Layout:
    """Where everything lies in the mapping of a group of some size.

    Slots are as large as fits the cache of one core together with the result (256 KiB: a compromise between the cost
    of a step, some microseconds of Python, and that of leaving the cache), and so many that ranks may run apart for a
    while. All rings together take at most 32 MiB, half of the /dev/shm of a default container, though this mapping
    isn't in it.
    """

    def __init__(self, size: int) -> None:
        share = _BUDGET_BYTES // size
        self.slots = max(_FEWEST_SLOTS, min(_MOST_SLOTS, share // _SLOT_BYTES))
        self.slot_bytes = min(_SLOT_BYTES, share // self.slots // _PAGE * _PAGE) or _PAGE
        self.heads = _round_up(2 * size * _COUNTER_BYTES)
        self.rings = _round_up(self.heads + size * self.slots * HEAD_WORDS * 4)
        self.bytes = self.rings + size * self.slots * self.slot_bytes


class Channel:
    """One member's end.

    Args:
        memory: a mapping of ``Layout(size).bytes`` bytes, zeros when the first member comes.
        size: number of members.
        rank: this member's number.
        while_waiting: called between two slices of a long wait; raises when there is nothing to wait for any more.
    """

    def __init__(self, memory: mmap.mmap, size: int, rank: int, while_waiting: Callable[[], None]) -> None:
        layout = Layout(size)
        self.size = size
        self.rank = rank
        self.slots = layout.slots
        self.slot_bytes = layout.slot_bytes
        self.step = 0
        self._while_waiting = while_waiting
        # With more members than cores whoever looks keeps the core from those that it waits for.
        self._looks = _LOOKS if size <= len(os.sched_getaffinity(0)) else 0
        self._written = [Counter(memory, 2 * member * _COUNTER_BYTES) for member in range(size)]
        self._read = [Counter(memory, (2 * member + 1) * _COUNTER_BYTES) for member in range(size)]
        words = np.frombuffer(memory, np.int32, size * self.slots * HEAD_WORDS, layout.heads)
        self._heads = words.reshape(size, self.slots, HEAD_WORDS)
        rings = np.frombuffer(memory, np.uint8, size * self.slots * self.slot_bytes, layout.rings)
        self._rings = rings.reshape(size, self.slots, self.slot_bytes)
        self._views: dict[np.dtype, np.ndarray] = {}

    def rings(self, dtype: np.dtype) -> np.ndarray:
        """All slots of all members, shape [size, slots, elements of a slot]."""
        if dtype not in self._views:
            self._views[dtype] = self._rings.view(dtype)
        return self._views[dtype]

    def heads(self, step: int) -> np.ndarray:
        """What stands beside the slots of a step: int32, shape [size, HEAD_WORDS]."""
        return self._heads[:, step % self.slots]

    def has_room(self, step: int) -> bool:
        """Whether everybody has read what this member's slot of the step held before."""
        return all(counter.has_reached(step - self.slots + 1) for counter in self._read)

    def room(self, step: int) -> Waiting:
        """Wait for that."""
        yield from _reached(self._read, step - self.slots + 1)

    def publish(self, step: int) -> None:
        """Show this member's slot of the step to the others. Steps in which it has nothing to say are shown as well."""
        self._written[self.rank].advance_to(step + 1)

    def there(self, step: int, members: Sequence[int]) -> Waiting:
        """Wait until members have published their slots of the step."""
        yield from _reached([self._written[member] for member in members], step + 1)

    def done(self, step: int) -> None:
        """Let the others write the slots of the step again."""
        self._read[self.rank].advance_to(step + 1)

    def advance(self, program: Waiting, block: bool) -> bool:
        """Run a program to its end, or without blocking as far as it goes; whether it has ended.

        A program that was stopped goes on where it was at the next call.
        """
        for counter, number in program:
            if not block:
                return False
            if not counter.wait_for(number, self._looks):
                self._while_waiting()
        return True


def _reached(counters: Sequence[Counter], number: int) -> Waiting:
    for counter in counters:
        while not counter.has_reached(number):
            yield counter, number


def _round_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
