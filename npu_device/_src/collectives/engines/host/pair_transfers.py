"""send and receive: data between any two ranks, for all groups and tags, whatever the engine.

Each tag has a connection of its own, whose stream id names the group and tag: transfers with different tags may
be called in any order on either side. A few idle connections are kept, and either side may close its end of one. The
data stay with the sender until the other rank has found its receive and says what it expects. Transfers of one tag take
turns: in eager mode the first one in the thread of the script, others in a thread that ends with the last of them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import environment
from npu_device._src.cluster.time_limits import CHECK_SECONDS
from npu_device._src.collectives.call import Terms
from npu_device._src.collectives.dtypes import ArrayList
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.host.buffers import BufferPool
from npu_device._src.collectives.engines.host.host_engine import ArrayEngine
from npu_device._src.collectives.engines.host.queue import ArrayTransfer, Finished, Prepared
from npu_device._src.collectives.group import Group
from npu_device._src.threads import start_thread

_MOST_IDLE = 4  # idle connections of a pair
_CONTENT = struct.Struct("<iiiq")
"""What both sides must agree on: the call's fingerprint and shapes, and the bytes."""


@dataclass(eq=False)
class PairTransfer:
    """One send or receive of this rank, whose bytes are to be sent or to be filled.

    Attributes:
        stream_id: identifies the group, the tag and the direction.
        is_moved_at_finish: by the thread that finishes it, as no other transfer of the stream comes before it.
        ended: when it ended, in ns since the epoch.
    """

    stream_id: int
    sends: bool
    data: np.ndarray
    results: ArrayList
    terms: Terms
    position: int  # position of the transfer in the group
    is_moved_at_finish: bool = False
    ended: Future[int] = field(default_factory=Future)

    @property
    def content(self) -> bytes:
        return _CONTENT.pack(*self.terms.fingerprint, self.terms.digest, self.data.nbytes)


