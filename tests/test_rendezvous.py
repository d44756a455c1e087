"""The rendezvous, with real processes and sockets: ranks that find each other, and all that can keep them from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher import is_running, wait_until
from ranks import clean_environment, free_port, table_environment

from npu_device._src.cluster import frames
from npu_device._src.cluster.ports import ReservedPort

WORKER = Path(__file__).with_name("rendezvous_worker.py")
TIMEOUT = "2"
PATIENT = {"HCCL_CONNECT_TIMEOUT": "12"}  # where all ranks come, on a machine that is busy
# What a test of a failure may take: the time-out, starting Python, and a machine that is busy.
LIMIT = 15.0


class Rank:
    """A process that goes to the rendezvous."""

    def __init__(self, environment: dict[str, str], versions: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), *([json.dumps(versions)] if versions else [])],
            env={**clean_environment(), "HCCL_CONNECT_TIMEOUT": TIMEOUT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def report(self) -> dict[str, Any]:
        """Return the outcome; nothing may be left open, and nothing takes longer than the limit."""
        output, errors = self.process.communicate(timeout=LIMIT + 10)
        assert self.process.returncode == 0, errors
        assert "Traceback" not in errors, errors
        report: dict[str, Any] = json.loads(output)
        assert (report["sockets_left"], report["threads_left"]) == (0, 0)
        assert report["seconds"] < LIMIT
        return report


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts ranks; those that are still there at the end are killed."""
    ranks: list[Rank] = []

    def begin(environment: dict[str, str], versions: dict[str, str] | None = None) -> Rank:
        ranks.append(Rank(environment, versions))
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


def by_table(directory: Path, size: int, rank: int, **more: str) -> dict[str, str]:
    return {**table_environment(directory, size, rank), "HCCL_CONNECT_TIMEOUT": TIMEOUT, **more}


def the_port(directory: Path) -> int:
    table = json.loads((directory / "ranks.json").read_text())
    return int(table["server_list"][0]["device"][0]["host_port"])


def without_table(port: int, size: int, device: int, ip: str = "127.0.0.1") -> dict[str, str]:
    return {
        "CM_CHIEF_IP": ip,
        "CM_CHIEF_PORT": str(port),
        "CM_CHIEF_DEVICE": "0",
        "CM_WORKER_SIZE": str(size),
        "CM_WORKER_IP": ip,
        "ASCEND_DEVICE_ID": str(device),
    }


def by_tf_config(port: int, size: int, rank: int, host: str = "localhost") -> dict[str, str]:
    workers = [f"{host}:{port}", *(f"{host}:{index}" for index in range(1, size))]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})}


def one_error(ranks: list[Rank]) -> str:
    """The error that all of them got, with the same text."""
    reports = [rank.report() for rank in ranks]
    texts = {report.get("error") for report in reports}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text is not None, reports
    return str(text)


def wait_until_connected(directory: Path, count: int) -> None:
    """Wait until ``count`` ranks have connected to the hub, and give them the time to say hello."""
    port = f":{the_port(directory):04X}"

    def connected() -> bool:
        rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()]
        return sum(row[2].endswith(port) and row[3] == "01" for row in rows) >= count

    wait_until(connected)
    time.sleep(0.5)


