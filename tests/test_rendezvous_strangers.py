"""Strangers at the rendezvous: those that can't prove that they belong there, and those that answer for the hub."""

from __future__ import annotations

import contextlib
import json
import queue
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from rendezvous_ranks import by_table, connect, one_error, the_port

from npu_device._src.cluster import frames, handshake

pytestmark = pytest.mark.xdist_group("waiting")


@pytest.mark.slow
def test_unknown_clients_are_ignored(start: Any, tmp_path: Path) -> None:
    """Nobody who can't prove the secret is answered, none of them holds anybody up, and silence ends after 5 s."""
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="40"))
    address, began = ("127.0.0.1", the_port(tmp_path)), time.monotonic()
    silent = connect(address)
    for says in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 1000,  # a length of 4 GiB
        b"\x00\x00\x10\x00" + b"[" * 4096,
        b"\x00\x00\x00\x0c" + b'{"magic": 1}',
        b"\x00\x00\x00\x02[]",
        b"x" * 70000,
    ):
        with connect(address) as client:
            client.settimeout(5)
            with contextlib.suppress(ConnectionError):
                client.sendall(says)
                assert client.recv(100) == b""  # hung up, without an answer
    with silent:
        silent.settimeout(10)
        assert silent.recv(100) == b""
        assert 4 < time.monotonic() - began < 12
    with contextlib.ExitStack() as opened:
        for _ in range(400):  # more than may be unproved
            opened.enter_context(connect(address)).sendall(b"\x00\x00")
        other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="40"))
        assert "cluster" in chief.report()
        assert "cluster" in other.report()  # before the time-out


def _exchange(connection: socket.socket, nonce: str, proof: Callable[[str], bytes]) -> bytes:
    """Say a nonce, and the proof for the nonce of the hub; return how the answer begins, b"" if there is none."""
    connection.settimeout(10)
    connection.sendall(frames.encode({"npu_device": frames.PROTOCOL, "nonce": nonce}))
    connection.sendall(proof(json.loads(connection.recv(1000)[4:])["nonce"]))
    return connection.recv(1000)


def test_a_wrong_proof_and_a_replayed_one_are_refused_without_an_answer(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="the secret"))
    said = []

    def proof(theirs: str, secret: bytes = b"the secret") -> bytes:
        said.append(frames.encode({"proof": frames.proof(secret, "client", "mine", theirs)}))
        return said[-1]

    for nonce, make, answered in (
        ("mine", lambda theirs: proof(theirs, b"another secret"), False),
        ("\ud800", lambda _: frames.encode({"proof": "\ud800"}), False),  # JSON allows half a surrogate pair
        ("mine", proof, True),
        ("mine", lambda _: said[-1], False),  # replayed
    ):
        with connect(("127.0.0.1", the_port(tmp_path))) as connection:
            answer = _exchange(connection, nonce, make)
        assert (b"proof" in answer) == bool(answer) == answered
        assert b"tests" not in answer, "the job's name is for those who have proved the secret"
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="the secret"))
    assert "cluster" in chief.report()
    assert "cluster" in other.report()


def test_strangers_are_named_when_a_rank_is_missing(start: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret\n")
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="5", NPU_DEVICE_SECRET_FILE=str(tmp_path / "secret")))
    stray = start(by_table(tmp_path, 2, 1, NPU_DEVICE_SECRET="another"))
    with connect(("127.0.0.1", the_port(tmp_path)), "127.0.0.2") as client:
        client.sendall(b"hello?\n")
        text = stray.report()["error"]
        assert "the proof of the job secret was refused" in text
        assert "NPU_DEVICE_SECRET_FILE" in text
        text = one_error([chief])
    assert "  rank 1 on host node0: missing\n" in text
    assert "  an unknown client at 127.0.0.1 could not prove that it knows the job secret; not counted" in text
    assert "  an unknown client at 127.0.0.2 talks another protocol; not counted" in text
    assert "the secret" not in text.replace("the job secret", "")


def test_somebody_in_the_hubs_place_who_does_not_know_the_secret(start: Any, tmp_path: Path) -> None:
    """The rank proves its secret first; what it says about itself comes only after the hub's proof."""
    environment = by_table(tmp_path, 2, 1, NPU_DEVICE_SECRET="the secret")
    received = set()
    with socket.create_server(("127.0.0.1", the_port(tmp_path))) as listener:
        listener.settimeout(0.5)
        rank = start(environment)
        while rank.process.poll() is None:
            with contextlib.suppress(socket.timeout):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(5)
                    connection.recv(1000)
                    connection.sendall(frames.encode({"nonce": "theirs"}))
                    connection.recv(1000)
                    connection.sendall(frames.encode({"proof": frames.proof(b"a guess", "hub", "x", "theirs")}))
                    received.add(connection.recv(1000))
    assert received == {b""}
    assert "can't prove that it knows the job secret" in rank.report()["error"]


_Admitted = queue.SimpleQueue[tuple[handshake.TimedConnection, dict[str, Any]]]


@contextlib.contextmanager
def _serving(secret: bytes) -> Iterator[tuple[tuple[str, int], _Admitted]]:
    """Serve as ranks and launchers do; the address, and who has proved the secret."""
    admitted: _Admitted = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = listener, secret, lambda line, said: admitted.put((line, said))
        thread = threading.Thread(target=handshake.serve, args=serving)
        thread.start()
        try:
            yield listener.getsockname(), admitted
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_connections_are_made_and_accepted_again_once_descriptors_are_free() -> None:
    with _serving(b"ours") as (address, admitted), socket.socket() as client:
        most, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, highest))
        try:
            client.connect(address)
            time.sleep(0.3)  # for a moment, none is free
            with pytest.raises(handshake.AttemptFailedError, match="can't be reached: Too many open files"):
                handshake.reach(*address, 5.0, b"ours", rank=2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, highest))
        handshake.authenticate(handshake.TimedConnection(client), b"ours", rank=1)
        line, said = admitted.get(timeout=10)
        line.connection.close()
        assert said["rank"] == 1


def test_silent_clients_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_MOST_UNPROVED", 3)
    with _serving(b"ours") as (address, admitted), contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connect(address)) for _ in range(6)]
        line = handshake.reach(*address, 1.0, b"ours", rank=1)
        opened.callback(line.connection.close)
        opened.callback(admitted.get(timeout=10)[0].connection.close)
        silent[0].settimeout(1)
        assert silent[0].recv(1) == b"", "the oldest makes room"
