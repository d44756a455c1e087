"""Send and receive between two ranks: one channel for all tags and both directions.

Each side has a ring of slots that it fills and the other empties, and in it one stream of messages: data with its
tag, and answers. Data for which there is no receive yet is kept until there is one, so that
transfers with different tags may be called in any order on either side. A send ends when the other side has found
its receive and answers.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, Optional, TypeVar

import numpy as np

from npu_device._src.collectives.backends.shared_memory.futex import Counter

_SLOTS = 8
_SLOT_BYTES = 256 << 10
_COUNTER_BYTES = 64
_RINGS_AT = 4096
_LOOKS = 200  # about 40 µs

BYTES = _RINGS_AT + 2 * _SLOTS * _SLOT_BYTES
"""Size of a mailbox's memory."""

# A message begins in a new slot: its kind, its number, its tag, its content (three numbers), and its length.
_HEADER = struct.Struct("<iqqiiiq")
_DATA, _TAKEN, _REFUSED = range(3)
_HEADER_BYTES = 64

_Item = TypeVar("_Item")

Terms = tuple[int, int, int]
"""Each side's description of a transfer; the two must be equal."""


@dataclass
class Transfer:
    """One send or receive of this side.

    Attributes:
        tag: pairs it with its counterpart.
        data: flat bytes, to be sent or to be filled.
        sends: True for a send.
        terms: must be the same on both sides.
        refuse: makes the error for sides whose terms differ.
        ended: whether it has ended.
        ended_at: when, in seconds since the epoch.
        refused: whether the terms differ.
        error: the error that ended it, if any.
    """

    tag: int
    data: np.ndarray
    sends: bool
    terms: Terms
    refuse: Callable[[], Exception]
    ended: bool = False
    ended_at: float = 0.0
    refused: bool = False
    error: Optional[BaseException] = None

    def end(self, refused: bool = False, error: BaseException | None = None) -> None:
        """Mark it as ended."""
        self.refused, self.error, self.ended_at, self.ended = refused, error, time.time(), True


@dataclass
class _Message:
    """An incoming message, as far as it has arrived."""

    kind: int
    number: int
    tag: int
    terms: Terms
    data: np.ndarray
    receive: Optional[Transfer] = None
    filled: int = 0


