"""The network between the hosts over bare sockets: which ports can be reached, and how fast a link is."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable

from npu_device._src.cluster.errors import PeerError
from npu_device._src.collectives.job import Job

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_AT_ONCE = 16  # connections
_PINGS = 20
_WORD = b"word"
_STREAM_SECONDS = 0.5
_CHUNK = bytes(1 << 20)


@dataclass(frozen=True)
class LinkSpeed:
    """A link from one host to another.

    Attributes:
        round_trip: seconds for a few bytes and the answer.
        speed: bytes per second.
    """

    round_trip: float
    speed: float


def unreachable(job: Job, servers: tuple[str, ...]) -> dict[int, str]:
    """Connect to the server of one rank on each other host, the one with this rank's place among those of its host.

    Args:
        job: the job.
        servers: each rank's ``host:port``.

    Returns:
        Where and what happened, by rank, for those that can't be reached.
    """
    targets = list(_peers(job)) if servers else []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = pool.map(lambda rank: _connect(servers[rank]), targets)
        return {rank: f"{servers[rank]}: {outcome}" for rank, outcome in zip(targets, outcomes) if outcome}


def _peers(job: Job) -> Iterator[int]:
    hosts = job.cluster.hosts
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        if host != job.cluster.host:
            yield ranks[min(job.cluster.local_rank, len(ranks) - 1)]


def _connect(server: str) -> str:
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            return ""
    except socket.timeout:
        return "no answer: the connection is dropped on its way"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def measure(job: Job, leaders: list[int], timeout: float) -> LinkSpeed | str:
    """Measure the link from this host to the next one. All hosts do so at once, as in a ring.

    Args:
        job: the job.
        leaders: one rank of each host, at least two; each of them calls this.
        timeout: seconds to wait for the others.

    Returns:
        The link, or why it could not be measured.
    """
    round_trip = _with_next(job, leaders, timeout, _answer, _ping)
    speed = _with_next(job, leaders, timeout, _drain, _stream)
    if isinstance(round_trip, float) and isinstance(speed, float):
        return LinkSpeed(round_trip, speed)
    return round_trip if isinstance(round_trip, str) else str(speed)


def _with_next(
    job: Job,
    leaders: list[int],
    timeout: float,
    serve: Callable[[socket.socket], None],
    talk: Callable[[socket.socket], float],
) -> float | str:
    """Talk to the next host while the previous one is served. Begins when all leaders have come.

    Returns:
        The result of ``talk``, or why there is none.
    """
    cluster, peers = job.cluster, job.peers
    place = leaders.index(cluster.rank)
    following, previous = leaders[(place + 1) % len(leaders)], leaders[place - 1]
    name = f"check/{talk.__name__}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    peers.open(job.store)
    job.store.gather_from(name, None, leaders, timeout)
    until = time.monotonic() + _ANSWER_SECONDS
    with _serving(lambda: peers.accept(previous, number, lambda: time.monotonic() > until), serve):
        try:
            with peers.connect(following, number) as connection:
                connection.settimeout(_ANSWER_SECONDS)
                return talk(connection)
        except (OSError, PeerError) as error:
            return f"the connection to host {cluster.hosts[following]} failed: {error}"


@contextlib.contextmanager
def _serving(accept: Callable[[], socket.socket | None], serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Serve one connection while the block runs, if it comes in time."""

    def serve_one() -> None:
        with contextlib.suppress(OSError, PeerError):
            connection = accept()
            if connection is not None:
                with connection:
                    connection.settimeout(_ANSWER_SECONDS)
                    serve(connection)

    thread = threading.Thread(target=serve_one, name="npu_device-check", daemon=True)
    thread.start()
    yield
    thread.join()


def _ping(connection: socket.socket) -> float:
    """Return the seconds for a few bytes and the answer."""
    seconds = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        connection.sendall(_WORD)
        _receive_word(connection)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _answer(connection: socket.socket) -> None:
    for _ in range(_PINGS):
        _receive_word(connection)
        connection.sendall(_WORD)


def _stream(connection: socket.socket) -> float:
    """Return the bytes per second that arrive."""
    sent, began = 0, time.perf_counter()
    while time.perf_counter() - began < _STREAM_SECONDS:
        connection.sendall(_CHUNK)
        sent += len(_CHUNK)
    connection.shutdown(socket.SHUT_WR)
    _receive_word(connection)  # all has arrived
    return sent / (time.perf_counter() - began)


def _drain(connection: socket.socket) -> None:
    space, until = bytearray(len(_CHUNK)), time.monotonic() + _ANSWER_SECONDS
    while connection.recv_into(space):
        if time.monotonic() > until:
            return
    connection.sendall(_WORD)


def _receive_word(connection: socket.socket) -> None:
    missing = len(_WORD)
    while missing:
        data = connection.recv(missing)
        if not data:
            raise OSError("the other side closed it")
        missing -= len(data)
