"""The launchers of several nodes, with any messages: an error or nothing, and the job goes on."""

from __future__ import annotations

import queue
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fuzzing import ends, given, memory_of, send, streams
from launcher import NPURUN, environment, script
from rendezvous_ranks import connect

from npu_device._src.cluster import handshake
from npu_device._src.membership.rank_environment import free_port
from npu_device._src.version import __version__
from npu_device.launch.node_protocol import JobEnd, Link, serve

pytestmark = pytest.mark.xdist_group("waiting")

_SECRET, _SOON = "ours", 10.0
_HELLO = {
    "do": "hello",
    "node": 1,
    "nproc": 1,
    "most": 2,
    "version": __version__,
    "count": 1,
    "nodes": [0, 1],
}
_TO_LEADER: list[dict[str, Any]] = [
    _HELLO,
    {**_HELLO, "node": 5, "count": 2},
    {"do": "failed", "what": "text"},
    {"do": "outcome", "code": 1, "interrupted": False, "preempted": False, "failure": {"rank": 0}},
]
# Whole, the first and the last would be carried out.
_TO_MEMBER: list[dict[str, Any]] = [
    {"do": "plan", "count": 0, "nodes": [0, 1], "job_id": "j"},
    {"do": "say", "text": "text"},
    {"do": "stop", "why": "text"},
    {"do": "alive"},
    {"do": "leave", "code": 1},
    {"do": "over", "code": 1},
]


def _npurun(directory: Path, port: int, node: int) -> subprocess.Popen[bytes]:
    where = (
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        "--node-rank",
        str(node),
    )
    limits = (
        "--max-restarts",
        "1000",
        "--restart-backoff",
        "0.1",
        "--rejoin-timeout",
        "60",
        "--grace",
        "1",
    )
    command = [*NPURUN, "-n", "1", *where, *limits, script(directory, "", f"node{node}.py")]
    with (directory / f"node{node}.txt").open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment(NPU_DEVICE_SECRET=_SECRET),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _output(launch: subprocess.Popen[bytes], directory: Path, node: int) -> str:
    code, text = launch.wait(60), (directory / f"node{node}.txt").read_text(errors="replace")
    assert code == 0, text
    assert "Traceback" not in text
    return text


def test_any_messages_to_node_0(tmp_path: Path) -> None:
    port = free_port()
    leader = _npurun(tmp_path, port, 0)
    try:

        @given(streams(*_TO_LEADER))
        def send_anything(pieces: list[bytes]) -> None:
            line = handshake.reach("127.0.0.1", port, _SOON, _SECRET.encode() + b" nodes")
            with line.connection:
                send(line.connection, pieces)
                ends(line.connection)
            assert leader.poll() is None

        connect(("127.0.0.1", port)).close()
        send_anything()
        assert memory_of(leader.pid) < 200 << 20
        member = _npurun(tmp_path, port, 1)
        _output(member, tmp_path, 1)
        _output(leader, tmp_path, 0)
    finally:
        leader.kill()
        leader.wait()


def test_any_messages_of_node_0(tmp_path: Path) -> None:
    links: queue.Queue[Link] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serve(listener, _SECRET.encode(), links.put)
        member = _npurun(tmp_path, listener.getsockname()[1], 1)
        try:

            @given(streams(*_TO_MEMBER))
            def send_anything(pieces: list[bytes]) -> None:
                link = links.get(timeout=_SOON)
                send(link.connection, pieces)
                ends(link.connection)  # it connects again
                link.close()

            send_anything()
            link = links.get(timeout=_SOON)
            link.send(JobEnd(0, "the last word"))
            assert "the last word" in _output(member, tmp_path, 1)
            link.close()
        finally:
            member.kill()
            member.wait()
            listener.shutdown(socket.SHUT_RDWR)