# They find each other


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", ["rank table", "CM_*", "CM_* IPv6", "TF_CONFIG"])
@pytest.mark.parametrize("chief_first", [True, False])
def test_they_find_each_other(scheme: str, size: int, chief_first: bool, start: Any, tmp_path: Path) -> None:
    port = free_port()
    environments = [
        {
            "rank table": lambda rank=rank: by_table(tmp_path, size, rank),
            "CM_*": lambda rank=rank: without_table(port, size, rank),
            "CM_* IPv6": lambda rank=rank: without_table(port, size, rank, "::1"),
            "TF_CONFIG": lambda rank=rank: by_tf_config(port, size, rank),
        }[scheme]()
        for rank in range(size)
    ]
    ranks: list[Rank | None] = [None] * size
    for rank in range(size) if chief_first else reversed(range(size)):
        ranks[rank] = start({**environments[rank], **PATIENT})
        if not chief_first:
            time.sleep(0.3)
    clusters = [rank.report()["cluster"] for rank in ranks if rank is not None]
    loopback = "::1" if "IPv6" in scheme else "127.0.0.1"
    host = {"rank table": "here", "CM_*": "127.0.0.1", "CM_* IPv6": "::1", "TF_CONFIG": "localhost"}[scheme]
    for rank, cluster in enumerate(clusters):
        assert (cluster["rank"], cluster["world_size"]) == (rank, size)
        assert (cluster["local_rank"], cluster["local_size"], cluster["device_id"]) == (rank, size, rank)
        assert (cluster["host"], cluster["hosts"]) == (host, [host] * size)
        assert cluster["job_id"] == ("tests" if scheme == "rank table" else "default")
        assert cluster["addresses"] == [loopback] * size


def test_ranks_are_numbered_by_address_and_device(start: Any) -> None:
    """Addresses count as numbers: 127.0.0.9 goes before 127.0.0.10. The chief isn't rank 0 here."""
    port = free_port()
    places = [("127.0.0.9", 1), ("127.0.0.10", 0), ("127.0.0.10", 2)]
    ranks = [
        start({**without_table(port, 3, device), "CM_CHIEF_IP": "127.0.0.10", "CM_WORKER_IP": ip})
        for ip, device in places
    ]
    clusters = [rank.report()["cluster"] for rank in ranks]
    assert [cluster["rank"] for cluster in clusters] == [0, 1, 2]
    assert [cluster["local_rank"] for cluster in clusters] == [0, 0, 1]
    assert clusters[0]["hosts"] == ["127.0.0.9", "127.0.0.10", "127.0.0.10"]
    assert clusters[0]["addresses"] == clusters[0]["hosts"]


def test_no_worker_ip(start: Any) -> None:
    port = free_port()
    ranks = [start({**without_table(port, 2, device), "CM_WORKER_IP": "", **PATIENT}) for device in range(2)]
    assert [rank.report()["cluster"]["hosts"] for rank in ranks] == [["127.0.0.1"] * 2] * 2


def test_a_table_of_two_servers(start: Any, tmp_path: Path) -> None:
    """The first address of the chief isn't known anywhere, the second is."""
    port = str(free_port())
    servers = [
        {
            "server_id": "127.0.0.1",
            "host_ip": "nobody.invalid",
            "device": [{"device_id": "0", "rank_id": "0", "host_port": port}],
        },
        {"server_id": "nodeB", "device": [{"device_id": "0", "rank_id": "1"}]},
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"version": "1.0", "status": "completed", "server_list": servers}))
    table = {"RANK_TABLE_FILE": str(path), "RANK_SIZE": "2", **PATIENT}
    ranks = [start({**table, "RANK_ID": str(rank)}) for rank in range(2)]
    clusters = [rank.report()["cluster"] for rank in ranks]
    assert clusters[1]["hosts"] == ["127.0.0.1", "nodeB"]
    assert [cluster["local_size"] for cluster in clusters] == [1, 1]
    assert clusters[1]["addresses"] == ["127.0.0.1"] * 2


def test_the_port_can_be_bound_and_is_given_to_nobody_else() -> None:
    reserved = ReservedPort()
    reserved.leave_to_tensorflow()
    others = []
    for _ in range(200):
        other = socket.socket()
        other.bind(("127.0.0.1", 0))
        others.append(other)
    assert reserved.number not in {other.getsockname()[1] for other in others}
    with socket.socket(socket.AF_INET6) as server:  # as gRPC does it
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("::", reserved.number))
        server.listen()
    for other in others:
        other.close()


# They don't


