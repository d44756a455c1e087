"""What the fuzz tests share: data as strangers, and broken ranks, might send them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from npu_device._src.cluster import rendezvous
from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster, Membership
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.rendezvous import meet

hypothesis = pytest.importorskip("hypothesis", reason="the extra 'test' has it")
given, st = hypothesis.given, pytest.importorskip("hypothesis.strategies")

SOON = 5.0
GREETING: dict[str, Any] = {"npu_device": 3, "nonce": "x"}
SECRET = b"known to the ranks"
PLACE = Membership(
    "rank table", 2, 0, None, "here", 0, False, ("127.0.0.1",), 0, "fuzz", 20.0, secret=SECRET
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.integers()
    | st.floats()
    | st.text(max_size=5),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3)
    ),
    max_leaves=5,
)


def hub_of_two(stays: bool) -> HubProcess:
    """Return a running hub for a job of two ranks."""
    here = {"hosts": ("127.0.0.1",), "ports": (0, 0), "host_key": "here", "expected_hosts": ()}
    return HubProcess(secret=SECRET, job_id="fuzz", world_size=2, stays=stays, **here)


def both_met(hub: HubProcess) -> list[tuple[Cluster, ControlChannel]]:
    """Let two ranks meet; return what each of them gets."""
    places = [replace(PLACE, rank=rank, device_id=rank, chief_port=hub.port) for rank in (0, 1)]
    with (
        mock.patch.object(rendezvous, "installed_versions", lambda: {"v": "1"}),
        ThreadPoolExecutor(2) as pool,
    ):
        return list(pool.map(meet, places))


def frame(value: Any) -> bytes:
    """Return a JSON value, or text that is already JSON, as a frame."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack(">I", len(text)) + text


@st.composite
def changed(draw: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with up to two fields changed, left out or added, also below the first level."""
    result = json.loads(json.dumps(message))
    for _ in range(draw(st.integers(0, 2))):
        place: Any = result
        while isinstance(place, dict) and place:
            name = draw(st.sampled_from(sorted(place)))
            if isinstance(place[name], dict) and place[name] and draw(st.booleans()):
                place = place[name]
                continue
            if draw(st.integers(0, 3)):
                place[name] = draw(VALUES)
            else:
                del place[name]
            break
    return result


def streams(*messages: dict[str, Any]) -> st.SearchStrategy[list[bytes]]:
    """Return pieces of bytes to send: frames of such messages, changed, cut, repeated, in any order; or any bytes."""
    whole = st.one_of([changed(message) for message in messages]).map(frame)
    broken = st.one_of(
        st.binary(max_size=30),
        VALUES.map(frame),
        st.sampled_from(
            [
                b"\xff\xff\xff\xff",
                b"\0\0\0\0",
                frame(b"[" * 5000),
                frame(b'{"id":' + b"9" * 9000 + b"}"),
            ]
        ),
        st.tuples(whole, st.integers(1, 40)).map(lambda cut: cut[0][: -cut[1]]),
    )
    return st.lists(st.one_of(whole, whole, whole, broken), max_size=6).flatmap(
        lambda pieces: st.sampled_from([pieces, [*pieces, *pieces[-1:] * 3], [b"".join(pieces)]])
    )


def send(connection: socket.socket, pieces: list[bytes]) -> None:
    """Send pieces; the other side may have closed the connection."""
    with contextlib.suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)


def ends(connection: socket.socket, seconds: float = 10.0, announced: bool = True) -> bytes:
    """Announce the end, and return all that the other side still sends until it closes the connection in time."""
    connection.settimeout(seconds)
    data = bytearray()
    try:
        if announced:
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1 << 16):
            data += piece
    except socket.timeout:
        raise
    except OSError:
        pass
    return bytes(data)


def memory_of(pid: int) -> int:
    """Return how many bytes of memory a process has at most had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
