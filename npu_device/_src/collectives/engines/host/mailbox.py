"""Send and receive between two ranks: one stream of messages in each direction, for all tags.

A message is data with its tag, or an answer; it travels in slots (``Slots``). Data for which there is no receive yet is
kept until there is one, so that transfers with different tags may be called in any order on either side. A send ends
when the other side has found its receive and answers.

A thread that waits for a transfer also advances the transfers with other ranks that have been started. In a ring of
ranks that all send first, each would otherwise wait for one that doesn't receive yet.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, Optional, TypeVar

import numpy as np

SLOTS = 8
"""How many slots each side has."""

SLOT_BYTES = 256 << 10

# A message begins in a new slot: its kind, its number, its tag, its content (three numbers), and its length.
_HEADER = struct.Struct("<iqqiiiq")
_DATA, _TAKEN, _REFUSED = range(3)
_HEADER_BYTES = 64

_Item = TypeVar("_Item")

TermWords = tuple[int, int, int]
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
        ended_at: when, in ns since the epoch.
        refused: whether the terms differ.
        error: the error that ended it, if any.
    """

    tag: int
    data: np.ndarray
    sends: bool
    terms: TermWords
    refuse: Callable[[], Exception]
    ended: bool = False
    ended_at: int = 0
    refused: bool = False
    error: Optional[BaseException] = None

    def end(self, refused: bool = False, error: BaseException | None = None) -> None:
        """Mark it as ended."""
        self.refused, self.error, self.ended_at, self.ended = refused, error, time.time_ns(), True


@dataclass
class _Message:
    """An incoming message, as far as it has arrived."""

    kind: int
    number: int
    tag: int
    terms: TermWords
    data: np.ndarray
    receive: Optional[Transfer] = None
    filled: int = 0


class Slots:
    """One side's slots, and how they reach the other side. Methods that do nothing here are optional for a backend."""

    def look(self) -> None:
        """Note what there is now; ``wait`` returns when there is more."""

    def arrived(self) -> np.ndarray | None:
        """Return the next slot that has come from the other side, or None; it is this side's until ``emptied``."""
        raise NotImplementedError

    def emptied(self) -> None:
        """Give back the slot that has arrived."""

    def free(self) -> np.ndarray | None:
        """Return a free slot of this side to be filled, or None."""
        raise NotImplementedError

    def filled(self, size: int) -> None:
        """Send the first bytes of the free slot."""

    def wait(self, first: bool, briefly: bool) -> bool:
        """Wait for something new, but not for long; return False if nothing came.

        Args:
            first: nothing has been waited for since the last news, which therefore may be close.
            briefly: for a millisecond at most.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise if waiting is pointless. Called between two slices of a long wait."""

    def tell(self) -> None:
        """Wake the other side, for which there is something new. Not needed where sending a slot wakes it."""

    def wake(self) -> None:
        """Wake this side's waiting thread. Not needed where it never waits for long."""

    def settle(self) -> None:
        """Note that both sides have come, after each transfer and at the end."""

    def close(self) -> None:
        """Give up the slots."""


_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()
_adding = threading.Lock()


class Mailbox:
    """One side's end.

    Args:
        slots: carries slots to the other side and back.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._numbers = 0
        self._outgoing: deque[tuple[bytes, np.ndarray, int]] = deque()  # header, data, how much of it has been sent
        self._incoming: _Message | None = None
        self._unanswered: dict[int, Transfer] = {}
        self._posted: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[_Message]] = defaultdict(deque)
        self._queue = threading.Lock()  # protects what start() and the driving thread share
        self._changed = threading.Condition()  # a transfer has ended, or no thread is driving
        self._driven = False
        self._broken: BaseException | None = None
        with _adding:
            _mailboxes.add(self)

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
            self._slots.wake()  # the driving thread has something new to do

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
        self._slots.settle()
        if transfer.error is not None:
            raise transfer.error
        if transfer.refused:
            raise transfer.refuse()

    def close(self) -> None:
        """Give up the mailbox; transfers in progress and later ones fail."""
        self._break(RuntimeError("a send or receive was in progress when its group was destroyed on this rank"))
        self._slots.settle()
        self._slots.close()

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
        """Advance all transfers until one has ended, and those with other ranks."""
        first = True
        while not transfer.ended:
            if self._advance():
                first = True
                with self._changed:
                    self._changed.notify_all()
            elif not self._slots.wait(first, briefly=self._advance_others()):
                first = False
                try:
                    self._slots.check()
                except BaseException as error:
                    self._break(error)

    def _advance_others(self) -> bool:
        """Advance the transfers in other mailboxes; return whether there are any."""
        with _adding:
            others = [one for one in _mailboxes if one is not self and one._is_busy()]
        for other in others:
            other._advance_unless_driven()
        return bool(others)

    def _is_busy(self) -> bool:
        """Return whether a transfer has been started and has not ended."""
        return bool(self._posted or self._unanswered or self._outgoing or self._incoming)

    def _advance_unless_driven(self) -> None:
        with self._changed:
            if self._driven:
                return
            self._driven = True
        with self._driving():
            try:
                self._advance()
            except BaseException as error:  # of this mailbox; the caller waits for another one
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

    def _put(self, kind: int, number: int, tag: int, terms: TermWords, data: np.ndarray) -> None:
        header = _HEADER.pack(kind, number, tag, *terms, data.nbytes)
        self._outgoing.append((header.ljust(_HEADER_BYTES, b"\0"), data, 0))

    def _advance(self) -> bool:
        """Receive and send what is possible without waiting; return whether there was anything."""
        if self._broken is not None:
            return False
        self._slots.look()  # before looking, so that no news is missed
        anything = False
        while (slot := self._slots.arrived()) is not None:
            self._read_slot(slot)
            self._slots.emptied()
            anything = True
        with self._queue:
            self._match()
            while self._outgoing and (slot := self._slots.free()) is not None:
                self._slots.filled(self._send_off(slot))
                anything = True
        if anything:
            self._slots.tell()
        return anything

    def _send_off(self, slot: np.ndarray) -> int:
        """Fill a slot with the next piece of the first message; return how many bytes it has."""
        header, data, gone = self._outgoing.popleft()
        first = 0
        if header:
            slot[:_HEADER_BYTES] = np.frombuffer(header, np.uint8)
            first = _HEADER_BYTES
        piece = data[gone : gone + SLOT_BYTES - first]
        slot[first : first + piece.nbytes] = piece
        if gone + piece.nbytes < data.nbytes:
            self._outgoing.appendleft((b"", data, gone + piece.nbytes))
        return first + piece.nbytes

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

    def _message(self, kind: int, number: int, tag: int, terms: TermWords, length: int) -> _Message:
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
