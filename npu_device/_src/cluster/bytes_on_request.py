"""Bytes that a rank gives another one, or gets from it, when that asks, without its script taking part: in a thread of
their own.

Each pair of ranks has one connection in each direction, made at the first request. A rank that ends while others may
still ask hands its bytes over to rank 0.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, Callable, Optional, Protocol, TypeVar

from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.peers import Peers
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.time_limits import CHECK_SECONDS, SHORT_SECONDS

_Reply = TypeVar("_Reply")
Key = tuple[int, int, int]
"""Which bytes a rank asks for; what the numbers mean is up to those who ask and answer."""
Handed = dict[tuple[int, int], tuple[int, bytearray]]
"""What a rank has handed over: by the first two numbers of each key, the third one and the bytes."""

_KEY = struct.Struct("<3q")
_LENGTH = struct.Struct("<q")
_REFUSED = -1
_TOPIC = "bytes"
# The numbers by which ``Peers`` tells the two kinds of connections apart.
_ASKING = 0x6E70_7501
_HANDING_OVER = 0x6E70_7502


class Holder(Protocol):
    """Who has the bytes of this rank; called in threads of the exchange."""

    def answer(self, key: Key) -> Optional[memoryview]:
        """Return the bytes of a key, or None if this rank doesn't have them as they were asked for."""

    def take(self, rank: int, key: Key, content: bytearray) -> bool:
        """Get bytes from a rank, and return whether this one can use them."""

    def all_bytes(self) -> Iterator[tuple[Key, memoryview]]:
        """Yield all keys and bytes of this rank, to be handed over when it ends."""