def test_missing(start: Any, tmp_path: Path) -> None:
    text = one_error([start(by_table(tmp_path, 3, rank)) for rank in (0, 2)])
    assert text.startswith("EI0015: 1 of the 3 ranks of job 'tests' did not come within 2 s (HCCL_CONNECT_TIMEOUT):")
    assert "  rank 0 on host here: came (machine " in text
    assert "  rank 1 on host here: missing\n" in text
    assert "  rank 2 on host here: came (machine " in text
    assert "What to do:" in text


def test_a_rank_that_came_and_died(start: Any, tmp_path: Path) -> None:
    ranks = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="4")) for rank in range(2)]
    wait_until_connected(tmp_path, 2)
    ranks[1].process.kill()
    text = one_error(ranks[:1])
    assert f"rank 1 on host here: missing; it came, but left before the end (machine {socket.gethostname()}" in text
    assert f"pid {ranks[1].process.pid})" in text


def test_a_rank_that_died_may_come_again(start: Any, tmp_path: Path) -> None:
    first = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="20")) for rank in (0, 1)]
    wait_until_connected(tmp_path, 2)
    first[1].process.kill()
    again = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="20")) for rank in (1, 2)]
    assert [rank.report()["cluster"]["rank"] for rank in (first[0], *again)] == [0, 1, 2]


@pytest.mark.parametrize("doubled", [0, 1])
def test_doubled(doubled: int, start: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    # A third rank that never comes keeps the job from being complete before the doubled one is there.
    ranks = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="30")) for rank in (0, 1, doubled)]
    text = one_error(ranks)
    assert time.monotonic() - began < LIMIT  # nobody waits for the time-out
    assert text.startswith("the ranks that came to job 'tests' don't match (doubled rank):")
    assert text.count(f"  rank {doubled} on host here: doubled (machine ") == 2
    assert text.count(": came (machine ") == 1
    assert "  rank 2 on host here: missing" in text
    for rank in ranks:
        assert f"pid {rank.process.pid})" in text


def test_doubled_without_a_table(start: Any) -> None:
    port = free_port()
    text = one_error([start(without_table(port, 4, device)) for device in (0, 1, 1)])
    assert text.count("  device 1 on host 127.0.0.1: doubled (machine ") == 2
    assert "  device 0 on host 127.0.0.1: came" in text
    assert "  1 of 4: missing" not in text
    assert "  2 of 4: missing" in text
    assert "ASCEND_DEVICE_ID" in text


def test_another_world_size(start: Any, tmp_path: Path) -> None:
    port = free_port()
    began = time.monotonic()
    ranks = [
        start({**without_table(port, size, device), "HCCL_CONNECT_TIMEOUT": "30"}) for device, size in ((0, 2), (1, 3))
    ]
    text = one_error(ranks)
    assert time.monotonic() - began < LIMIT
    assert "don't match (another world size)" in text
    assert "  device 0 on host 127.0.0.1: came (" in text
    assert "  device 1 on host 127.0.0.1: another world size, 3 (the chief: 2) (machine " in text


@pytest.mark.parametrize("package", ["npu_device", "tensorflow"])
def test_another_version(package: str, start: Any, tmp_path: Path) -> None:
    usual = {"npu_device": "1.0", "tensorflow": "2.20.0"}
    began = time.monotonic()
    ranks = [
        start(by_table(tmp_path, 2, rank, HCCL_CONNECT_TIMEOUT="30"), {**usual, package: f"2.{rank}"})
        for rank in range(2)
    ]
    text = one_error(ranks)
    assert time.monotonic() - began < LIMIT
    assert "don't match (another version)" in text
    assert f"  rank 1 on host here: another version, {package} 2.1 (the chief: 2.0) (machine " in text
    assert "install the same versions" in text


def test_another_scheme(start: Any, tmp_path: Path) -> None:
    table = by_table(tmp_path, 2, 0, JOB_ID="default")
    text = one_error([start(table), start(by_tf_config(the_port(tmp_path), 2, 1))])
    assert "another scheme, TF_CONFIG (the chief: rank table)" in text


