"""send and receive: messages between any two ranks, for all groups and tags, whatever the engine.

A message is data with its group and tag, or an answer. Data for which there is no receive yet are kept until there is
one, so that transfers with different tags may be called in any order on either side. A send ends when the other rank
has found its receive and answers.

Two threads for each other rank write and read its messages. Both only ever wait for the network: a rank always reads,
whatever its script does, so that in a ring of ranks that all send first none waits for another.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.time_limits import CHECK_SECONDS, LAST_TRANSFER_SECONDS
from npu_device._src.collectives.call import Agreement, Terms
from npu_device._src.collectives.engines.host.host_engine import Action, ArrayEngine, OnArrays
from npu_device._src.collectives.engines.host.queue import BufferPool, Finish, refusal
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_NUMBER = 2  # of the connections, see ``peers``; no group has it
_HEADER = struct.Struct("<iqQqiiiq")  # kind, number, group, tag, content (three numbers), bytes that follow
_DATA, _TAKEN, _REFUSED, _WITHDRAWN = range(4)

_NOTHING = np.empty(0, np.uint8)

_Queue = tuple[int, int]
"""The group's number and the tag: transfers of a queue are in order."""

_Content = tuple[int, ...]
"""What both sides must agree on: the call's fingerprint and shapes, in three numbers."""


@dataclass(eq=False)
class _Transfer:
    """One send or receive of this rank.

    Attributes:
        pair: the group of the two ranks, with the tag.
        data: flat bytes, to be sent or to be filled.
        sends: True for a send.
        content: the same on both sides.
        number: of a send, among those to the other rank.
        done: set at its end.
        ended_at: when, in ns since the epoch.
        refused: the two sides' contents differ.
        error: what ended it, if it failed.
    """

    pair: Group
    data: np.ndarray
    sends: bool
    content: _Content
    number: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    ended_at: int = 0
    refused: bool = False
    error: Optional[BaseException] = None

    @property
    def queue(self) -> _Queue:
        """Return its queue."""
        return self.pair.number, self.pair.tag or 0

    def end(self, refused: bool = False, error: BaseException | None = None) -> None:
        """Mark it as ended."""
        self.refused, self.error, self.ended_at = refused, error, time.time_ns()
        self.done.set()


