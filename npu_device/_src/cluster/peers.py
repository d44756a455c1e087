"""Direct connections between ranks, each with one direction and a stream; both prove that they belong to the job."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import socket
import termios
import threading
import time
from queue import SimpleQueue
from typing import Callable, NoReturn

from npu_device._src import environment
from npu_device._src.cluster import frames, time_limits as limits
from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.handshake import AttemptFailedError, TimedConnection, reach, serve
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.ports import allow_many_descriptors, join_address, listen_on_free
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.threads import start_thread

_MOST_UNCLAIMED = 4096  # connections of all ranks that nobody has asked for


class Peers:
    """The connections of this rank to the others."""

    def __init__(
        self, cluster: Cluster, channel: ControlChannel, health: Health, secret: bytes
    ) -> None:
        self._cluster = cluster
        self._store = channel
        self._health = health
        self._secret = secret
        self._pid = os.getpid()
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._endpoints: dict[int, tuple[int, str]] = {}  # each rank's port and token
        self._arrival = threading.Condition()
        # Connections that nobody has accepted, each after its rank and stream.
        self._arrived: list[tuple[int, int, socket.socket]] = []
        # By stream, for connections that aren't accepted, the queues of the threads that serve them.
        self._served: dict[int, SimpleQueue[tuple[int, socket.socket]]] = {}
        # Replaced, never changed, so that another thread may iterate over it.
        self.owned_connections = frozenset[socket.socket]()
        # The others would not see the connections close while a forked child has copies.
        os.register_at_fork(after_in_child=self.close)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return ``host:port`` of each rank, when all have opened theirs; empty before ``open``."""
        if self._listener is None:
            return ()
        ports = [self._port_and_token(rank)[0] for rank in range(self._cluster.world_size)]
        return tuple(map(join_address, self._cluster.addresses, ports))

    def serve(self, stream_id: int, callback: Callable[[int, socket.socket], None]) -> None:
        """Let a function serve the connections of other ranks for a stream, one of each rank, in a thread, given the
        rank.
        """
        waiting = SimpleQueue[tuple[int, socket.socket]]()

        def serve_one_by_one() -> None:
            while True:
                rank, connection = waiting.get()
                with contextlib.suppress(Exception), connection:
                    callback(rank, connection)

        # From Python 3.12 on, no thread can be started once the script has ended.
        for _ in range(self._cluster.world_size - 1):
            start_thread("npu_device-serve", serve_one_by_one)
        self._served[stream_id] = waiting
        self.open()

    def open(self) -> None:
        """Let the other ranks connect, once. ClusterError if no port is free, or the hub has gone."""
        with self._lock:
            if self._listener is not None:
                return
            allow_many_descriptors()
            try:
                listener = listen_on_free(
                    environment.NPU_DEVICE_PORT_RANGE.get(), self._cluster.addresses
                )
            except OSError as error:
                raise ClusterError(
                    f"{self._cluster.name} finds no free port for messages of other ranks: {error.strerror}.\n"
                    "What to do: let NPU_DEVICE_PORT_RANGE have a port for each rank of a host, plus one."
                ) from error
            port = listener.getsockname()[1]
            # With its own token, a connection to this rank can't be replayed to another one.
            token = secrets.token_hex()
            self._store.set(f"peers/{self._cluster.rank}", f"{port} {token}")
            serving = listener, self._secret + token.encode(), self._admitted
            start_thread("npu_device-peers", serve, *serving)
            # Set last, as `addresses` takes the listener for the sign that the key is set.
            self._listener = listener

    def _port_and_token(self, rank: int) -> tuple[int, str]:
        while rank not in self._endpoints:
            self._health.require_running()
            with contextlib.suppress(TimeoutError):
                port, token = self._store.get(f"peers/{rank}", limits.ATTEMPT_SECONDS).split()
                self._endpoints[rank] = int(port), token
        return self._endpoints[rank]

    def connect(self, rank: int, stream_id: int, seconds: float | None = None) -> socket.socket:
        """Return a new connection, which doesn't block, and belongs to the caller; or raise PeerError."""
        until = time.monotonic() + (seconds or environment.HCCL_CONNECT_TIMEOUT.get())
        while True:
            remaining = until - time.monotonic()
            # Attempts are short, so that news of the other rank is seen between them.
            attempt = min(limits.ATTEMPT_SECONDS, max(limits.ATTEMPT_PAUSE_SECONDS, remaining))
            try:
                return self.try_to_connect(rank, stream_id, attempt)
            except AttemptFailedError as error:
                # If the job has failed, that is the error to raise, not that a rank can't be
                # reached.
                self._health.require_running()
                # A rank that has ended may still serve others, but not for long if it doesn't answer.
                if self._health.has_left(rank):
                    until = min(until, time.monotonic() + limits.CHECK_SECONDS)
                if time.monotonic() > until:
                    port, _ = self._port_and_token(rank)
                    address = join_address(self._cluster.addresses[rank], port)
                    self.raise_for(rank, f"no connection to {address}: {error}")
                time.sleep(limits.ATTEMPT_PAUSE_SECONDS)

    def try_to_connect(
        self, rank: int, stream_id: int, seconds: float = limits.ATTEMPT_SECONDS
    ) -> socket.socket:
        """Try once to make a connection, as ``connect`` does; AttemptFailedError if the rank doesn't answer."""
        port, token = self._port_and_token(rank)
        host = self._cluster.addresses[rank]
        said = {"rank": self._cluster.rank, "stream": stream_id}
        timed = reach(host, port, seconds, self._secret + token.encode(), **said)
        return self._owned_by_caller(timed.connection)

    def accept(
        self, rank: int, stream_id: int, gives_up: Callable[[], bool]
    ) -> socket.socket | None:
        """Return the next connection that a rank makes with ``connect`` for a stream; None if this rank gives up."""
        with self._arrival:
            while not gives_up():
                for arrival in list(self._arrived):
                    *origin, connection = arrival
                    if origin == [rank, stream_id]:
                        self._arrived.remove(arrival)
                        # A connection that is over was made for a group that has been destroyed.
                        if not _is_over(connection):
                            return connection
                        connection.close()
                self._health.require_running()
                self._arrival.wait(limits.CHECK_SECONDS)
            return None

    def deliver(self) -> None:
        """Wait until the hosts of the others have what this rank has sent: its own host may go away with it."""
        until = time.monotonic() + limits.DELIVER_SECONDS
        while (
            any(map(_undelivered, self.owned_connections))
            and not self._health.has_failed
            and time.monotonic() < until
        ):
            time.sleep(limits.DELIVER_TICK_SECONDS)

    def close(self) -> None:
        in_fork = os.getpid() != self._pid
        for connection in filter(None, [self._listener, *self.owned_connections]):
            # A fork leaves the connections alone, or the rank itself would lose them.
            if not in_fork:
                # The shutdown wakes the thread that reads from the connection.
                frames.shut_down(connection)
            connection.close()

    def _admitted(self, timed: TimedConnection, said: Message) -> None:
        rank = int(said["rank"])
        stream_id = int(said["stream"])
        if not 0 <= rank < self._cluster.world_size:
            raise ValueError("no such rank")
        if stream_id in self._served:
            self._served[stream_id].put((rank, self._owned_by_caller(timed.connection)))
            return
        with self._arrival:
            if len(self._arrived) >= _MOST_UNCLAIMED:
                raise ValueError("too many connections that nobody has asked for")
            self._arrived.append((rank, stream_id, self._owned_by_caller(timed.connection)))
            self._arrival.notify_all()

    def _owned_by_caller(self, connection: socket.socket) -> socket.socket:
        """Return a connection that doesn't block, and waits for a rank that is stopped; close it with the others."""
        connection.setblocking(False)
        # The hub detects a lost host, so that this connection needs no time limit of its own.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        with self._lock:
            still_open = [owned for owned in self.owned_connections if owned.fileno() >= 0]
            self.owned_connections = frozenset([connection, *still_open])
        return connection

    def raise_for(self, rank: int, reason: str) -> NoReturn:
        """Raise the error for a rank that can't be reached."""
        # If the rank has ended, the hub's news of that says more than a lost connection.
        self._health.wait_for_news()
        raise PeerError(
            f"{self._cluster.name} has lost its connection to {self._cluster.name_of(rank)}: {reason}.\n"
            "Likely cause: the network between the two, or a rank that has just ended.\n"
            f"What to do: look at the output of rank {rank}; let the two hosts reach each other's ports "
            "(NPU_DEVICE_PORT_RANGE)."
        )


def _is_over(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection and left nothing to be read: its group was destroyed."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


def _undelivered(connection: socket.socket) -> int:
    """Return how many bytes of a connection the other host hasn't acknowledged; 0 where the system doesn't say."""
    count = array.array("i", [0])
    # The listener may have been closed meanwhile.
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    return count[0]
