"""The rendezvous, with real processes and sockets: ranks that find each other, and what can keep them from it."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port
from rendezvous_ranks import (
    PATIENT,
    Rank,
    by_table,
    by_tf_config,
    connect,
    one_error,
    started,
    the_port,
    wait_until_connected,
    without_table,
)

from npu_device._src.cluster.ports import ReservedPort

pytestmark = pytest.mark.xdist_group("waiting")
start = pytest.fixture(started, name="start")


# They find each other


@pytest.mark.parametrize(
    ("scheme", "size", "chief_first"),
    [("rank table", 2, True), ("CM_*", 3, False), ("CM_* IPv6", 2, False), ("TF_CONFIG", 3, True)],
)
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
    host = {"rank table": "node0", "CM_*": "127.0.0.1", "CM_* IPv6": "::1", "TF_CONFIG": "localhost"}[scheme]
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


@pytest.mark.parametrize("ports", [None, (61300, 61331)])
def test_the_port_can_be_bound_and_is_given_to_nobody_else(ports: tuple[int, int] | None) -> None:
    reserved, second = ReservedPort(ports), ReservedPort(ports)
    assert reserved.number != second.number
    second.close()
    reserved.leave_to_server()
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
    for other in (*others, reserved):
        other.close()


# They don't


def test_missing(start: Any, tmp_path: Path) -> None:
    text = one_error([start(by_table(tmp_path, 3, rank)) for rank in (0, 2)])
    assert text.startswith("EI0015: 1 of the 3 ranks of job 'tests' did not come within 2 s (HCCL_CONNECT_TIMEOUT):")
    assert "  rank 0 on host node0: came (machine " in text
    assert "  rank 1 on host node0: missing\n" in text
    assert "  rank 2 on host node0: came (machine " in text
    assert "What to do:" in text


def test_a_rank_that_came_and_died(start: Any, tmp_path: Path) -> None:
    ranks = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="4")) for rank in range(2)]
    wait_until_connected(tmp_path, 2)
    ranks[1].process.kill()
    text = one_error(ranks[:1])
    assert f"rank 1 on host node0: missing; it came, but left before the end (machine {socket.gethostname()}" in text
    assert f"pid {ranks[1].process.pid})" in text


def test_a_rank_that_died_may_come_again(start: Any, tmp_path: Path) -> None:
    first = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="20")) for rank in (0, 1)]
    wait_until_connected(tmp_path, 2)
    first[1].process.kill()
    again = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="20")) for rank in (1, 2)]
    assert [rank.report()["cluster"]["rank"] for rank in (first[0], *again)] == [0, 1, 2]


@pytest.mark.parametrize("doubled", [0, 1])
def test_doubled(doubled: int, start: Any, tmp_path: Path) -> None:
    # A third rank that never comes keeps the job from being complete before the doubled one is there.
    ranks = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="30")) for rank in (0, 1, doubled)]
    text = one_error(ranks)
    assert text.startswith("the ranks that came to job 'tests' don't match (doubled rank):")
    assert text.count(f"  rank {doubled} on host node0: doubled (machine ") == 2
    assert text.count(": came (machine ") == 1
    assert "  rank 2 on host node0: missing" in text
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
    ranks = [
        start({**without_table(port, size, device), "HCCL_CONNECT_TIMEOUT": "30"}) for device, size in ((0, 2), (1, 3))
    ]
    text = one_error(ranks)
    assert "don't match (another world size)" in text
    assert "  device 0 on host 127.0.0.1: came (" in text
    assert "  device 1 on host 127.0.0.1: another world size, 3 (the chief: 2) (machine " in text


@pytest.mark.parametrize("package", ["npu_device", "tensorflow"])
def test_another_version(package: str, start: Any, tmp_path: Path) -> None:
    usual = {"npu_device": "1.0", "tensorflow": "2.20.0"}
    ranks = [
        start(by_table(tmp_path, 2, rank, HCCL_CONNECT_TIMEOUT="30"), {**usual, package: f"2.{rank}"})
        for rank in range(2)
    ]
    text = one_error(ranks)
    assert "don't match (another version)" in text
    assert f"  rank 1 on host node0: another version, {package} 2.1 (the chief: 2.0) (machine " in text
    assert "install the same versions" in text


def test_another_setting(start: Any, tmp_path: Path) -> None:
    settings: list[dict[str, str]] = [{"NPU_DEVICE_SPLIT": ""}, {"NPU_DEVICE_AUDIT": "off", "NPU_DEVICE_SPLIT": "1, 3"}]
    text = one_error([start(by_table(tmp_path, 2, rank, **settings[rank])) for rank in range(2)])
    assert "don't match (another setting)" in text
    assert "  rank 1 on host node0: another setting, NPU_DEVICE_AUDIT off (the chief: default); another" in text
    assert "NPU_DEVICE_SPLIT (1, 3) (the chief: default) (machine " in text
    assert "give these environment variables the same value on all ranks" in text


def test_the_same_settings_written_otherwise(start: Any, tmp_path: Path) -> None:
    settings = [{"NPU_DEVICE_AUDIT": "auto", "NPU_DEVICE_SPLIT": "1,3"}, {"NPU_DEVICE_SPLIT": "1, 3 "}]
    ranks = [start(by_table(tmp_path, 2, rank, **settings[rank])) for rank in range(2)]
    assert [rank.report()["cluster"]["rank"] for rank in ranks] == [0, 1]


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
    assert "  rank 1 on host node0: missing\n" in text
    assert f"  rank 1 of another job, 'other': refused (machine {socket.gethostname()}, pid {stray.process.pid}" in text


def test_the_refused_job_does_not_disturb_the_first(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20"))
    stray = start(by_table(tmp_path, 2, 1, JOB_ID="other", HCCL_CONNECT_TIMEOUT="20"))
    assert "error" in stray.report()
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20"))
    assert "cluster" in chief.report()
    assert "cluster" in other.report()


# The chief can't be found, or can't listen


def test_no_chief(start: Any, tmp_path: Path) -> None:
    text = one_error([start(by_table(tmp_path, 2, 1))])
    assert text.startswith("EI0015: rank 1 of job 'tests' (machine ")
    assert "got no answer from the chief, rank 0 on host node0, within 2 s (HCCL_CONNECT_TIMEOUT):" in text
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
            assert ("another program answers there" if says else "no answer: another program, or one") in text
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
    connect(("127.0.0.1", the_port(tmp_path))).close()
    second = start(by_table(tmp_path, 2, 0, JOB_ID="other", HCCL_CONNECT_TIMEOUT="60"))
    text = second.report()["error"]
    assert text.startswith("rank 0 of job 'other' came to the meeting point of another job, 'tests'")
    assert "rank 0 of another job, 'other': refused" in one_error([first])
