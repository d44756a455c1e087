"""send and receive: a stream of messages between any two ranks, for all groups and tags, whatever the engine.

A message is data with its group and tag, or an answer. Data for which there is no receive yet are kept until there is
one, so that transfers with different tags may be called in any order on either side. A send ends when the other rank
has found its receive and answers.

A thread for each other rank moves the messages while transfers are in progress: in a ring of ranks that all send first,
each has to receive while it sends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.time_limits import CHECK_SECONDS, LAST_TRANSFER_SECONDS
from npu_device._src.collectives.call import Agreement, Terms
from npu_device._src.collectives.engines.host.host_engine import Action, Calls, Finish, OnArrays, bytes_of, refusal, run
from npu_device._src.collectives.engines.host.sockets import SocketMesh, SocketMessage
from npu_device._src.collectives.engines.host.stream import BufferPool
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_NAME = "transfers"
_HEADER = struct.Struct("<iqQqiiiq")  # kind, number, group, tag, content (three numbers), bytes that follow
_DATA, _TAKEN, _REFUSED, _WITHDRAWN = range(4)

_NOTHING = np.empty(0, np.uint8)

_Queue = tuple[int, int]
"""The group's number and the tag: transfers of a queue are in order."""


class _Content(NamedTuple):
    """What both sides must agree on."""

    head: int
    check: int
    shapes: int


@dataclass(eq=False)
class Transfer:
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
    done: threading.Event
    number: int = 0
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


@dataclass(eq=False)
class _Arriving:
    """Data that come, or have come."""

    queue: _Queue
    number: int
    content: _Content
    data: np.ndarray


class _Bell:
    """Wakes the thread that waits for messages."""

    event = select.POLLIN

    def __init__(self) -> None:
        self.connection, self._other = socket.socketpair()
        self.connection.setblocking(False)
        self._other.setblocking(False)

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):  # full: it rings already
            self._other.send(b"\0")

    def close(self) -> None:
        """Ring no more."""
        self.connection.close()
        self._other.close()

    def advance(self) -> None:
        """Take note."""
        with contextlib.suppress(BlockingIOError):
            self.connection.recv(4096)