class Mailbox:
    """One side's end.

    Args:
        memory: a mapping with ``BYTES`` bytes from ``first`` on, zeros when the first side comes.
        first: where in the mapping the mailbox begins, in bytes.
        side: 0 or 1.
        check: called between two slices of a long wait; raises when waiting is pointless.
        settle: called after each transfer, when both sides have come.
    """

    def __init__(
        self, memory: mmap.mmap, first: int, side: int, check: Callable[[], None], settle: Callable[[], None]
    ) -> None:
        self._check, self._settle = check, settle
        other = 1 - side

        def counter(place: int) -> Counter:
            return Counter(memory, first + place * _COUNTER_BYTES)

        self._filled, self._others_filled = counter(side), counter(other)
        self._emptied, self._others_emptied = counter(2 + side), counter(2 + other)
        self._news, self._others_news = counter(4 + side), counter(4 + other)
        rings = np.frombuffer(memory, np.uint8, 2 * _SLOTS * _SLOT_BYTES, first + _RINGS_AT)
        rings = rings.reshape(2, _SLOTS, _SLOT_BYTES)
        self._ring, self._others_ring = rings[side], rings[other]
        self._slots_filled = self._slots_emptied = self._news_told = self._news_seen = self._numbers = 0
        self._outgoing: deque[tuple[bytes, np.ndarray, int]] = deque()  # header, data, how much of it has been sent
        self._incoming: _Message | None = None
        self._unanswered: dict[int, Transfer] = {}
        self._posted: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[_Message]] = defaultdict(deque)
        self._queue = threading.Lock()  # protects what start() and the driving thread share
        self._changed = threading.Condition()  # a transfer has ended, or no thread is driving
        self._driven = False
        self._broken: BaseException | None = None

    def start(self, transfer: Transfer) -> None:
        """Start a transfer, without waiting for the other side."""
        with self._queue:
            if self._broken is not None:
                transfer.end(error=self._broken)
            elif transfer.sends:
                self._numbers += 1
                self._unanswered[self._numbers] = transfer
                self._put(_DATA, self._numbers, transfer.tag, transfer.terms, transfer.data)
            else:
                self._posted[transfer.tag].append(transfer)
        with self._changed:
            drives, self._driven = not self._driven, True
        if drives:
            with self._driving():
                self._advance()
        else:
            self._others_news.wake()  # the driving thread has something new to do

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer.

        Raises:
            Exception: the error that ended it.
        """
        with self._changed:
            self._changed.wait_for(lambda: transfer.ended or not self._driven)
            drives = not transfer.ended
            self._driven = self._driven or drives
        if drives:
            with self._driving():
                self._drive(transfer)
        self._settle()
        if transfer.error is not None:
            raise transfer.error
        if transfer.refused:
            raise transfer.refuse()

    def close(self) -> None:
        """Give up the mailbox; transfers in progress and later ones fail."""
        self._break(RuntimeError("a send or receive was in progress when its group was destroyed on this rank"))
        self._settle()

    @contextlib.contextmanager
    def _driving(self) -> Iterator[None]:
        """Let another thread drive after the block."""
        try:
            yield
        finally:
            with self._changed:
                self._driven = False
                self._changed.notify_all()

    def _drive(self, transfer: Transfer) -> None:
        """Advance all transfers until one has ended."""
        looks = _LOOKS
        while not transfer.ended:
            if self._advance():
                looks = _LOOKS
                with self._changed:
                    self._changed.notify_all()
            elif not self._others_news.wait_for(self._news_seen + 1, looks):
                looks = 0
                try:
                    self._check()
                except BaseException as error:
                    self._break(error)

    def _break(self, error: BaseException) -> None:
        with self._queue:
            self._broken = error
            waiting = [*self._unanswered.values(), *(one for posted in self._posted.values() for one in posted)]
            if self._incoming is not None and self._incoming.receive is not None:
                waiting.append(self._incoming.receive)
            self._outgoing.clear()
            self._unanswered.clear()
            self._posted.clear()
        for transfer in waiting:
            transfer.end(error=error)
        with self._changed:
            self._changed.notify_all()

    def _put(self, kind: int, number: int, tag: int, terms: Terms, data: np.ndarray) -> None:
        header = _HEADER.pack(kind, number, tag, *terms, data.nbytes)
        self._outgoing.append((header.ljust(_HEADER_BYTES, b"\0"), data, 0))

    def _advance(self) -> bool:
        """Receive and send what is possible without waiting; return whether there was anything."""
        if self._broken is not None:
            return False
        self._news_seen = self._others_news.read()  # before looking, so that no news is missed
        begin = self._slots_filled, self._slots_emptied
        while self._others_filled.has_reached(self._slots_emptied + 1):
            self._read_slot(self._others_ring[self._slots_emptied % _SLOTS])
            self._slots_emptied += 1
            self._emptied.advance_to(self._slots_emptied)
        with self._queue:
            self._match()
            while self._outgoing and self._others_emptied.has_reached(self._slots_filled + 1 - _SLOTS):
                self._send_off(self._ring[self._slots_filled % _SLOTS])
                self._slots_filled += 1
                self._filled.advance_to(self._slots_filled)
        if begin == (self._slots_filled, self._slots_emptied):
            return False
        self._news_told += 1
        self._news.advance_to(self._news_told)
        return True

    def _send_off(self, slot: np.ndarray) -> None:
        """Fill a slot with the next piece of the first message."""
        header, data, gone = self._outgoing.popleft()
        first = 0
        if header:
            slot[:_HEADER_BYTES] = np.frombuffer(header, np.uint8)
            first = _HEADER_BYTES
        piece = data[gone : gone + _SLOT_BYTES - first]
        slot[first : first + piece.nbytes] = piece
        if gone + piece.nbytes < data.nbytes:
            self._outgoing.appendleft((b"", data, gone + piece.nbytes))

    def _read_slot(self, slot: np.ndarray) -> None:
        """Read a slot of the other side."""
        message, first = self._incoming, 0
        if message is None:
            kind, number, tag, one, two, three, length = _HEADER.unpack_from(slot[:_HEADER_BYTES].tobytes())
            with self._queue:
                message = self._message(kind, number, tag, (one, two, three), length)
            first = _HEADER_BYTES
        piece = slot[first : first + message.data.nbytes - message.filled]
        message.data[message.filled : message.filled + piece.nbytes] = piece
        message.filled += piece.nbytes
        self._incoming = message if message.filled < message.data.nbytes else None
        if self._incoming is None:
            with self._queue:
                self._arrive(message)

    def _message(self, kind: int, number: int, tag: int, terms: Terms, length: int) -> _Message:
        """Return an incoming message; if its receive is waiting, the data goes straight to its destination."""
        message = _Message(kind, number, tag, terms, np.empty(0, np.uint8))
        if kind == _DATA and tag in self._posted and tag not in self._arrived:
            first = self._posted[tag][0]
            if first.terms == terms and first.data.nbytes == length:
                message.receive, message.data = _take(self._posted, tag), first.data
                return message
        message.data = np.empty(length, np.uint8)
        return message

    def _arrive(self, message: _Message) -> None:
        """Handle a message that has arrived completely."""
        if message.kind != _DATA:
            self._unanswered.pop(message.number).end(refused=message.kind == _REFUSED)
        elif message.receive is not None:
            self._answer(message, message.receive)
        else:
            self._arrived[message.tag].append(message)

    def _match(self) -> None:
        """Hand arrived data to the receives that wait for it."""
        for tag in self._arrived.keys() & self._posted.keys():
            while tag in self._arrived and tag in self._posted:
                message, receive = _take(self._arrived, tag), _take(self._posted, tag)
                if message.terms == receive.terms and message.data.nbytes == receive.data.nbytes:
                    receive.data[:] = message.data
                self._answer(message, receive)

    def _answer(self, message: _Message, receive: Transfer) -> None:
        same = message.terms == receive.terms and message.data.nbytes == receive.data.nbytes
        self._put(_TAKEN if same else _REFUSED, message.number, message.tag, message.terms, np.empty(0, np.uint8))
        receive.end(refused=not same)


def _take(queues: dict[int, deque[_Item]], tag: int) -> _Item:
    """Return the first item of a tag's queue, and remove the queue when it is empty."""
    item = queues[tag].popleft()
    if not queues[tag]:
        del queues[tag]
    return item
