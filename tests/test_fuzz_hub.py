"""The hub, the ranks' side of it, their own connections and the TCP engine's, with any data: an error or nothing, never
a hang, the end of the job, or memory beyond a limit.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import fuzzing
import numpy as np
import pytest
from fuzzing import SECRET, SOON, changed, ends, frame, given, send, st, streams

from npu_device._src import wording
from npu_device._src.cluster import frames, handshake
from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.health import Health
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.peers import Peers
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.rendezvous import meet
from npu_device._src.cluster.roster import Hello
from npu_device._src.collectives.engines.host import sockets

pytestmark = pytest.mark.xdist_group("waiting")

_numbers = itertools.count()


@pytest.fixture()
def hub() -> Iterator[HubProcess]:
    running = fuzzing.hub_of_two(stays=True)
    yield running
    assert running.process.poll() is None, "the hub has ended"
    assert fuzzing.memory_of(running.process.pid) < 600 << 20
    running.end()


def _connect(hub: HubProcess) -> socket.socket:
    return socket.create_connection((hub.host, hub.port), SOON)


def _proved(hub: HubProcess) -> handshake.TimedConnection:
    return handshake.reach(hub.host, hub.port, SOON, SECRET)


@contextlib.contextmanager
def _job(hub: HubProcess) -> Iterator[tuple[ControlChannel, list[dict[str, Any]], socket.socket]]:
    """Let two ranks meet; yield the first one's channel and its news, and the second one's socket."""
    channels = [channel for _, channel in fuzzing.both_met(hub)]
    news: list[dict[str, Any]] = []
    channels[0].listen(news.append, lambda reason: news.append({"push": "lost", "text": reason}))
    try:
        yield channels[0], news, channels[1]._socket
    finally:
        for channel in channels:
            channel.close()


def _require_work(channel: ControlChannel) -> None:
    """Check that the hub still serves a rank, soon."""
    began, key = time.monotonic(), f"key {next(_numbers)}"
    channel.set(key, "value")
    assert channel.get(key, 1) == "value"
    channel.delete(key)
    assert time.monotonic() - began < SOON


_HELLO: dict[str, Any] = {
    "hello": asdict(
        Hello("fuzz", "rank table", 2, 0, 0, "here", None, False, 20.0, {"v": "1"}, {}, "m", 7)
    )
}
_TABLE = [
    {"do": "set", "id": 1, "key": "a", "value": "b"},
    {"do": "get", "id": 2, "key": "c", "seconds": 0.01},
    {"do": "delete", "id": 3, "key": "a"},
    {
        "do": "gather",
        "id": 4,
        "name": "n",
        "value": {"x": 1},
        "ranks": "0-1",
        "seconds": 0.01,
    },
    {
        "do": "gather",
        "id": 5,
        "name": "m",
        "value": 1,
        "ranks": None,
        "seconds": 0.01,
    },
    {"do": "ask", "id": 6, "kind": "alive", "body": None, "ranks": "0-1", "seconds": 0.01},
    {"do": "reply", "question": '["alive",null,"0-1"]', "value": 1},
]
_LAST = [
    {"do": "left", "issued": {"g 0-1": 1}},
    {"do": "stopped"},
    {"do": "failed", "event": {"rank": 1, "error": "e", "traceback": "t"}},
]


_WITHOUT_RANK = {
    "hello": {name: value for name, value in _HELLO["hello"].items() if name != "rank"}
}


@given(streams(fuzzing.GREETING, {"proof": "0"}, _HELLO, {"stopping": "x"}, *_TABLE), st.booleans())
@fuzzing.hypothesis.example([frame(_WITHOUT_RANK)], True)
def test_a_process_that_is_no_rank(
    hub: HubProcess, pieces: list[bytes], knows_the_secret: bool
) -> None:
    with _proved(hub).connection if knows_the_secret else _connect(hub) as client:
        send(client, pieces)
        assert len(ends(client)) < 1000 or knows_the_secret
    with _job(hub) as (channel, _, _):  # as if it had never come
        _require_work(channel)


@given(streams(*_TABLE, *_TABLE, *_LAST))
def test_a_rank_that_sends_anything(hub: HubProcess, pieces: list[bytes]) -> None:
    with _job(hub) as (channel, news, other):
        send(other, pieces)
        ends(other)
        _require_work(channel)
        deadline = time.monotonic() + SOON
        while not any(message["push"] in ("gone", "left", "failed") for message in news):
            assert time.monotonic() < deadline, news
            time.sleep(0.002)


def test_ranks_that_send_what_no_rank_sends(hub: HubProcess) -> None:
    for sent in (
        {"do": "ask", "id": 1, "kind": "k", "body": 1, "ranks": "0-99999999", "seconds": 1},
        {"do": "set", "id": 1, "key": "k", "value": "x" * (1 << 24)},
        b'{"do":"set","id":' + b"9" * 1_000_000 + b"}",
        b'{"do":' + b"[" * 1_000_000,
    ):
        with _job(hub) as (channel, news, other):
            sending = threading.Thread(target=send, args=(other, [frame(sent)]))
            sending.start()
            assert b"can't read what rank 1 has sent" in ends(other, 20.0, announced=False)
            sending.join()
            _require_work(channel)
            assert not any(message["push"] == "lost" for message in news)


def test_the_requests_of_an_earlier_job_end_with_it(hub: HubProcess) -> None:
    with _job(hub) as (channel, _, other):
        send(other, [frame({"do": "get", "id": 1, "key": "never", "seconds": 0.2})])
        _require_work(channel)
    with _job(hub) as (channel, _, other):
        time.sleep(0.3)
        other.settimeout(0)
        with pytest.raises(BlockingIOError):  # no answer
            other.recv(100)
        _require_work(channel)
    _proved(hub).connection.close()


def test_a_refused_process_that_goes_on_sending(hub: HubProcess) -> None:
    line = _proved(hub)
    line.send({"hello": {**_HELLO["hello"], "job_id": "another"}})
    began, chunk = time.monotonic(), bytes(1 << 20)
    with line.connection, contextlib.suppress(OSError):
        while time.monotonic() < began + 1:
            line.connection.sendall(chunk)
    _proved(hub).connection.close()
    assert fuzzing.memory_of(hub.process.pid) < 60 << 20


def test_a_world_that_nobody_has(hub: HubProcess) -> None:
    line = _proved(hub)
    line.send({"hello": {**_HELLO["hello"], "world_size": wording.MOST_RANKS, "seconds": 0.1}})
    with line.connection:
        while "refused" not in (answer := line.receive(SOON, silent="silent", closed="closed")):
            pass
    assert "rank 100: missing\n  65435 more ranks: missing" in answer["refused"]
    with _job(hub) as (channel, _, _):
        _require_work(channel)


# The ranks' side: another program, or a broken hub, answers.

_ROSTER = {"hosts": ["a", "b"], "addresses": ["1", "2"], "loopback": True}
_ANSWERS: list[dict[str, Any]] = [
    *({"nonce": "x"}, {"proof": "0"}, {"wait": 0.1}, {"waits_for": "rank 1"}),
    *({"refused": "text"}, {"busy": "text"}, {"rank": 0}, {"roster": _ROSTER}),
]


@given(streams(*_ANSWERS), st.booleans())
def test_a_rank_and_any_answers_at_the_hubs_address(pieces: list[bytes], proves: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON)

        def answer() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    if proves:
                        handshake.admit(connection, SECRET)
                    send(connection, pieces)
                    ends(connection, SOON)

        thread = threading.Thread(target=answer)
        thread.start()
        place = replace(fuzzing.PLACE, chief_port=listener.getsockname()[1], connect_timeout=0.0)
        began = time.monotonic()
        with contextlib.suppress(ClusterError):
            meet(place)[1].close()
        assert time.monotonic() - began < 2 * SOON
        thread.join(SOON)
        assert not thread.is_alive()


@given(
    streams(
        {"id": 1, "value": "v"},
        {"id": 1, "error": "late", "text": "t"},
        {"push": "left", "left": [[{}, "1"]]},
        {"push": "end", "text": "t"},
        {"push": "question", "question": '["k",null,"0-1"]'},
    )
)
def test_a_rank_and_any_messages_of_the_hub(pieces: list[bytes]) -> None:
    hub_side, rank_side = socket.socketpair()
    with hub_side, rank_side:
        channel, lost = ControlChannel(rank_side, frames.Reader(frames.LIMIT)), threading.Event()
        channel.listen(lambda push: None, lambda reason: lost.set())

        def ask() -> None:
            with contextlib.suppress(ClusterError, TimeoutError, KeyError):
                channel.get("key", 0.1)

        asking = threading.Thread(target=ask)
        asking.start()
        send(hub_side, pieces)
        with contextlib.suppress(OSError):
            hub_side.shutdown(socket.SHUT_WR)
        asking.join(SOON)
        assert not asking.is_alive()
        assert lost.wait(SOON)
        channel.close()


# The ranks' own connections


@pytest.fixture()
def rank() -> Iterator[tuple[Peers, int, bytes]]:
    """Rank 0 of two: its connections, its port, and what a rank must know to connect."""
    hub = fuzzing.hub_of_two(stays=False)
    met = fuzzing.both_met(hub)
    cluster, channel = met[0]
    channel.listen(lambda push: None, lambda reason: None)
    peers = Peers(cluster, channel, Health(cluster, channel), SECRET)
    peers.open()
    port, token = channel.get("peers/0", 1).split()
    yield peers, int(port), SECRET + token.encode()
    peers.close()
    for _, each in met:
        each.close()
    hub.end()


def _reach(port: int, secret: bytes, **said: Any) -> socket.socket:
    return handshake.reach("127.0.0.1", port, SOON, secret, **said).connection


def _require_connections(peers: Peers, port: int, secret: bytes) -> None:
    """Check that another rank can still connect."""
    began = time.monotonic()
    with _reach(port, secret, rank=1, stream=7) as theirs:
        connection = peers.accept(1, 7, lambda: time.monotonic() > began + SOON)
        assert connection is not None
        connection.close()
        assert theirs.recv(1) == b""


_PLACE = {"rank": 1, "stream": 2}


@given(streams({**fuzzing.GREETING, **_PLACE}, {"proof": "0"}), st.none() | changed(_PLACE))
def test_anything_at_a_ranks_port(
    rank: tuple[Peers, int, bytes], pieces: list[bytes], said: dict[str, Any] | None
) -> None:
    """From a stranger, and from a process with the secret."""
    if said is None:
        with socket.create_connection(("127.0.0.1", rank[1]), SOON) as stranger:
            send(stranger, pieces)
            assert len(ends(stranger)) < 1000
    else:
        with contextlib.suppress(handshake.AttemptFailedError):
            _reach(*rank[1:], **said).close()
    _require_connections(*rank)


def test_what_a_rank_says_cannot_be_exchanged_on_the_way(rank: tuple[Peers, int, bytes]) -> None:
    """The proof covers the rank, and the number of the connection."""
    _, port, secret = rank
    for said in ({"rank": 1, "stream": 8}, {"rank": 0, "stream": 7}):
        with socket.create_connection(("127.0.0.1", port), SOON) as connection:
            line = handshake.TimedConnection(connection)
            line.send({**said, "npu_device": frames.PROTOCOL, "nonce": "mine"})
            nonce = line.receive(SOON, silent="silent", closed="closed")["nonce"]
            line.send(
                {"proof": frames.proof(secret, "client", "mine", nonce, {"rank": 1, "stream": 7})}
            )
            with pytest.raises(handshake.AttemptFailedError, match="closed"):
                line.receive(SOON, silent="silent", closed="closed")
    _require_connections(*rank)


def test_connections_are_made_and_accepted_again_once_descriptors_are_free(
    rank: tuple[Peers, int, bytes],
) -> None:
    address, (most, highest) = ("127.0.0.1", rank[1]), resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, highest))
        try:
            client.connect(address)
            time.sleep(0.3)  # for a moment, none is free
            with pytest.raises(
                handshake.AttemptFailedError, match="can't be reached: Too many open files"
            ):
                handshake.reach(*address, SOON, rank[2])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, highest))
        handshake.authenticate(handshake.TimedConnection(client), rank[2], rank=1, stream=6)
    _require_connections(*rank)


def test_silent_clients_keep_nobody_out(rank: tuple[Peers, int, bytes]) -> None:
    with contextlib.ExitStack() as opened:
        address = ("127.0.0.1", rank[1])
        silent = [opened.enter_context(socket.create_connection(address, 1)) for _ in range(300)]
        _require_connections(*rank)
        assert silent[0].recv(1) == b"", "the oldest makes room"


@given(st.lists(st.binary(max_size=20) | fuzzing.VALUES.map(frame)), st.integers(1, 9))
def test_frames_of_any_bytes(pieces: list[bytes], size: int) -> None:
    reader, data = frames.Reader(1000), b"".join(pieces)
    with contextlib.suppress(frames.FrameError):
        for first in range(0, len(data), size):
            reader.add(data[first : first + size])
            while (message := reader.next_message()) is not None:
                assert isinstance(message, dict)


@given(st.text(alphabet="0123456789,-", max_size=12))
def test_any_text_as_ranks(text: str) -> None:
    with contextlib.suppress(ValueError):
        ranks = wording.ranks_of(text)
        assert ranks == sorted(set(ranks)) and len(ranks) <= wording.MOST_RANKS
        assert wording.ranks_of(wording.ranges(ranks)) == ranks


_MESSAGES = st.lists(st.binary(min_size=1, max_size=20), max_size=3)


@given(_MESSAGES, st.lists(st.binary(max_size=40), max_size=3), st.integers(0, 30))
def test_any_bytes_in_the_tcp_engine(expected: list[bytes], added: list[bytes], cut: int) -> None:
    """A message is taken only whole, with the length that is expected; the rest is an error."""
    theirs, mine = socket.socketpair()
    with theirs, mine:
        mine.setblocking(False)
        direction = sockets.Direction(sockets.Busy(), None, 1, False)  # type: ignore[arg-type]
        direction.connection = mine
        space = [np.zeros(len(message), np.uint8) for message in expected]
        waiting = [direction.add(each) for each in space]
        stream = b"".join(
            struct.pack("<Q", len(message)) + message for message in expected
        ) + b"".join(added)
        stream = stream[cut:]
        theirs.sendall(stream)
        theirs.close()
        until = time.monotonic() + SOON
        try:
            while direction.lost is None and direction.messages:
                assert time.monotonic() < until
                direction.advance()
        except AssertionError as error:
            assert "rank 1 has sent" in str(error) and cut
        if not cut:
            assert all(message.has_ended for message in waiting)
            assert [each.tobytes() for each in space] == expected