class _PeerTransfers:
    """The transfers between this rank and another one.

    Args:
        job: the job.
        rank: the other rank.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._peers, self._health, self._rank = job.peers, job.health, rank
        self._lock = threading.Lock()  # protects the tables
        self._numbers = 0
        self._unanswered: dict[int, _Transfer] = {}
        self._posted: defaultdict[_Queue, deque[_Transfer]] = defaultdict(deque)
        self._arrived: defaultdict[_Queue, deque[tuple[int, _Content, np.ndarray]]] = defaultdict(deque)
        self._outbox: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._problem: BaseException | None = None
        self._is_connected = self._closing = False
        job.peers.open(job.store)
        self._writer = self._thread(self._write)
        self._thread(self._read)

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._problem = self._problem or error

        thread = threading.Thread(target=run, name="npu_device-transfers", daemon=True)
        thread.start()
        return thread

    def start(self, transfer: _Transfer) -> None:
        """Start a transfer, without waiting for the other rank."""
        with self._lock:
            if transfer.sends:
                self._numbers += 1
                transfer.number = self._numbers
                self._unanswered[transfer.number] = transfer
                self._put(_DATA, transfer.number, transfer.queue, transfer.content, transfer.data)
            else:
                self._posted[transfer.queue].append(transfer)
                self._match(transfer.queue)

    def wait_for(self, transfer: _Transfer) -> None:
        """Wait until a transfer has ended.

        Raises:
            PeerError: a rank of the job has failed or ended, or can't be reached any more.
            RuntimeError: the group was destroyed on this rank.
        """
        while not transfer.done.wait(CHECK_SECONDS):
            self._health.require_running()
            if isinstance(self._problem, OSError):
                self._peers.raise_for(self._rank, str(self._problem))
            if self._problem is not None:
                raise self._problem
        if transfer.error is not None:
            raise transfer.error

    def withdraw(self, pair: Group) -> None:
        """End the transfers of a group that is destroyed on this rank."""
        error = RuntimeError("a send or receive was in progress when its group was destroyed on this rank")
        with self._lock:
            sends = [one for one in self._unanswered.values() if one.pair == pair]
            receives = [one for posted in self._posted.values() for one in posted if one.pair == pair]
            for transfer in sends:
                del self._unanswered[transfer.number]
                self._put(_WITHDRAWN, transfer.number, transfer.queue, transfer.content)
            for transfer in receives:
                self._posted.pop(transfer.queue, None)
        for transfer in (*sends, *receives):
            transfer.end(error=error)

    def close(self) -> None:
        """Let the last answers leave."""
        self._closing = True
        waits = self._is_connected or not self._outbox.empty()
        self._outbox.put(None)
        if waits:
            self._writer.join(LAST_TRANSFER_SECONDS)

    def _write(self) -> None:
        connection = self._peers.connect(self._rank, _NUMBER)
        connection.setblocking(True)
        self._is_connected = True
        while (message := self._outbox.get()) is not None:
            for part in message:
                connection.sendall(part)

    def _read(self) -> None:
        connection = self._peers.accept(self._rank, _NUMBER, lambda: self._closing)
        if connection is None:
            return
        connection.setblocking(True)
        while True:
            header = _received(connection, _HEADER.size).tobytes()
            kind, number, group, tag, head, check, shapes, length = _HEADER.unpack(header)
            data = _received(connection, length)
            with self._lock:
                self._handle(kind, number, (group, tag), (head, check, shapes), data)

    def _handle(self, kind: int, number: int, queue: _Queue, content: _Content, data: np.ndarray) -> None:
        """Handle a message. Needs the lock, like all that follow."""
        if kind == _DATA:
            self._arrived[queue].append((number, content, data))
            self._match(queue)
        elif kind == _WITHDRAWN:
            kept = [one for one in self._arrived.pop(queue, ()) if one[0] != number]
            if kept:
                self._arrived[queue].extend(kept)
        else:
            transfer = self._unanswered.pop(number, None)
            if transfer is not None:
                transfer.end(refused=kind == _REFUSED)

    def _match(self, queue: _Queue) -> None:
        """Hand arrived data to the receives that wait for it."""
        arrived, posted = self._arrived[queue], self._posted[queue]
        while arrived and posted:
            (number, content, data), receive = arrived.popleft(), posted.popleft()
            same = (content, data.nbytes) == (receive.content, receive.data.nbytes)
            if same:
                receive.data[:] = data
            self._put(_TAKEN if same else _REFUSED, number, queue, content)
            receive.end(refused=not same)
        for table in (self._arrived, self._posted):
            if not table[queue]:
                del table[queue]

    def _put(self, kind: int, number: int, queue: _Queue, content: _Content, data: np.ndarray = _NOTHING) -> None:
        self._outbox.put([_HEADER.pack(kind, number, *queue, *content, data.nbytes), data])


def _received(connection: socket.socket, size: int) -> np.ndarray:
    """Return the next bytes of a connection."""
    data = np.empty(size, np.uint8)
    left = data.data
    while left.nbytes:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("it has closed its connection")
        left = left[count:]
    return data


class _Transfers:
    """The transfers of this rank with all others; a part of the job."""

    def __init__(self) -> None:
        self.by_rank: dict[int, _PeerTransfers] = {}

    def close(self) -> None:
        """Let the last answers leave."""
        for transfers in self.by_rank.values():
            transfers.close()


class PairCalls:
    """The sends and receives of two ranks, with all tags of a group, as ``queue.HostQueue`` has those of a group."""

    in_order = False

    def __init__(self, job: Job, pair: Group) -> None:
        transfers, rank = job.made(_Transfers).by_rank, pair.ranks[1 - pair.rank]
        if rank not in transfers:
            transfers[rank] = _PeerTransfers(job, rank)
        self._transfers, self._pair = transfers[rank], pair
        self._count = job.stall_watch.calls_of(pair)
        self._buffers = job.buffers

    def start(
        self, operation: OnArrays, terms: Terms | None, shapes: int, arrays: list[np.ndarray], overlaps: bool
    ) -> Finish:
        """Start a transfer without waiting for the other rank."""
        assert terms is not None
        del overlaps
        act, results = operation.prepare(arrays, self._buffers)
        position = self._count.begin(terms)
        transfer = act(content=(*terms.head, shapes))
        self._transfers.start(transfer)
        return partial(self._finish, transfer, results, partial(refusal, terms, position))

    def _finish(
        self, transfer: _Transfer, results: list[np.ndarray], refuse: Callable[[], Exception]
    ) -> tuple[int, list[np.ndarray]]:
        try:
            self._transfers.wait_for(transfer)
            if transfer.refused:
                raise refuse()
            return transfer.ended_at, results
        finally:
            self._count.end()

    def close(self) -> None:
        """End what is in progress: the group is destroyed."""
        self._transfers.withdraw(self._pair)


_engine = ArrayEngine(PairCalls)


def send(agreement: Agreement, tensor: tf.Tensor, pair: Group) -> tf.Tensor:
    """Send to the other rank of a pair; return a tensor that is ready once the other rank has received."""

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        del buffers
        flat = np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)
        return partial(_Transfer, pair, flat, True), [np.array(0, np.int32)]

    operation = OnArrays([tf.TensorSpec([], tf.int32)], prepare)
    [[sent]] = _engine.run(agreement, pair, [operation], [[tensor]])
    return sent


def receive(agreement: Agreement, like: tf.TensorSpec, pair: Group) -> tf.Tensor:
    """Return the tensor that the other rank of a pair sends; this rank knows its shape and dtype."""

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        del arrays
        result = buffers.array(tuple(like.shape.as_list()), np.dtype(like.dtype.as_numpy_dtype))
        return partial(_Transfer, pair, result.reshape(-1).view(np.uint8), False), [result]

    [[received]] = _engine.run(agreement, pair, [OnArrays([like], prepare)], [[]])
    return received