class Stream:
    """The transfers between this rank and another one.

    Args:
        job: the job.
        rank: the other rank.
    """

    def __init__(self, job: Job, rank: int) -> None:
        mine = job.cluster.rank
        ranks = tuple(sorted((mine, rank)))
        self._mesh = SocketMesh(job, Group(_NAME, ranks, ranks.index(mine)))
        self._other = ranks.index(rank)
        self._lock = threading.Lock()  # protects what the callers and the thread share
        self._fresh: deque[tuple[int, Transfer]] = deque()  # kind of the message, and the send
        self._numbers = 0
        self._unanswered: dict[int, Transfer] = {}
        self._posted: defaultdict[_Queue, deque[Transfer]] = defaultdict(deque)
        self._arrived: defaultdict[_Queue, deque[_Arriving]] = defaultdict(deque)
        self._header = np.empty(_HEADER.size, np.uint8)
        self._expected: SocketMessage | None = None
        self._arriving: _Arriving | None = None
        self._leaving: deque[SocketMessage] = deque()
        self._broken: BaseException | None = None
        self._closing = False
        self._bell = _Bell()
        self._thread = threading.Thread(target=self._run, name="npu_device-transfers", daemon=True)
        self._thread.start()

    def start(self, transfer: Transfer) -> None:
        """Start a transfer, without waiting for the other rank."""
        with self._lock:
            if self._broken is not None:
                transfer.end(error=self._broken)
                return
            if transfer.sends:
                self._numbers += 1
                transfer.number = self._numbers
                self._unanswered[transfer.number] = transfer
                self._fresh.append((_DATA, transfer))
            else:
                self._posted[transfer.queue].append(transfer)
        self._bell.ring()

    def withdraw(self, name: str) -> None:
        """End the transfers of a group that is destroyed on this rank."""
        error = RuntimeError("a send or receive was in progress when its group was destroyed on this rank")
        with self._lock:
            sends = [one for one in self._unanswered.values() if name in (one.pair.name, one.pair.parent)]
            receives = [one for posted in self._posted.values() for one in posted]
            receives = [one for one in receives if name in (one.pair.name, one.pair.parent)]
            for transfer in sends:
                del self._unanswered[transfer.number]
                self._fresh.append((_WITHDRAWN, transfer))
            for transfer in receives:
                self._posted[transfer.queue].remove(transfer)
            self._drop_empty()
        for transfer in (*sends, *receives):
            transfer.end(error=error)
        self._bell.ring()

    def close(self) -> None:
        """End the thread, when its last answers have left."""
        self._closing = True
        self._bell.ring()
        self._thread.join(LAST_TRANSFER_SECONDS)
        if not self._mesh.connected.is_set():
            self._mesh.close()
        self._bell.close()

    def _run(self) -> None:
        busy = self._mesh.busy
        busy.add(self._bell)
        try:
            while not self._closing or self._leaving:
                if not self._has_work():
                    busy.advance(None, False)
                elif self._mesh.is_connected(CHECK_SECONDS):
                    self._advance()
                    if not busy.advance(CHECK_SECONDS, False):
                        self._mesh.check()
        except BaseException as error:
            self._break(error)

    def _has_work(self) -> bool:
        return bool(self._fresh or self._unanswered or self._posted or self._arriving or self._leaving)

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._broken = error
            waiting = [*self._unanswered.values(), *(one for posted in self._posted.values() for one in posted)]
        for transfer in waiting:
            transfer.end(error=error)

    def _advance(self) -> None:
        """Send what is new, and handle what has come; wait for nothing."""
        with self._lock:
            while self._fresh:
                kind, transfer = self._fresh.popleft()
                data = transfer.data if kind == _DATA else _NOTHING
                self._put(kind, transfer.number, transfer.queue, transfer.content, data)
            self._match()
        if self._expected is None:
            self._expected = self._mesh.receive(self._other, self._header)
        while self._expected.Test():
            self._expected = self._next()
        while self._leaving and self._leaving[0].Test():
            self._leaving.popleft()

    def _put(self, kind: int, number: int, queue: _Queue, content: _Content, data: np.ndarray) -> None:
        header = np.frombuffer(_HEADER.pack(kind, number, *queue, *content, data.nbytes), np.uint8)
        self._leaving.append(self._mesh.send(self._other, header))
        if data.nbytes:
            self._leaving.append(self._mesh.send(self._other, data))

    def _next(self) -> SocketMessage:
        """Handle the header or the data that have come; return the message that comes next."""
        if self._arriving is None:
            kind, number, group, tag, head, check, shapes, length = _HEADER.unpack(self._header.tobytes())
            self._arriving = self._begin(kind, number, (group, tag), _Content(head, check, shapes), length)
            if self._arriving is not None and length:
                return self._mesh.receive(self._other, self._arriving.data)
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            with self._lock:
                self._arrived[arriving.queue].append(arriving)
                self._match()
        return self._mesh.receive(self._other, self._header)

    def _begin(self, kind: int, number: int, queue: _Queue, content: _Content, length: int) -> _Arriving | None:
        """Handle an answer; return the data that follow another header."""
        with self._lock:
            if kind == _WITHDRAWN:
                kept = [one for one in self._arrived.pop(queue, ()) if one.number != number]
                if kept:
                    self._arrived[queue].extend(kept)
                return None
            if kind != _DATA:
                transfer = self._unanswered.pop(number, None)
                if transfer is not None:
                    transfer.end(refused=kind == _REFUSED)
                return None
        return _Arriving(queue, number, content, np.empty(length, np.uint8))

    def _match(self) -> None:
        """Hand arrived data to the receives that wait for it. Needs the lock."""
        for queue in self._arrived.keys() & self._posted.keys():
            arrived, posted = self._arrived[queue], self._posted[queue]
            while arrived and posted:
                self._answer(arrived.popleft(), posted.popleft())
        self._drop_empty()

    def _answer(self, arrived: _Arriving, receive: Transfer) -> None:
        same = (arrived.content, arrived.data.nbytes) == (receive.content, receive.data.nbytes)
        if same:
            receive.data[:] = arrived.data
        self._put(_TAKEN if same else _REFUSED, arrived.number, arrived.queue, arrived.content, _NOTHING)
        receive.end(refused=not same)

    def _drop_empty(self) -> None:
        for queues in (self._posted, self._arrived):
            for queue in [queue for queue, one in queues.items() if not one]:
                del queues[queue]