def test_another_job(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0))
    wait_until_connected(tmp_path, 1)
    stray = start(by_table(tmp_path, 2, 1, JOB_ID="other", HCCL_CONNECT_TIMEOUT="30"))
    text = stray.report()["error"]
    assert text.startswith("rank 1 of job 'other' came to the meeting point of another job, 'tests'")
    assert f"pid {chief.process.pid}" in text
    assert "JOB_ID" in text
    text = one_error([chief])
    assert "  rank 1 on host here: missing\n" in text
    assert f"  rank 1 of another job, 'other': refused (machine {socket.gethostname()}, pid {stray.process.pid}" in text


def test_the_refused_job_does_not_disturb_the_first(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20"))
    stray = start(by_table(tmp_path, 2, 1, JOB_ID="other", HCCL_CONNECT_TIMEOUT="20"))
    assert "error" in stray.report()
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20"))
    assert "cluster" in chief.report()
    assert "cluster" in other.report()


# Strangers


def test_unknown_clients_are_ignored(start: Any, tmp_path: Path) -> None:
    """Nobody who can't prove the secret is answered, and none of them holds anybody up."""
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20"))
    address = ("127.0.0.1", the_port(tmp_path))
    silent = _connect(address)
    for says in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 1000,  # a length of 4 GiB
        b"\x00\x00\x10\x00" + b"[" * 4096,
        b"\x00\x00\x00\x0c" + b'{"magic": 1}',
        b"\x00\x00\x00\x02[]",
        b"x" * 70000,
    ):
        with _connect(address) as client:
            client.settimeout(5)
            with contextlib.suppress(ConnectionError):
                client.sendall(says)
                assert client.recv(100) == b""  # hung up, without an answer
    slow = _connect(address)
    slow.sendall(b"\x00\x00")
    began = time.monotonic()
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20"))
    assert "cluster" in chief.report()
    assert "cluster" in other.report()
    assert time.monotonic() - began < 8
    silent.close()
    slow.close()


@pytest.mark.slow
def test_an_unknown_client_that_sends_nothing_has_five_seconds(start: Any, tmp_path: Path) -> None:
    start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20"))
    began = time.monotonic()
    with _connect(("127.0.0.1", the_port(tmp_path))) as client:
        client.settimeout(10)
        assert client.recv(100) == b""
    assert 4 < time.monotonic() - began < 8


def _greet(address: tuple[str, int], secret: bytes) -> tuple[socket.socket, list[bytes], bytes]:
    """Prove a secret; the connection, what was said, and the first bytes of the answer."""
    connection = _connect(address)
    connection.settimeout(10)
    said = [frames.encode({"npu_device": frames.PROTOCOL, "nonce": "mine"})]
    connection.sendall(said[0])
    nonce = json.loads(connection.recv(1000)[4:])["nonce"]
    said.append(frames.encode({"proof": frames.proof(secret, "client", "mine", nonce)}))
    connection.sendall(said[1])
    return connection, said, connection.recv(1000)


def test_a_wrong_proof_and_a_replayed_one_are_refused_without_an_answer(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="the secret"))
    address = ("127.0.0.1", the_port(tmp_path))
    wrong, _, answer = _greet(address, b"another secret")
    assert answer == b""
    right, said, answer = _greet(address, b"the secret")
    assert b"proof" in answer
    with _connect(address) as replayed:
        replayed.settimeout(10)
        replayed.sendall(said[0])
        nonce = json.loads(replayed.recv(1000)[4:])["nonce"]
        replayed.sendall(said[1])
        assert replayed.recv(1000) == b""
    assert b"tests" not in nonce.encode() + answer, "the job's name is for those who have proved the secret"
    wrong.close()
    right.close()
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="the secret"))
    assert "cluster" in chief.report()
    assert "cluster" in other.report()