class BytesOnRequest:
    """This rank's part in the exchange."""

    def __init__(
        self,
        cluster: Cluster,
        health: Health,
        store: ControlChannel,
        peers: Peers,
        holder: Holder,
    ) -> None:
        self._cluster = cluster
        self._health = health
        self._store = store
        self._peers = peers
        self._holder = holder
        self._connections: dict[int, socket.socket] = {}
        self._asking = threading.Lock()
        self._handed: dict[int, Handed] = {}
        self._arriving: dict[int, threading.Thread] = {}
        self._is_ending = False
        self._is_closed = False
        health.on_question(_TOPIC, self._reply)

    def fetch(self, rank: int, key: Key) -> bytearray | None:
        """Return the bytes of a key of another rank; None if it doesn't have them. Raises PeerError if the rank can't
        be reached.
        """

        def ask(connection: socket.socket) -> bytearray | None:
            self._send(connection, key, None)
            return self._received(connection)

        def look_up(handed: Handed) -> bytearray | None:
            number, content = handed.get(key[:2], (-1, bytearray()))
            if number != key[2]:
                return None
            return content

        return self._exchange(rank, ask, look_up)

    def give(self, rank: int, key: Key, content: memoryview) -> bool:
        """Give another rank the bytes of a key; return whether it can use them. Raises PeerError if the rank can't be
        reached.
        """

        def send(connection: socket.socket) -> bool:
            self._send(connection, key, content)
            return self._received(connection) is not None

        def replace(handed: Handed) -> bool:
            handed[key[:2]] = key[2], bytearray(content)
            return True

        return self._exchange(rank, send, replace)

    def _exchange(
        self,
        rank: int,
        act: Callable[[socket.socket], _Reply],
        after_end: Callable[[Handed], _Reply],
    ) -> _Reply:
        """Call a function with the connection to a rank, or another one with what that has handed over."""
        with self._asking:
            handed = self._handed_by(rank)
            if handed is not None:
                return after_end(handed)
            try:
                return act(self._connection(rank))
            except (OSError, PeerError) as error:
                connection = self._connections.pop(rank, None)
                if connection is not None:
                    connection.close()
                # The rank may have ended since the first look, and handed its bytes over.
                handed = self._handed_by(rank)
                if handed is not None:
                    return after_end(handed)
                # If the rank has failed, the hub's news of that says more.
                self._health.wait_for_news()
                raise PeerError(
                    f"{self._cluster.name} asks {self._cluster.name_of(rank)} for what only that holds, and gets no "
                    f"answer: it has ended, or is stopped ({error}).\nWhat to do: read and save on rank "
                    "0 alone; or, if every rank does, call npu.distribute.barrier() on all ranks after that."
                ) from error

    def _send(self, connection: socket.socket, key: Key, content: memoryview | None) -> None:
        length = _REFUSED
        if content is not None:
            length = content.nbytes
        head = _KEY.pack(*key)
        head += _LENGTH.pack(length)
        self._move_all(connection.send, head)
        if content is not None:
            self._move_all(connection.send, content)

    def _received(self, connection: socket.socket) -> bytearray | None:
        head = bytearray(_LENGTH.size)
        self._move_all(connection.recv_into, head)
        [length] = _LENGTH.unpack(head)
        if length == _REFUSED:
            return None
        received: bytearray = self._move_all(connection.recv_into, bytearray(length))
        return received

    def close(self) -> None:
        """Hand the bytes of this rank over to rank 0, if that goes on."""
        self._is_ending = True
        with contextlib.suppress(ClusterError, OSError):
            if self._cluster.rank != 0 and not self._health.is_over:
                self._hand_over()
        # Until here this rank answers: one that gets no answer finds the bytes on rank 0.
        self._is_closed = True
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
            # One after the other: this rank may have no memory for copies of all.
            for key, content in self._holder.all_bytes():
                self._send(connection, key, content)
            self._send(connection, (0, 0, 0), None)
            # Rank 0 confirms that it has the bytes.
            self._move_all(connection.recv_into, bytearray(1))

    def _handed_by(self, rank: int) -> Handed | None:
        thread = self._arriving.get(rank)
        if thread is not None:
            thread.join()
        return self._handed.get(rank)

    def _connection(self, rank: int) -> socket.socket:
        if rank not in self._connections:
            self._peers.open(self._store)
            question = {"rank": self._cluster.rank, "hands over": False}
            answers = self._health.ask(_TOPIC, question, [rank], SHORT_SECONDS)
            if not answers.get(rank):
                raise ConnectionError("it doesn't answer")
            connection = self._peers.connect(rank, _ASKING)
            connection.settimeout(CHECK_SECONDS)
            self._connections[rank] = connection
        return self._connections[rank]

    def _reply(self, question: dict[str, Any]) -> bool:
        # The thread of the channel must not wait, so that another one does.
        if self._is_closed:
            # Rank 0 has the bytes.
            return False
        rank = int(question["rank"])
        hands_over = question["hands over"]
        target = (self._serve, self._take_over)[hands_over]
        thread = threading.Thread(target=target, args=(rank,), name="npu_device-bytes", daemon=True)
        thread.start()
        # A thread can be joined only after its start. A look before this line asks the rank, which still answers.
        if hands_over:
            self._arriving[rank] = thread
        return True

    def _serve(self, rank: int) -> None:
        """Answer the requests of a rank, until it closes the connection."""
        with (
            contextlib.suppress(ClusterError, OSError),
            self._accepted(rank, _ASKING) as connection,
        ):
            while True:
                key = _KEY.unpack(self._move_all(connection.recv_into, bytearray(_KEY.size)))
                incoming = self._received(connection)
                if incoming is None:
                    answer = self._holder.answer(key)
                else:
                    answer = self._taken(rank, key, incoming)
                if answer is None:
                    self._move_all(connection.send, _LENGTH.pack(_REFUSED))
                else:
                    self._move_all(connection.send, _LENGTH.pack(answer.nbytes))
                    self._move_all(connection.send, answer)

    def _taken(self, rank: int, key: Key, content: bytearray) -> memoryview | None:
        # What would be taken now might miss the hand-over.
        if not self._is_ending and self._holder.take(rank, key, content):
            return memoryview(b"")
        return None

    def _take_over(self, rank: int) -> None:
        """Receive the bytes of a rank that ends."""
        handed: Handed = {}
        with (
            contextlib.suppress(ClusterError, OSError),
            self._accepted(rank, _HANDING_OVER) as connection,
        ):
            while True:
                head = self._move_all(connection.recv_into, bytearray(_KEY.size + _LENGTH.size))
                optimizer, slot, number = _KEY.unpack_from(head)
                [length] = _LENGTH.unpack_from(head, _KEY.size)
                if length == _REFUSED:
                    break
                content = self._move_all(connection.recv_into, bytearray(length))
                handed[optimizer, slot] = number, content
            self._handed[rank] = handed
            self._move_all(connection.send, b"\1")

    def _accepted(self, rank: int, number: int) -> socket.socket:
        self._peers.open(self._store)
        connection = self._peers.accept(rank, number, lambda: self._health.is_over)
        if connection is None:
            raise PeerError("the job is over")
        connection.settimeout(CHECK_SECONDS)
        return connection

    def _move_all(self, move: Callable[[memoryview], int], content: Any) -> Any:
        """Send bytes, or fill them with what the other rank sends, however long that one takes; return them."""
        remaining = memoryview(content)
        while remaining.nbytes:
            try:
                count = move(remaining)
            except socket.timeout:
                self._health.require_running()
                continue
            if not count:
                raise ConnectionError("it has closed its connection")
            remaining = remaining[count:]
        return content
