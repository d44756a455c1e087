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
from typing import Any, Callable

from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.peers import Peers
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.time_limits import CHECK_SECONDS

Key = tuple[int, int, int]
"""Which bytes a rank asks for; what the numbers mean is up to those who ask and answer."""

_REQUEST = struct.Struct("<?3q")  # whether bytes are handed over, and their key
_LENGTH = struct.Struct("<q")
_NO_BYTES = -1  # a length that stands for None
_ACCEPTED = memoryview(b"")
_NO_MORE = (0, 0, 0)  # stands for a key at the end of a hand-over, which has no bytes
_STREAM_ID = 0x6E70_7501  # marks these connections


class BytesOnRequest:
    """This rank's part in the exchange.

    Args:
        holder: has the bytes of this rank, and these methods, which are called in threads of the exchange.
            ``answer(key)`` returns the bytes of a key, or None if this rank doesn't have them as they were asked for.
            ``accept(rank, key, content)`` gets bytes from a rank, and returns whether this one can use them.
            ``all_bytes()`` yields the keeper, the key and the content of all bytes of this rank, which it hands over
            when it ends.
    """

    def __init__(self, cluster: Cluster, health: Health, peers: Peers, holder: Any) -> None:
        self._cluster = cluster
        self._health = health
        self._peers = peers
        self._holder = holder
        self._connections: dict[int, socket.socket] = {}
        self._asking = threading.Lock()
        # What other ranks have handed over: by the first two numbers of a key, the third number and the bytes.
        self._handed: dict[tuple[int, int], tuple[int, bytearray]] = {}
        self._ended_ranks = set[int]()  # they have handed their bytes over
        self._silent_ranks = set[int]()  # they have left and don't answer
        self._is_ending = False
        self._has_ended = threading.Event()
        self._answers_after_end = False  # after its end, until the others have ended
        peers.serve(_STREAM_ID, self._serve)

    def exchange(
        self, rank: int, keeper: int, key: Key, content: memoryview | None = None
    ) -> bytearray | memoryview | None:
        """Return the bytes of a key of another rank, None if it doesn't have them. Given bytes, put them in their
        place, and return None if the rank can't use them. PeerError if the rank can't be reached, and hasn't handed its
        bytes over to the keeper.
        """
        with self._asking:
            try:
                return self._ask(rank, key, content)
            except (OSError, PeerError) as error:
                # The rank may have ended, and handed its bytes over.
                with contextlib.suppress(OSError, PeerError):
                    if keeper != self._cluster.rank:
                        return self._ask(keeper, key, content)
                    if rank in self._ended_ranks:
                        return self._handed_bytes(key, content)
                # If the rank has failed, the hub's news of that says more.
                self._health.wait_for_news()
                raise PeerError(
                    f"{self._cluster.name} asks {self._cluster.name_of(rank)} for what only that holds, and gets no "
                    f"answer: it has ended, or is stopped ({error}).\nWhat to do: look at the output of rank {rank}; "
                    "let its script end as usual, not by os._exit, after which nobody has its bytes."
                ) from error

    def _ask(
        self, rank: int, key: Key, content: memoryview | None, hands_over: bool = False
    ) -> bytearray | None:
        """Return what a rank answers; the connection to one that doesn't is closed."""
        # The host of a rank that has left may be gone, which an attempt to reach it would find out only after seconds.
        if rank in self._silent_ranks:
            raise ConnectionError("it has left the job")
        try:
            if rank not in self._connections:
                connection = self._peers.try_to_connect(rank, _STREAM_ID)
                connection.settimeout(CHECK_SECONDS)
                self._connections[rank] = connection
            connection = self._connections[rank]
            self._move_all(connection.send, _REQUEST.pack(hands_over, *key))
            self._send(connection, content)
            return self._received(connection)
        except (OSError, PeerError):
            lost = self._connections.pop(rank, None)
            if lost is not None:
                lost.close()
            if self._health.has_left(rank):
                self._silent_ranks.add(rank)
            raise

    def _handed_bytes(self, key: Key, content: bytearray | memoryview | None) -> memoryview | None:
        """Return the bytes of a key that another rank has handed over; given others, put them in their place."""
        version, content_here = self._handed.get(key[:2], (-1, bytearray()))
        if version != key[2]:
            return None
        if content is None:
            return memoryview(content_here)
        self._handed[key[:2]] = version, bytearray(content)
        return _ACCEPTED

    def _send(self, connection: socket.socket, content: memoryview | None) -> None:
        if content is None:
            self._move_all(connection.send, _LENGTH.pack(_NO_BYTES))
        else:
            self._move_all(connection.send, _LENGTH.pack(content.nbytes))
            self._move_all(connection.send, content)

    def _received(self, connection: socket.socket) -> bytearray | None:
        head = self._move_all(connection.recv_into, bytearray(_LENGTH.size))
        [length] = _LENGTH.unpack(head)
        if length == _NO_BYTES:
            return None
        received: bytearray = self._move_all(connection.recv_into, bytearray(length))
        return received

    def close(self) -> bool:
        """Hand the bytes of this rank over to their keepers; return whether this rank has to go on answering until the
        others have ended, because it is a keeper or its keeper's script has ended, too.
        """
        self._is_ending = True
        accepts_by_keeper: dict[int, bool] = {}
        with self._asking:
            for keeper, key, content in self._holder.all_bytes():
                # One after the other: this rank may have no memory for copies of all.
                accepts = accepts_by_keeper.get(keeper, keeper != self._cluster.rank)
                accepts_by_keeper[keeper] = accepts and self._hand_over(keeper, key, content)
            for keeper, accepts in list(accepts_by_keeper.items()):
                accepts_by_keeper[keeper] = accepts and self._hand_over(keeper, _NO_MORE, None)
        keeps = not all(accepts_by_keeper.values()) or bool(self._ended_ranks)
        self._answers_after_end = keeps and not self._health.has_failed
        # Until here this rank answers: one that gets no answer finds the bytes on the keeper.
        self._has_ended.set()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        return self._answers_after_end

    def _hand_over(self, keeper: int, key: Key, content: memoryview | None) -> bool:
        """Return whether a keeper takes bytes over; if not, this rank keeps them until the others end."""
        with contextlib.suppress(ClusterError, OSError):
            return self._ask(keeper, key, content, hands_over=True) is not None
        return False

    def _serve(self, rank: int, connection: socket.socket) -> None:
        """Answer the requests of a rank until its connection is closed, which raises an error."""
        connection.settimeout(CHECK_SECONDS)
        while True:
            request = self._move_all(connection.recv_into, bytearray(_REQUEST.size))
            hands_over, *key_numbers = _REQUEST.unpack(request)
            key = tuple(key_numbers)
            incoming = self._received(connection)
            if hands_over:
                answer = self._keep_handed(rank, key, incoming)
            else:
                answer = self._answer(rank, key, incoming)
            self._send(connection, answer)

    def _answer(self, rank: int, key: Key, incoming: bytearray | None) -> memoryview | None:
        """Return the bytes of a key, here or handed over; given others, take them."""
        # What would be taken amid a hand-over might miss it.
        if incoming is not None and self._is_ending:
            self._has_ended.wait()
        if self._has_ended.is_set() and not self._answers_after_end:
            raise ConnectionError("the keeper has the bytes")
        if incoming is None:
            answer = self._holder.answer(key)
            if answer is None:
                answer = self._handed_bytes(key, None)
            return answer
        if self._holder.accept(rank, key, incoming):
            return _ACCEPTED
        return self._handed_bytes(key, incoming)

    def _keep_handed(self, rank: int, key: Key, incoming: bytearray | None) -> memoryview | None:
        """Keep bytes of a rank that ends, or note that these were all."""
        # Two ranks that end both wait for the others, and nothing has to be sent.
        if self._is_ending:
            return None
        if incoming is None:
            self._ended_ranks.add(rank)
        else:
            self._handed[key[:2]] = key[2], incoming
        return _ACCEPTED

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