@pytest.mark.slow
def test_another_secret(start: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret\n")
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="6", NPU_DEVICE_SECRET_FILE=str(tmp_path / "secret")))
    stray = start(by_table(tmp_path, 2, 1, NPU_DEVICE_SECRET="another"))
    text = stray.report()["error"]
    assert "this rank's proof of the job's secret was refused" in text
    assert "NPU_DEVICE_SECRET_FILE" in text
    text = one_error([chief])
    assert "  rank 1 on host here: missing\n" in text
    assert "  an unknown client at 127.0.0.1 could not prove that it knows the job's secret; not counted" in text
    assert "the secret" not in text.replace("the job's secret", "")


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
    assert "can't prove that it knows the job's secret" in rank.report()["error"]


def test_very_many_unknown_clients_at_once(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20"))
    clients = [_connect(("127.0.0.1", the_port(tmp_path))) for _ in range(400)]
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20"))
    assert "cluster" in chief.report()
    assert other.report()["seconds"] < 4
    for client in clients:
        client.close()


def test_unknown_clients_are_named_when_a_rank_is_missing(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0))
    with _connect(("127.0.0.1", the_port(tmp_path))) as client:
        client.sendall(b"hello?\n")
        text = one_error([chief])
    assert "  an unknown client at 127.0.0.1 talks another protocol; not counted" in text


def _connect(address: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.05)


# The chief can't be found, or can't listen


def test_no_chief(start: Any, tmp_path: Path) -> None:
    text = one_error([start(by_table(tmp_path, 2, 1))])
    assert text.startswith("EI0015: rank 1 of job 'tests' (machine ")
    assert "got no answer from the chief, rank 0 on host here, within 2 s (HCCL_CONNECT_TIMEOUT):" in text
    assert f"  127.0.0.1:{the_port(tmp_path)} refused: nothing listens there\n" in text
    assert "What to do:" in text


def test_unresolvable_chief(start: Any) -> None:
    text = one_error([start(by_tf_config(29688, 2, 1, "nobody.invalid"))])
    assert "  nobody.invalid:29688 the name can't be resolved (" in text


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_somebody_else_at_the_chiefs_place(says: bytes, start: Any, tmp_path: Path) -> None:
    """The rank looks on until its time has passed; the chief sees at once that its port is taken."""
    environment = by_table(tmp_path, 2, 1)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", the_port(tmp_path)))
        listener.listen()
        accepted = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                accepted.append(connection)
                if says:
                    connection.recv(1000)
                    connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            rank, chief = start(environment), start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="60"))
            text = rank.report()["error"]
            assert ("another program answers there" if says else "no answer: another program, or a hub") in text
            text = chief.report()["error"]
            assert text.startswith(f"EI0019: the ranks are to meet at 127.0.0.1:{the_port(tmp_path)} on ")
            assert "What to do: end the other program, or give every rank another port" in text
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in accepted:
                connection.close()


def test_two_jobs_on_one_port(start: Any, tmp_path: Path) -> None:
    first = start(by_table(tmp_path, 2, 0))
    _connect(("127.0.0.1", the_port(tmp_path))).close()
    second = start(by_table(tmp_path, 2, 0, JOB_ID="other", HCCL_CONNECT_TIMEOUT="60"))
    text = second.report()["error"]
    assert text.startswith("rank 0 of job 'other' came to the meeting point of another job, 'tests'")
    assert "rank 0 of another job, 'other': refused" in one_error([first])


# Signals


def test_interrupted(start: Any, tmp_path: Path) -> None:
    """Ctrl-C on the chief ends it at once, and the others hear of it."""
    chief, other = (start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="60")) for rank in range(2))
    wait_until_connected(tmp_path, 2)
    began = time.monotonic()
    chief.process.send_signal(signal.SIGINT)
    _, errors = chief.process.communicate(timeout=LIMIT)
    assert "KeyboardInterrupt" in errors
    assert "stopped while the ranks were meeting: KeyboardInterrupt()" in other.report()["error"]
    assert time.monotonic() - began < 5


