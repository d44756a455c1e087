"""Bytes that a rank gives another one when that asks, without its script taking part: from a thread of their own.

Each pair of ranks has one connection in each direction, made at the first request. A rank that ends while others may
still ask hands its bytes over to rank 0.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, Callable, Optional

from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.peers import Peers
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.time_limits import CHECK_SECONDS, SHORT_SECONDS

Key = tuple[int, int, int]
"""Which bytes a rank asks for; what the numbers mean is up to those who ask and answer."""

_KEY = struct.Struct("<3q")
_LENGTH = struct.Struct("<q")
_REFUSED = -1
_TOPIC = "bytes"
_ASKING, _HANDING_OVER = 0x6E70_7501, 0x6E70_7502  # numbers of the connections


class BytesOnRequest:
    """This rank's part in the exchange.

    Args:
        answer: returns the bytes of a key, or None if this rank doesn't have them as they were asked for; called in a
            thread of its own.
        everything: yields all keys and bytes of this rank, to be handed over when it ends.
    """

    def __init__(
        self,
        cluster: Cluster,
        health: Health,
        store: ControlChannel,
        peers: Peers,
        answer: Callable[[Key], Optional[memoryview]],
        everything: Callable[[], Iterator[tuple[Key, memoryview]]],
    ) -> None:
        self._cluster = cluster
        self._health = health
        self._store = store
        self._peers = peers
        self._answer = answer
        self._everything = everything
        self._connections: dict[int, socket.socket] = {}
        self._asking = threading.Lock()
        self._handed: dict[int, dict[tuple[int, int], tuple[int, bytearray]]] = {}
        self._arriving: dict[int, threading.Thread] = {}
        self._is_closed = False
        health.on_question(_TOPIC, self._reply)

    def fetch(self, rank: int, key: Key) -> bytearray | None:
        """Return the bytes of a key of another rank; None if it doesn't have them. Raises PeerError if the rank can't
        be reached.
        """
        with self._asking:
            handed = self._handed_by(rank)
            if handed is not None:
                # The rank has ended, and updates nothing any more.
                number, data = handed.get(key[:2], (0, bytearray()))
                return data if number == key[2] and key[:2] in handed else None
            connection = self._connection(rank)
            try:
                self._move_all(connection.send, _KEY.pack(*key))
                [length] = _LENGTH.unpack(self._move_all(connection.recv_into, bytearray(8)))
                if length == _REFUSED:
                    return None
                data = bytearray(length)
                self._move_all(connection.recv_into, data)
                return data
            except OSError as error:
                connection.close()
                del self._connections[rank]
                handed = self._handed_by(rank)  # it has ended in between
                if handed is not None and key[:2] in handed and handed[key[:2]][0] == key[2]:
                    return handed[key[:2]][1]
                self._peers.raise_for(rank, str(error))

    def close(self) -> None:
        """Hand the bytes of this rank over to rank 0, if that goes on."""
        self._is_closed = True
        with contextlib.suppress(ClusterError, OSError):
            if self._cluster.rank != 0 and not self._health.is_over:
                self._hand_over()
        for connection in self._connections.values():
            connection.close()

    def _hand_over(self) -> None:
        question = {"rank": self._cluster.rank, "hands over": True}
        answers = self._health.ask(_TOPIC, question, [0], SHORT_SECONDS)
        if not answers.get(0):
            return
        self._peers.open(self._store)
        with self._peers.connect(0, _HANDING_OVER) as connection:
            connection.settimeout(CHECK_SECONDS)
            for key, data in self._everything():
                self._move_all(connection.send, _KEY.pack(*key) + _LENGTH.pack(data.nbytes))
                self._move_all(connection.send, data)
            self._move_all(connection.send, _KEY.pack(0, 0, 0) + _LENGTH.pack(_REFUSED))
            self._move_all(connection.recv_into, bytearray(1))  # rank 0 has it

    def _handed_by(self, rank: int) -> dict[tuple[int, int], tuple[int, bytearray]] | None:
        thread = self._arriving.get(rank)
        if thread is not None:
            thread.join()
        return self._handed.get(rank)

    def _connection(self, rank: int) -> socket.socket:
        if rank not in self._connections:
            self._peers.open(self._store)
            answers = self._health.ask(
                _TOPIC, {"rank": self._cluster.rank, "hands over": False}, [rank], SHORT_SECONDS
            )
            if not answers.get(rank):
                self._health.require_running()
                raise PeerError(
                    f"{self._cluster.name} asks {self._cluster.name_of(rank)} for what only that holds, and gets no "
                    "answer: it has ended, or is stopped."
                )
            connection = self._peers.connect(rank, _ASKING)
            connection.settimeout(CHECK_SECONDS)
            self._connections[rank] = connection
        return self._connections[rank]

    def _reply(self, question: dict[str, Any]) -> bool:
        # The thread of the channel must not wait, so that another one does.
        if self._is_closed:
            return False
        rank = int(question["rank"])
        target = self._take_over if question["hands over"] else self._serve
        thread = threading.Thread(target=target, args=(rank,), name="npu_device-bytes", daemon=True)
        if question["hands over"]:
            self._arriving[rank] = thread
        thread.start()
        return True

    def _serve(self, rank: int) -> None:
        """Answer the requests of a rank, until it closes the connection."""
        with (
            contextlib.suppress(ClusterError, OSError),
            self._accepted(rank, _ASKING) as connection,
        ):
            while True:
                key = _KEY.unpack(self._move_all(connection.recv_into, bytearray(_KEY.size)))
                data = self._answer(key)
                length = _REFUSED if data is None else data.nbytes
                self._move_all(connection.send, _LENGTH.pack(length))
                if data is not None:
                    self._move_all(connection.send, data)

    def _take_over(self, rank: int) -> None:
        """Receive the bytes of a rank that ends."""
        handed: dict[tuple[int, int], tuple[int, bytearray]] = {}
        with (
            contextlib.suppress(ClusterError, OSError),
            self._accepted(rank, _HANDING_OVER) as connection,
        ):
            while True:
                head = self._move_all(connection.recv_into, bytearray(_KEY.size + _LENGTH.size))
                first, second, number = _KEY.unpack_from(head)
                [length] = _LENGTH.unpack_from(head, _KEY.size)
                if length == _REFUSED:
                    break
                data = bytearray(length)
                self._move_all(connection.recv_into, data)
                handed[first, second] = number, data
            self._handed[rank] = handed
            self._move_all(connection.send, b"\1")

    def _accepted(self, rank: int, number: int) -> socket.socket:
        self._peers.open(self._store)
        connection = self._peers.accept(rank, number, lambda: self._health.is_over)
        if connection is None:
            raise PeerError("the job is over")
        connection.settimeout(CHECK_SECONDS)
        return connection

    def _move_all(self, move: Callable[[memoryview], int], data: Any) -> Any:
        """Send data, or fill it with what the other rank sends, however long that one takes; return it."""
        remaining = memoryview(data)
        while remaining.nbytes:
            try:
                count = move(remaining)
            except socket.timeout:
                self._health.require_running()
                continue
            if not count:
                raise ConnectionError("it has closed its connection")
            remaining = remaining[count:]
        return data
