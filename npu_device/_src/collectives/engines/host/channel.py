"""What carries the members' values: a channel, the rounds that it runs, and the heads by which members compare a call.

In a round some members publish values, and others read what they need of them: in memory all read where it lies, and
through sockets and MPI each is sent its part. A transfer is made of rounds (``transfer_rounds``), which know
no more of a channel than what stands here.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from npu_device._src.collectives.call import Terms
from npu_device._src.collectives.dtypes import convert
from npu_device._src.collectives.engines.host.buffers import ALIGNMENT, BufferPool

Program = Iterator
"""One transfer, which pauses where it would have to wait, and yields what its channel has to wait for."""

# The heads

Head = Sequence[int]
"""A member's description of a call, in 32-bit words. It must be the same on all members."""

HEAD_WORDS = 4
# The last word of a head.
_AGREED, _COMPARES, _OVERLAPS = range(3)


class Mismatch(Exception):
    """The members' heads of a call differ. All members detect it in the same step, before any data is read."""


def head_of(terms: Terms) -> Head:
    """Return the head of a call."""
    state = _COMPARES
    if terms.agreed:
        state = _AGREED
    elif terms.overlaps:
        state = _OVERLAPS
    return (*terms.fingerprint, terms.digest, state)


def compares(head: Head) -> bool:
    """Return whether the members have not agreed on the call before."""
    return head[-1] != _AGREED


def require_same(heads: list[Head]) -> None:
    """Raise Mismatch if the members' heads differ, or a member is in two calls at once, which all members refuse."""
    if heads.count(heads[0]) < len(heads) or heads[0][-1] == _OVERLAPS:
        raise Mismatch


# The values

Span = tuple[int, int]
"""The first element, and the one after the last."""