class Transfers:
    """The transfers of this rank with all others."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._streams: dict[int, Stream] = {}
        self._making = threading.Lock()

    def with_rank(self, rank: int) -> Stream:
        """Return the transfers with a rank."""
        with self._making:
            if rank not in self._streams:
                self._job.peers.open(self._job.store)
                self._streams[rank] = Stream(self._job, rank)
            return self._streams[rank]

    def withdraw(self, name: str) -> None:
        """End the transfers of a group that is destroyed on this rank."""
        for stream in list(self._streams.values()):
            stream.withdraw(name)

    def close(self) -> None:
        """End the threads."""
        for stream in self._streams.values():
            stream.close()


def transfers_of(job: Job) -> Transfers:
    """Return the transfers of this rank, made at the first use."""
    with job.making:
        found = job.part(Transfers)
        if found is None:
            job.add(found := Transfers(job))
        return found


class PairCalls:
    """The sends and receives of two ranks, with all tags of a group; the methods are those of ``GroupCalls``."""

    in_order = False

    def __init__(self, job: Job, pair: Group) -> None:
        self._stream = transfers_of(job).with_rank(pair.ranks[1 - pair.rank])
        self._withdraw = partial(transfers_of(job).withdraw, pair.name)
        self._watch = job.stall_watch.calls_of(pair)
        self._buffers = job.buffers

    def start(
        self, operation: OnArrays, terms: Terms | None, shapes: int, arrays: list[np.ndarray], overlaps: bool
    ) -> Finish:
        """Start a transfer without waiting for the other rank."""
        assert terms is not None
        del overlaps
        act, results = operation.prepare(arrays, self._buffers)
        position = self._watch.begin(terms.row)
        transfer = act(content=_Content(*terms.head, shapes), done=threading.Event())
        self._stream.start(transfer)
        return partial(self._finish, transfer, results, partial(refusal, terms, position))

    def _finish(
        self, transfer: Transfer, results: list[np.ndarray], refuse: Callable[[], Exception]
    ) -> tuple[int, list[np.ndarray]]:
        try:
            transfer.done.wait()
            if transfer.error is not None:
                raise transfer.error
            if transfer.refused:
                raise refuse()
            return transfer.ended_at, results
        finally:
            self._watch.end()

    def close(self) -> None:
        """End what is in progress: the group is destroyed."""
        self._withdraw()


def _calls_of(job: Job, pair: Group) -> Calls:
    with job.making:
        if ("send", pair) not in job.calls:
            job.calls["send", pair] = PairCalls(job, pair)
        return job.calls["send", pair]


def send(agreement: Agreement, tensor: tf.Tensor, pair: Group) -> tf.Tensor:
    """Send to the other rank of a pair; return a tensor that is ready once the other rank has received."""

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        del buffers
        flat = np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)
        return partial(Transfer, pair, flat, True), [np.array(0, np.int32)]

    operation = OnArrays([tf.TensorSpec([], tf.int32)], bytes_of([tensor]), prepare)
    [[sent]] = run(_calls_of(agreement.job, pair), agreement, [(operation, [tensor])])
    return sent


def receive(agreement: Agreement, like: tf.TensorSpec, pair: Group) -> tf.Tensor:
    """Return the tensor that the other rank of a pair sends; this rank knows its shape and dtype."""

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        del arrays
        result = buffers.array(tuple(like.shape.as_list()), np.dtype(like.dtype.as_numpy_dtype))
        return partial(Transfer, pair, result.reshape(-1).view(np.uint8), False), [result]

    operation = OnArrays([like], bytes_of([like]), prepare)
    [[received]] = run(_calls_of(agreement.job, pair), agreement, [(operation, [])])
    return received