class PairQueue:
    """The sends and receives of two ranks, with all tags of a group; ``queue.HostQueue`` has the other transfers.

    Attributes:
        idle: open connections without a transfer, by stream, in the order of their last use.
    """

    in_order = False

    def __init__(self, context: EngineContext, pair: Group) -> None:
        self._context = context
        self._rank = pair.ranks[1 - pair.rank]
        self._count = context.counts.of(pair)
        self._lock = threading.Lock()
        self._queues: dict[int, deque[PairTransfer]] = {}
        self.idle: dict[int, socket.socket] = {}
        self._is_closed = False
        context.peers.open()

    def start(
        self, transfer: ArrayTransfer, terms: Terms, arrays: ArrayList, *, computes_meanwhile: bool
    ) -> PairTransfer:
        make_transfer, results = transfer.prepare(arrays, self._context.buffers)
        position = self._count.begin(terms)
        started: PairTransfer = make_transfer(results, terms, position)
        with self._lock:
            queue = self._queues.setdefault(started.stream_id, deque())
            queue.append(started)
            is_first = len(queue) == 1
        # A later transfer needs no thread: whoever moves the first one goes on to it.
        if is_first and computes_meanwhile:
            self._move_in_a_thread(queue)
        started.is_moved_at_finish = is_first and not computes_meanwhile
        return started

    def finish(self, started: PairTransfer) -> Finished:
        try:
            if started.is_moved_at_finish:
                queue = self._queues[started.stream_id]
                if self._move_first(queue):
                    self._move_in_a_thread(queue)
            return started.ended.result(), started.results
        finally:
            self._count.end()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self.idle.values():
                connection.close()

    def _move_in_a_thread(self, queue: deque[PairTransfer]) -> None:
        def run() -> None:
            while self._move_first(queue):
                pass

        start_thread("npu_device-transfers", run)

    def _move_first(self, queue: deque[PairTransfer]) -> bool:
        """Move the first transfer of a queue; return whether more of them wait."""
        transfer = queue[0]
        try:
            self._move(transfer)
            transfer.ended.set_result(time.time_ns())
        except BaseException as error:
            transfer.ended.set_exception(error)
        with self._lock:
            queue.popleft()
            if not queue:
                del self._queues[transfer.stream_id]
            return bool(queue)

    def _move(self, transfer: PairTransfer) -> None:
        try:
            move = self._receive
            if transfer.sends:
                move = self._send
            agrees = move(transfer)
        except OSError as error:
            # Why the other rank has gone explains more than the error of the socket.
            self._context.peers.raise_for(self._rank, str(error))
        if not agrees:
            raise transfer.terms.error_for_mismatch(transfer.position)

    def _send(self, transfer: PairTransfer) -> bool:
        """Send; return whether the other rank expected that."""
        patience = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        # A connection leaves the table while it is used: one that fails must not be used again.
        idle = self.idle.pop(transfer.stream_id, None)
        connection = idle or self._context.peers.connect(self._rank, transfer.stream_id, patience)
        with contextlib.ExitStack() as closing:
            closing.enter_context(connection).settimeout(CHECK_SECONDS)
            try:
                self._move_all(connection.send, transfer.content)
                [agrees] = self._move_all(connection.recv_into, bytearray(1))
            except OSError:
                if idle is None:
                    raise
                # The other rank had closed its end of an idle connection, so that a new one is made.
                return self._send(transfer)
            self._check()
            # This byte tells the other rank that the transfer hasn't been withdrawn.
            self._move_all(connection.send, b"\1")
            if agrees:
                self._move_all(connection.send, transfer.data)
            # The other rank confirms that it has the data.
            self._move_all(connection.recv_into, bytearray(1))
            self._keep(transfer.stream_id, connection, closing)
            return bool(agrees)

    def _receive(self, transfer: PairTransfer) -> bool:
        """Receive; return whether the other rank sends what is expected."""
        while True:
            connection = self.idle.pop(transfer.stream_id, None)
            connection = connection or self._context.peers.accept(
                self._rank, transfer.stream_id, self._is_over
            )
            if connection is None:
                self._check()
                continue
            with contextlib.ExitStack() as closing:
                closing.enter_context(connection).settimeout(CHECK_SECONDS)
                try:
                    content = self._move_all(connection.recv_into, bytearray(_CONTENT.size))
                    agrees = content == transfer.content
                    self._move_all(connection.send, bytes([agrees]))
                    self._move_all(connection.recv_into, bytearray(1))
                except ConnectionError:
                    # The sender has closed its end, or destroyed its group.
                    continue
                if agrees:
                    self._move_all(connection.recv_into, transfer.data)
                self._move_all(connection.send, b"\1")
                self._keep(transfer.stream_id, connection, closing)
                return agrees

    def _keep(
        self, stream_id: int, connection: socket.socket, closing: contextlib.ExitStack
    ) -> None:
        with self._lock:
            if not self._is_closed:
                closing.pop_all()
                self.idle[stream_id] = connection
                # The dictionary keeps insertion order, so its first connection is the one unused
                # longest.
                while len(self.idle) > _MOST_IDLE:
                    self.idle.pop(next(iter(self.idle))).close()

    def _is_over(self) -> bool:
        return self._is_closed or self._context.health.is_over

    def _check(self) -> None:
        """Raise PeerError or RuntimeError if transfers aren't wanted any more."""
        self._context.health.require_running()
        if self._is_over():
            raise RuntimeError(
                "a send or receive was in progress when its group was destroyed on this rank"
            )

    def _move_all(self, move: Callable[[memoryview], int], data: Any) -> Any:
        """Send data, or fill it with what the other rank sends, however long that one takes; return it."""
        unmoved = memoryview(data)
        while unmoved.nbytes:
            try:
                count = move(unmoved)
            except socket.timeout:
                self._check()
                continue
            if not count:
                raise ConnectionError("it has closed its connection")
            unmoved = unmoved[count:]
        return data


class Pairs(ArrayEngine):
    """The sends and receives of this rank, of all pairs of ranks."""

    def send(self, tensor: tf.Tensor, pair: Group, terms: Terms) -> tf.Tensor:
        """Send to the other rank of a pair; return a tensor that is ready once the other rank has received."""

        def prepare(arrays: ArrayList, _: BufferPool) -> Prepared:
            vector = np.ascontiguousarray(arrays[0])
            return _maker(pair, True, vector), [np.array(0, np.int32)]

        transfer = ArrayTransfer([tf.TensorSpec([], tf.int32)], prepare)
        [[sent]] = self.run(pair, [transfer], [[tensor]], terms)
        return sent

    def receive(self, spec: tf.TensorSpec, pair: Group, terms: Terms) -> tf.Tensor:
        """Return the tensor that the other rank of a pair sends; this rank knows its shape and dtype."""

        def prepare(_: ArrayList, buffers: BufferPool) -> Prepared:
            shape = tuple(spec.shape.as_list())
            received = buffers.array(shape, np.dtype(spec.dtype.as_numpy_dtype))
            return _maker(pair, False, received), [received]

        transfer = ArrayTransfer([spec], prepare)
        [[received]] = self.run(pair, [transfer], [[]], terms)
        return received


def _maker(pair: Group, sends: bool, array: np.ndarray) -> partial[PairTransfer]:
    flat = array.reshape(-1).view(np.uint8)
    return partial(PairTransfer, pair.of_one_order().digest, sends, flat)
