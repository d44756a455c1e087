"""The hub, and the ranks' side of it, with any data: an error or nothing, never a hang, the end of the job, or memory
beyond a limit.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from fuzzing import (
    GREETING,
    PLACE,
    SECRET,
    SOON,
    VALUES,
    both_met,
    ends,
    frame,
    given,
    hub_of_two,
    hypothesis,
    memory_of,
    pair,
    send,
    st,
    streams,
)

from npu_device._src.cluster import frames, handshake
from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.rendezvous import meet
from npu_device._src.cluster.roster import Hello

pytestmark = pytest.mark.xdist_group("waiting")

_MOST_BYTES, _FEW_BYTES = 600 << 20, 60 << 20
_numbers = itertools.count()


@pytest.fixture()
def hub() -> Iterator[HubProcess]:
    running = hub_of_two(stays=True)
    yield running
    assert running._process.poll() is None, "the hub has ended"
    assert memory_of(running._process.pid) < _MOST_BYTES
    running.end()


def _connect(hub: HubProcess) -> socket.socket:
    return socket.create_connection((hub.host, hub.port), SOON)


def _proved(hub: HubProcess) -> handshake.TimedConnection:
    return handshake.reach(hub.host, hub.port, SOON, SECRET)


@contextlib.contextmanager
def _job(hub: HubProcess) -> Iterator[tuple[ControlChannel, list[dict[str, Any]], socket.socket]]:
    """Let two ranks meet; yield the first one's channel and its news, and the second one's socket."""
    channels = [channel for _, channel in both_met(hub)]
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
    "hello": asdict(Hello("fuzz", "rank table", 2, 0, 0, "here", None, False, 20.0, {"v": "1"}, {}, "m", 7))
}
_TABLE = [
    {"do": "set", "id": 1, "key": "a", "value": "b"},
    {"do": "get", "id": 2, "key": "c", "seconds": 0.01},
    {"do": "delete", "id": 3, "key": "a"},
    {"do": "gather", "id": 4, "name": "n", "value": {"x": 1}, "ranks": "0-1", "partial": True, "seconds": 0.01},
    {"do": "gather", "id": 5, "name": "m", "value": 1, "ranks": None, "partial": False, "seconds": 0.01},
    {"do": "ask", "id": 6, "kind": "alive", "body": None, "ranks": "0-1", "seconds": 0.01},
    {"do": "reply", "question": 1, "value": 1},
]
_LAST = [
    {"do": "left", "issued": {"g 0-1": 1}},
    {"do": "stopped"},
    {"do": "failed", "event": {"rank": 1, "error": "e", "traceback": "t"}},
]


@given(streams(GREETING, {"proof": "0"}, _HELLO, *_TABLE))
def test_a_stranger_at_the_hub(hub: HubProcess, pieces: list[bytes]) -> None:
    with _connect(hub) as stranger:
        send(stranger, pieces)
        assert len(ends(stranger)) < 1000
    _proved(hub).connection.close()


_WITHOUT_RANK = {"hello": {name: value for name, value in _HELLO["hello"].items() if name != "rank"}}


@given(streams(_HELLO, {"stopping": "x"}, *_TABLE))
@hypothesis.example([frame(_WITHOUT_RANK)])
def test_a_process_with_the_secret_that_is_no_rank(hub: HubProcess, pieces: list[bytes]) -> None:
    with _proved(hub).connection as client:
        send(client, pieces)
        client.settimeout(0.05)
        with contextlib.suppress(OSError):
            client.recv(1 << 16)
    with _job(hub) as (channel, _, _):  # as if it had never come
        _require_work(channel)


@given(streams(*_TABLE, *_TABLE, *_LAST))
def test_a_rank_that_sends_anything(hub: HubProcess, pieces: list[bytes]) -> None:
    with _job(hub) as (channel, news, other):
        send(other, pieces)
        ends(other)
        _require_work(channel)
        deadline = time.monotonic() + SOON
        while not _tells_an_end(news) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert _tells_an_end(news), news


def _tells_an_end(news: list[dict[str, Any]]) -> bool:
    return any(message["push"] in ("gone", "left", "failed") for message in news)


def test_ranks_that_send_what_no_rank_sends(hub: HubProcess) -> None:
    for pieces in (
        [frame({"do": "ask", "id": 1, "kind": "k", "body": 1, "ranks": "0-99999999", "seconds": 1})],
        [frame({"do": "set", "id": 1, "key": "k", "value": "x" * (1 << 24)})],
        [frame(b'{"do":"set","id":' + b"9" * 1_000_000 + b"}")],
        [frame(b'{"do":' + b"[" * 1_000_000)],
    ):
        with _job(hub) as (channel, news, other):
            reader = threading.Thread(target=_read_all, args=(other, received := bytearray()))
            reader.start()
            send(other, pieces)
            reader.join(20)
            assert b"can't read what rank 1 has sent" in received
            _require_work(channel)
            assert not any(message["push"] == "lost" for message in news)


def _read_all(connection: socket.socket, received: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            received += data
            del received[:-10_000]


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
    hello = {"hello": {**_HELLO["hello"], "job_id": "another"}}
    line.send(hello)
    began, chunk = time.monotonic(), bytes(1 << 20)
    with line.connection, contextlib.suppress(OSError):
        while time.monotonic() < began + 2:
            line.connection.sendall(chunk)
    _proved(hub).connection.close()
    assert memory_of(hub._process.pid) < _FEW_BYTES


def test_a_world_that_nobody_has(hub: HubProcess) -> None:
    line = _proved(hub)
    line.send({"hello": {**_HELLO["hello"], "world_size": frames.MOST_RANKS, "seconds": 0.1}})
    with line.connection:
        while "refused" not in (answer := line.receive(SOON, silent="silent", closed="closed")):
            pass
    assert "rank 100: missing\n  65435 more ranks: missing" in answer["refused"]
    with _job(hub) as (channel, _, _):
        _require_work(channel)


# The ranks' side: another program, or a broken hub, answers.

_ANSWERS = [
    {"nonce": "x"},
    {"proof": "0"},
    {"wait": 0.1},
    {"waits_for": "rank 1"},
    {"refused": "text"},
    {"busy": "text"},
    {"rank": 0},
    {"roster": {"hosts": ["a", "b"], "addresses": ["1", "2"], "loopback": True}},
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
                        handshake._admit(connection, SECRET)
                    send(connection, pieces)
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(SOON)
                    while connection.recv(1 << 16):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        place = replace(PLACE, chief_port=listener.getsockname()[1], connect_timeout=0.0)
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
        {"push": "question", "question": 1, "kind": "k", "body": None},
    )
)
def test_a_rank_and_any_messages_of_the_hub(pieces: list[bytes]) -> None:
    with pair() as (hub_side, rank_side):
        channel, lost = ControlChannel(rank_side, frames.Reader(frames.LIMIT)), threading.Event()
        channel.listen(lambda push: None, lambda reason: lost.set())
        asking = threading.Thread(target=_ask, args=(channel,))
        asking.start()
        send(hub_side, pieces)
        with contextlib.suppress(OSError):
            hub_side.shutdown(socket.SHUT_WR)
        asking.join(SOON)
        assert not asking.is_alive()
        assert lost.wait(SOON)
        channel.close()


def _ask(channel: ControlChannel) -> None:
    with contextlib.suppress(ClusterError, TimeoutError, KeyError):
        channel.get("key", 0.1)


@given(st.lists(st.binary(max_size=20) | VALUES.map(frame)), st.integers(1, 9))
def test_frames_of_any_bytes(pieces: list[bytes], size: int) -> None:
    reader, data = frames.Reader(1000), b"".join(pieces)
    try:
        for first in range(0, len(data), size):
            reader.add(data[first : first + size])
            while (message := reader.next()) is not None:
                assert isinstance(message, dict)
    except frames.FrameError:
        pass


@given(st.text(alphabet="0123456789,-", max_size=12))
def test_any_text_as_ranks(text: str) -> None:
    try:
        ranks = frames.ranks_of(text)
    except ValueError:
        return
    assert ranks == sorted(set(ranks)) and len(ranks) <= frames.MOST_RANKS
    assert frames.ranks_of(frames.ranges(ranks)) == ranks
