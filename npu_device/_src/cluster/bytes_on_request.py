"""Bytes that a rank gives another one, or gets from it, when that asks, without its script taking part: in a thread of
their own.

Each pair of ranks has one connection in each direction, made at the first request. Bytes have a keeper, a rank that all
who may ask know: a rank whose script ends hands its bytes over to it. The keeper goes on answering after the end of its
script, until the others have ended; so does a rank that ends after its keeper.
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
from npu_device._src.cluster.frames import Message
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

    def all_bytes(self) -> Iterator[tuple[int, Key, memoryview]]:
        """Yield the keeper, the key and the content of all bytes of this rank, which it hands over when it ends."""


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
        self._handed: Handed = {}
        self._ended_ranks: set[int] = set()  # they have handed their bytes over
        self._is_ending = False
        self._has_ended = threading.Event()
        self._answers_after_end = False  # after its end, until the others have ended
        health.on_question(_TOPIC, self._reply)

    def fetch(self, rank: int, keeper: int, key: Key) -> bytearray | memoryview | None:
        """Return the bytes of a key of another rank; None if it doesn't have them. Raises PeerError if the rank can't
        be reached, and hasn't handed its bytes over to the keeper.
        """
        return self._exchange(rank, keeper, key, None)

    def give(self, rank: int, keeper: int, key: Key, content: memoryview) -> bool:
        """Give another rank, or its keeper, the bytes of a key; return whether it can use them. Raises PeerError as
        ``fetch`` does.
        """
        return self._exchange(rank, keeper, key, content) is not None

    def _exchange(
        self, rank: int, keeper: int, key: Key, content: memoryview | None
    ) -> bytearray | memoryview | None:
        """Return what a rank answers, or its keeper if it has ended."""
        with self._asking:
            try:
                return self._asked(rank, key, content)
            except (OSError, PeerError) as error:
                # The rank may have ended, and handed its bytes over.
                with contextlib.suppress(OSError, PeerError):
                    if keeper != self._cluster.rank:
                        return self._asked(keeper, key, content)
                    if rank in self._ended_ranks:
                        return self._handed_bytes(key, content)
                # If the rank has failed, the hub's news of that says more.
                self._health.wait_for_news()
                raise PeerError(
                    f"{self._cluster.name} asks {self._cluster.name_of(rank)} for what only that holds, and gets no "
                    f"answer: it has ended, or is stopped ({error}).\nWhat to do: look at the output of rank {rank}; "
                    "let its script end as usual, not by os._exit, after which nobody has its bytes."
                ) from error

    def _asked(self, rank: int, key: Key, content: memoryview | None) -> bytearray | None:
        """Return what a rank answers; the connection to one that doesn't is closed."""
        try:
            connection = self._connection(rank)
            self._send(connection, key, content)
            return self._received(connection)
        except (OSError, PeerError):
            lost = self._connections.pop(rank, None)
            if lost is not None:
                lost.close()
            raise

    def _handed_bytes(self, key: Key, content: bytearray | memoryview | None) -> memoryview | None:
        """Return the bytes of a key that another rank has handed over; given others, put them in their place."""
        number, content_here = self._handed.get(key[:2], (-1, bytearray()))
        if number != key[2]:
            return None
        if content is None:
            return memoryview(content_here)
        self._handed[key[:2]] = number, bytearray(content)
        return memoryview(b"")

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

    def close(self) -> bool:
        """Hand the bytes of this rank over to their keepers; return whether this rank has to go on answering until the
        others have ended, because it is a keeper or its keeper's script has ended, too.
        """
        self._is_ending = True
        handed_over = {}
        with contextlib.suppress(ClusterError, OSError), contextlib.ExitStack() as connections:
            for keeper, key, content in self._holder.all_bytes():
                if keeper not in handed_over:
                    handed_over[keeper] = self._hand_over_to(keeper, connections)
                connection = handed_over[keeper]
                if connection is not None:
                    # One after the other: this rank may have no memory for copies of all.
                    self._send(connection, key, content)
            for connection in filter(None, handed_over.values()):
                self._send(connection, (0, 0, 0), None)
                # The keeper confirms that it has the bytes.
                self._move_all(connection.recv_into, bytearray(1))
        keeps = None in handed_over.values() or bool(self._ended_ranks)
        self._answers_after_end = keeps and not self._health.has_failed
        # Until here this rank answers: one that gets no answer finds the bytes on the keeper.
        self._has_ended.set()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        return self._answers_after_end

    def _hand_over_to(self, keeper: int, connections: contextlib.ExitStack) -> socket.socket | None:
        """Return a connection to a rank which takes bytes over; None if this rank keeps them until the others end."""
        if keeper == self._cluster.rank:
            return None
        if self._health.has_left(keeper):
            return None
        question = {"rank": self._cluster.rank, "hands over": True}
        if not self._health.ask(_TOPIC, question, [keeper], SHORT_SECONDS).get(keeper):
            return None
        self._peers.open(self._store)
        connection = connections.enter_context(self._peers.connect(keeper, _HANDING_OVER))
        connection.settimeout(CHECK_SECONDS)
        return connection

    def _connection(self, rank: int) -> socket.socket:
        if rank not in self._connections:
            self._peers.open(self._store)
            question = {"rank": self._cluster.rank, "hands over": False}
            answers = self._health.ask(_TOPIC, question, [rank], SHORT_SECONDS, even_ended=True)
            if not answers.get(rank):
                raise ConnectionError("it doesn't answer")
            connection = self._peers.connect(rank, _ASKING)
            connection.settimeout(CHECK_SECONDS)
            self._connections[rank] = connection
        return self._connections[rank]

    def _reply(self, question: Message) -> bool:
        rank = int(question["rank"])
        hands_over = question["hands over"]
        if hands_over and self._is_ending:
            # The rank waits for the others itself, as this one does: nothing has to be sent.
            return False
        if self._has_ended.is_set() and not self._answers_after_end:
            # The keeper has the bytes.
            return False
        # The thread of the channel must not wait, so that another one does.
        target = self._serve
        if hands_over:
            target = self._take_over
        threading.Thread(target=target, args=(rank,), name="npu_device-bytes", daemon=True).start()
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
                answer = self._answer(rank, key, incoming)
                if answer is None:
                    self._move_all(connection.send, _LENGTH.pack(_REFUSED))
                else:
                    self._move_all(connection.send, _LENGTH.pack(answer.nbytes))
                    self._move_all(connection.send, answer)

    def _answer(self, rank: int, key: Key, incoming: bytearray | None) -> memoryview | None:
        """Return the bytes of a key, here or handed over; given others, take them."""
        if incoming is None:
            answer = self._holder.answer(key)
            if answer is None:
                answer = self._handed_bytes(key, None)
            return answer
        if self._is_ending:
            # What would be taken amid a hand-over might miss it.
            self._has_ended.wait()
            if not self._answers_after_end:
                raise ConnectionError("the keeper has the bytes")
        if self._holder.take(rank, key, incoming):
            return memoryview(b"")
        return self._handed_bytes(key, incoming)

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
            self._handed.update(handed)
            self._ended_ranks.add(rank)
            self._move_all(connection.send, b"\1")

    def _accepted(self, rank: int, number: int) -> socket.socket:
        self._peers.open(self._store)
        connection = self._peers.accept(rank, number, lambda: self._health.has_failed)
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
