"""Strangers at the rendezvous: those that can't prove that they belong there, and those that answer for the hub."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from rendezvous_ranks import by_table, connect, one_error, the_port

from npu_device._src.cluster import frames

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
        assert "cluster" in chief.report() and "cluster" in other.report()  # before the time-out


def _exchange(connection: socket.socket, nonce: str, proof: Callable[[str], bytes]) -> bytes:
    """Say a nonce, and the proof for the nonce of the hub; return how the answer begins, b"" if there is none."""
    connection.settimeout(10)
    connection.sendall(frames.encode({"npu_device": frames.PROTOCOL, "nonce": nonce}))
    connection.sendall(proof(json.loads(connection.recv(1000)[4:])["nonce"]))
    return connection.recv(1000)


def test_a_wrong_proof_and_a_replayed_one_are_refused_without_an_answer(
    start: Any, tmp_path: Path
) -> None:
    chief = start(
        by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="the secret")
    )
    said = []

    def proof(theirs: str, secret: bytes = b"the secret") -> bytes:
        said.append(frames.encode({"proof": frames.proof(secret, "client", "mine", theirs)}))
        return said[-1]

    for nonce, make, answered in (
        ("mine", lambda theirs: proof(theirs, b"another secret"), False),
        (
            "\ud800",
            lambda _: frames.encode({"proof": "\ud800"}),
            False,
        ),  # JSON allows half a surrogate pair
        ("mine", proof, True),
        ("mine", lambda _: said[-1], False),  # replayed
    ):
        with connect(("127.0.0.1", the_port(tmp_path))) as connection:
            answer = _exchange(connection, nonce, make)
        assert (b"proof" in answer) == bool(answer) == answered
        assert b"tests" not in answer, "the job's name is for those who have proved the secret"
    other = start(
        by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="the secret")
    )
    assert "cluster" in chief.report() and "cluster" in other.report()


def test_strangers_are_named_when_a_rank_is_missing(start: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret\n")
    chief = start(
        by_table(
            tmp_path,
            2,
            0,
            HCCL_CONNECT_TIMEOUT="4",
            NPU_DEVICE_SECRET_FILE=str(tmp_path / "secret"),
        )
    )
    stray = start(by_table(tmp_path, 2, 1, NPU_DEVICE_SECRET="another"))
    with connect(("127.0.0.1", the_port(tmp_path)), "127.0.0.2") as client:
        client.sendall(b"hello?\n")
        text = stray.report()["error"]
        assert "the proof of the job secret was refused" in text
        assert "NPU_DEVICE_SECRET_FILE" in text
        text = one_error([chief])
    assert "  rank 1 on host node0: missing\n" in text
    assert (
        "  an unknown client at 127.0.0.1 could not prove that it knows the job secret; not counted"
        in text
    )
    assert "  an unknown client at 127.0.0.2 talks another protocol; not counted" in text
    assert "the secret" not in text.replace("the job secret", "")


def test_somebody_in_the_hubs_place_who_does_not_know_the_secret(
    start: Any, tmp_path: Path
) -> None:
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
                    connection.sendall(
                        frames.encode({"proof": frames.proof(b"a guess", "hub", "x", "theirs")})
                    )
                    received.add(connection.recv(1000))
    assert received == {b""}
    assert "can't prove that it knows the job secret" in rank.report()["error"]