def test_interrupted_on_the_way(start: Any, tmp_path: Path) -> None:
    environments = (by_table(tmp_path, 2, 1), by_tf_config(29688, 2, 1, "nobody.invalid"))
    ranks = [start({**environment, "HCCL_CONNECT_TIMEOUT": "60"}) for environment in environments]
    time.sleep(1.5)
    began = time.monotonic()
    for rank in ranks:
        rank.process.send_signal(signal.SIGINT)
    for rank in ranks:
        _, errors = rank.process.communicate(timeout=LIMIT)
        assert "KeyboardInterrupt" in errors
    assert time.monotonic() - began < 3


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_hub_that_stands_still(start: Any, tmp_path: Path) -> None:
    chief, other = (start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="4")) for rank in range(2))
    wait_until_connected(tmp_path, 2)
    [hub] = _children(chief.process.pid)
    os.kill(hub, signal.SIGSTOP)
    assert "the chief accepted this rank, and then sent nothing more" in one_error([other])
    assert "the chief accepted this rank, and then sent nothing more" in one_error([chief])
    os.kill(hub, signal.SIGKILL)


def test_a_chief_that_stands_still_holds_nobody_up(start: Any, tmp_path: Path) -> None:
    chief, other = (start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="10")) for rank in range(2))
    wait_until_connected(tmp_path, 2)
    chief.process.send_signal(signal.SIGSTOP)
    late = start(by_table(tmp_path, 3, 2, HCCL_CONNECT_TIMEOUT="10"))
    assert [rank.report()["cluster"]["rank"] for rank in (other, late)] == [1, 2]
    chief.process.send_signal(signal.SIGCONT)
    assert chief.report()["cluster"]["rank"] == 0


# The hub's life


def _hub_of(rank: Rank) -> int:
    until = time.monotonic() + 10
    while not (children := _children(rank.process.pid)):
        assert time.monotonic() < until
        time.sleep(0.02)
    return children[0]


def _ends(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not is_running(pid):
            return True
        time.sleep(0.02)
    return False


def test_the_hub_ends_with_its_job(start: Any, tmp_path: Path) -> None:
    """And nothing on its command line tells the secret."""
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="0f1e2d"))
    hub = _hub_of(chief)
    assert "0f1e2d" not in Path(f"/proc/{hub}/cmdline").read_text()
    assert not any(name in Path(f"/proc/{hub}/maps").read_text() for name in ("numpy", "tensorflow"))
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="0f1e2d"))
    assert "cluster" in chief.report()
    assert "cluster" in other.report()
    assert _ends(hub, 5)


def test_the_hub_ends_when_its_starter_is_killed(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="60"))
    hub = _hub_of(chief)
    chief.process.kill()
    assert _ends(hub, 5)


def test_the_hub_ends_when_nobody_comes(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0))
    hub = _hub_of(chief)
    one_error([chief])
    assert _ends(hub, 8)


def test_two_jobs_one_after_the_other(start: Any, tmp_path: Path) -> None:
    """The next job's ranks wait for the hub of the last one."""
    channels = """
import sys, time
from npu_device._src.membership.schemes import membership_from_environment
from npu_device._src.cluster.rendezvous import meet
for number in range(3):
    cluster, channel = meet(membership_from_environment())
    print(number, cluster.rank, flush=True)
    if cluster.rank == 1:
        time.sleep(1)  # rank 0 is at the next meeting meanwhile
    channel.close()
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", channels],
            env={**clean_environment(), **by_table(tmp_path, 2, rank, HCCL_CONNECT_TIMEOUT="20")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0].split() for rank in ranks] == [
        ["0", "0", "1", "0", "2", "0"],
        ["0", "1", "1", "1", "2", "1"],
    ]