class Stream:
    """A list of arrays, flat, as one stream of elements of a dtype. A member that sends nothing has their shapes only.

    Each array begins at a multiple of ``ALIGNMENT`` bytes, in the stream and in the buffer of the results, so that the
    same offsets apply to both.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, arrays: Sequence[np.ndarray] = ()
    ) -> None:
        self.dtype = dtype
        self.shapes = shapes
        self.arrays = arrays
        self.starts: list[int] = []
        self.lengths = list(map(math.prod, shapes))
        # At least one element: a dtype may be wider than the alignment.
        unit = ALIGNMENT // min(dtype.itemsize, ALIGNMENT)
        total = 0
        for length in self.lengths:
            self.starts.append(total)
            total += -(-length // unit) * unit
        self.length = total

    def copy_to_slot(self, start: int, slot: np.ndarray) -> None:
        """Fill a slot with the stream from element ``start`` on. Arrays of another dtype are cast; gaps between arrays
        are left as they are.
        """
        arrays = self.arrays
        end = start + len(slot)
        # The usual case, a single large gradient, needs no search.
        if len(arrays) == 1 and arrays[0].dtype == slot.dtype:
            # The last slot may reach beyond the array, into the padding of the stream.
            run = arrays[0][start:end]
            slot[: len(run)] = run
            return
        # Start at the array in which the slot begins: with hundreds of arrays, checking each one for each slot is slow.
        for position in range(max(0, bisect_right(self.starts, start) - 1), len(arrays)):
            array_start = self.starts[position]
            if array_start >= end:
                break
            copy_start = max(array_start, start)
            copy_end = min(array_start + self.lengths[position], end)
            if copy_start < copy_end:
                run = arrays[position][copy_start - array_start : copy_end - array_start]
                # Warnings are off, as in TensorFlow: what overflows 16 bits becomes infinite.
                with np.errstate(all="ignore"):
                    convert(run, slot[copy_start - start : copy_end - start])

    def slice(self, start: int, end: int, buffers: BufferPool) -> np.ndarray:
        """Return a span of the stream: of one of the arrays as it is, or a copy of what is in several."""
        position = bisect_right(self.starts, start) - 1
        array_start = self.starts[position]
        if (
            end <= array_start + self.lengths[position]
            and self.arrays[position].dtype == self.dtype
        ):
            return self.arrays[position][start - array_start : end - array_start]
        copy = buffers.array((end - start,), self.dtype)
        self.copy_to_slot(start, copy)
        return copy

    def divided(self, share: int) -> Stream:
        """Return this member's values divided by a number."""
        if share == 1:
            return self
        arrays = [array / array.dtype.type(share) for array in self.arrays]
        return Stream(self.shapes, self.dtype, arrays)

    def results(
        self, pool: BufferPool, dtype: np.dtype, owned: range | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return memory for the stream, or the part of it that holds some arrays, in some dtype, flat; and those arrays
        in it, in their shapes.
        """
        if owned is None:
            owned = range(len(self.starts))
        edges = [*self.starts, self.length]
        offset = edges[owned.start]
        flat = pool.allocate((edges[owned.stop] - offset) * dtype.itemsize).view(dtype)
        arrays = []
        for position in owned:
            begin = edges[position] - offset
            end = begin + self.lengths[position]
            arrays.append(flat[begin:end].reshape(self.shapes[position]))
        return flat, arrays


def ignore(rows: Any) -> None:
    """Do nothing with the values of a round."""


class Round(NamedTuple):
    """One exchange.

    Attributes:
        dtype: dtype of the values.
        spans: which elements of its source a member publishes: one span that all readers get, or one for each member.
            Several lie in a slot one after the other. Except with ``targets``, they are the same on all members.
        publishers: the members that publish.
        source: what this member publishes; None if it doesn't.
        readers: the members that read; None for all. In memory it saves nothing, and isn't looked at.
        targets: by member, where to put its values. If empty, ``read`` gets them.
        read: called with the values of all publishers, by member: in a row for each, what this member reads of them.
        kept: this member, if no member publishes its own span, which only that member reads; None if all are published.
        after: how many rounds have to be read before this one is published, because its source comes from them.
    """

    dtype: np.dtype
    spans: Sequence[Span]
    publishers: Sequence[int]
    source: Optional[Stream] = None
    readers: Optional[Sequence[int]] = None
    targets: Mapping[int, np.ndarray] = {}
    read: Callable[[Any], None] = ignore
    kept: Optional[int] = None
    after: int = 0

    def span(self, member: int) -> Span:
        """Return which elements of a publisher's source a member reads."""
        return self.spans[member if len(self.spans) > 1 else 0]

    def begin(self, member: int, publisher: int) -> int:
        """Return where in the slot of a publisher the span of a member begins."""
        # In the usual case, all members read the whole slot.
        if len(self.spans) == 1:
            return 0
        offset = sum(end - start for start, end in self.spans[:member])
        if self.kept is not None and publisher < member:
            start, end = self.spans[publisher]
            offset -= end - start
        return offset

    def fill(self, slot: np.ndarray) -> None:
        """Copy what this member publishes into a slot, of the dtype of the round."""
        assert self.source is not None
        begin = 0
        for member, (start, end) in enumerate(self.spans):
            # What only this member would read isn't published.
            if member != self.kept:
                self.source.copy_to_slot(start, slot[begin : begin + end - start])
                begin += end - start

    def read_slots(self, slots: np.ndarray, rank: int) -> None:
        """Read what this member needs of the slots of all members, shape [size, elements of a slot]."""
        for member, target in self.targets.items():
            begin = self.begin(rank, member)
            target[:] = slots[member, begin : begin + len(target)]
        # Moves have only targets: the comparison saves them a slice and a call in each round.
        if self.read is ignore:
            return
        start, end = self.span(rank)
        if self.kept is None:
            begin = self.begin(rank, rank)
            self.read(slots[:, begin : begin + end - start])
            return
        begins = [self.begin(rank, member) for member in range(len(slots))]
        self.read(
            [slots[member, begin : begin + end - start] for member, begin in enumerate(begins)]
        )


Rounds = Iterator[Round]
"""The rounds of a transfer, alike on all members."""

# The channel


class Wait(enum.Enum):
    """How a thread that advances a program waits for other members."""

    NOT = enum.auto()
    SLEEPING = enum.auto()
    SPINNING = enum.auto()  # spins for a while before it sleeps, as it needs the result


class Channel:
    """The connection that carries the members' data. Its contract: a member publishes, others read a view of that.

    Attributes:
        counts: for each member, the number of ranks whose sum it contributes.
        buffers: memory for what is neither the script's nor a result.
    """

    reaches_all: bool  # what a member publishes reaches all at the cost of one copy; else each reader is sent its part
    ahead: int  # how many rounds are published beyond the one that is read next
    slot_bytes: int  # the most that a member publishes in one round

    def __init__(self, size: int, rank: int, counts: tuple[int, ...], buffers: BufferPool) -> None:
        self.size = size
        self.rank = rank
        self.counts = counts
        self.buffers = buffers

    def other_members(self, member: int) -> list[int]:
        """Return the other members than one, from the next one on, so that not all begin with the same one."""
        return [(member + step) % self.size for step in range(1, self.size)]

    def run(self, rounds: Rounds, head: Head | None) -> Program:
        """Return the program that runs rounds, and pauses where it would have to wait. A head is compared before
        anybody reads.
        """
        raise NotImplementedError

    def advance(self, program: Any, wait: Wait) -> bool:
        """Run a program to its end, or as far as it goes without blocking; return whether it has ended. The next call
        resumes it.
        """
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
