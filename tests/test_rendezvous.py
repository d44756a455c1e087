"""The rendezvous, with real processes and sockets: ranks that find each other, and what can keep them from it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import Any

import job
import pytest
from launcher import is_running, wait_until
from ranks import free_port, time_limits
from rendezvous_ranks import (
    PATIENT,
    by_table,
    by_tf_config,
    connect,
    one_error,
    the_port,
    wait_for,
    without_table,
)

from npu_device._src.cluster.ports import ReservedPort

pytestmark = pytest.mark.xdist_group("waiting")


# They find each other


@pytest.mark.parametrize(
    ("scheme", "host"),
    [
        ("rank table", "node0"),
        ("CM_*", "127.0.0.1"),
        ("CM_* IPv6", "::1"),
        ("TF_CONFIG", "localhost"),
    ],
)
def test_they_find_each_other(scheme: str, host: str, start: Any, tmp_path: Path) -> None:
    """The chief comes last; settings are the same however they are written."""
    port = free_port()
    settings = [
        {"NPU_DEVICE_AUDIT": "auto", "NPU_DEVICE_SPLIT": "1,3"},
        {"NPU_DEVICE_SPLIT": "1, 3 "},
    ]
    ranks = []
    for rank in (1, 0):
        variables = {
            "rank table": by_table(tmp_path, 2, rank),
            "CM_*": {**without_table(port, 2, rank), "CM_WORKER_IP": ""},
            "CM_* IPv6": without_table(port, 2, rank, "::1"),
            "TF_CONFIG": by_tf_config(port, 2, rank),
        }
        ranks.append(start({**variables[scheme], **settings[rank], **PATIENT}))
        time.sleep(0.3)
    for rank, cluster in enumerate(rank.report()["cluster"] for rank in reversed(ranks)):
        assert (cluster["rank"], cluster["world_size"]) == (rank, 2)
        assert (cluster["local_rank"], cluster["local_size"], cluster["device_id"]) == (
            rank,
            2,
            rank,
        )
        assert (cluster["host"], cluster["hosts"]) == (host, [host] * 2)
        assert cluster["job_id"] == ("tests" if scheme == "rank table" else "default")
        assert cluster["addresses"] == ["::1" if "IPv6" in scheme else "127.0.0.1"] * 2


def test_ranks_are_numbered_by_address_and_device(start: Any) -> None:
    """Addresses count as numbers: 127.0.0.9 goes before 127.0.0.10. The chief isn't rank 0 here."""
    port = free_port()
    places = {1: "127.0.0.9", 0: "127.0.0.10", 2: "127.0.0.10"}
    variables = [
        {**without_table(port, 3, device), "CM_WORKER_IP": ip} for device, ip in places.items()
    ]
    ranks = [start({**each, "CM_CHIEF_IP": "127.0.0.10"}) for each in variables]
    clusters = [rank.report()["cluster"] for rank in ranks]
    assert [cluster["rank"] for cluster in clusters] == [0, 1, 2]
    assert [cluster["local_rank"] for cluster in clusters] == [0, 0, 1]
    assert (
        clusters[0]["hosts"]
        == clusters[0]["addresses"]
        == ["127.0.0.9", "127.0.0.10", "127.0.0.10"]
    )


def test_a_table_of_two_servers(start: Any, tmp_path: Path) -> None:
    """The first address of the chief isn't known anywhere, the second is."""
    devices: list[dict[str, str]] = [{"device_id": "0", "rank_id": str(rank)} for rank in range(2)]
    devices[0]["host_port"] = str(free_port())
    first = {"server_id": "127.0.0.1", "host_ip": "nobody.invalid", "device": devices[:1]}
    table = {
        "version": "1.0",
        "status": "completed",
        "server_list": [first, {"server_id": "b", "device": devices[1:]}],
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    variables = {"RANK_TABLE_FILE": str(path), "RANK_SIZE": "2", **PATIENT}
    clusters = [
        rank.report()["cluster"]
        for rank in [start({**variables, "RANK_ID": each}) for each in ("0", "1")]
    ]
    assert clusters[1]["hosts"] == ["127.0.0.1", "b"]
    assert [cluster["local_size"] for cluster in clusters] == [1, 1]
    assert clusters[1]["addresses"] == ["127.0.0.1"] * 2


@pytest.mark.parametrize("ports", [None, (61300, 61331)])
def test_the_port_can_be_bound_and_is_given_to_nobody_else(ports: tuple[int, int] | None) -> None:
    with contextlib.ExitStack() as opened:
        reserved, second = (
            opened.enter_context(contextlib.closing(ReservedPort(ports))) for _ in range(2)
        )
        second.close()
        reserved.leave_to_server()
        others = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(200)]
        assert reserved.number not in {second.number, *(other.getsockname()[1] for other in others)}
        # As gRPC does it
        opened.enter_context(
            socket.create_server(
                ("::", reserved.number), family=socket.AF_INET6, dualstack_ipv6=True
            )
        )


def test_a_free_port_is_held_for_its_server() -> None:
    port = free_port()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    socket.create_server(("127.0.0.1", port)).close()


# They don't


def test_missing_ranks_are_named_and_the_hub_ends(start: Any, tmp_path: Path) -> None:
    """The hub ends, too."""
    chief, other = (start(by_table(tmp_path, 3, rank)) for rank in (0, 2))
    hub = chief.hub()
    text = one_error([chief, other])
    assert text.startswith(
        "EI0015: 1 of the 3 ranks of job 'tests' did not come within 2 s (HCCL_CONNECT_TIMEOUT):"
    )
    assert "  rank 0 on host node0: came (machine " in text
    assert "  rank 1 on host node0: missing\n" in text
    assert "  rank 2 on host node0: came (machine " in text
    assert "What to do:" in text
    wait_until(lambda: not is_running(hub), 8)


def test_a_rank_that_came_and_died(start: Any, tmp_path: Path) -> None:
    ranks = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="3")) for rank in range(2)]
    wait_for(tmp_path, 2)
    ranks[1].process.kill()
    text = one_error(ranks[:1])
    assert (
        f"rank 1 on host node0: missing; it came, but left before the end (machine {socket.gethostname()}"
        in text
    )
    assert f"pid {ranks[1].process.pid})" in text


def test_a_rank_that_died_may_come_again(start: Any, tmp_path: Path) -> None:
    first = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="20")) for rank in (0, 1)]
    wait_for(tmp_path, 2)
    first[1].process.kill()
    again = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="20")) for rank in (1, 2)]
    assert [rank.report()["cluster"]["rank"] for rank in (first[0], *again)] == [0, 1, 2]


def test_a_doubled_chief(start: Any, tmp_path: Path) -> None:
    # A third rank that never comes keeps the job from being complete before the doubled one is there.
    ranks = [start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="30")) for rank in (0, 1, 0)]
    text = one_error(ranks)
    assert text.startswith("the ranks that came to job 'tests' don't match (doubled rank):")
    assert text.count("  rank 0 on host node0: doubled (machine ") == 2
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


def test_ranks_that_differ(start: Any, tmp_path: Path) -> None:
    chief = by_table(
        tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="30", JOB_ID="default", NPU_DEVICE_SPLIT=""
    )
    other = {
        **by_tf_config(the_port(tmp_path), 3, 1),
        "NPU_DEVICE_AUDIT": "off",
        "NPU_DEVICE_SPLIT": "1, 3",
    }
    versions = [{"npu_device": "1.0", "tensorflow": f"2.{rank}"} for rank in range(2)]
    text = one_error([start(chief, versions[0]), start(other, versions[1])])
    assert (
        "don't match (another scheme, another world size, another version, another setting)" in text
    )
    assert "  rank 0 on host node0: came (" in text
    assert "  rank 1 on host localhost: another scheme, TF_CONFIG (the chief: rank table); " in text
    assert (
        "; another world size, 3 (the chief: 2); another version, tensorflow 2.1 (the chief: 2.0); "
        in text
    )
    assert "; another setting, NPU_DEVICE_AUDIT off (the chief: default); another" in text
    assert "NPU_DEVICE_SPLIT (1, 3) (the chief: default) (machine " in text
    for remedy in (
        "start all with the same RANK_SIZE",
        "install the same versions",
        "the same value on all ranks",
    ):
        assert remedy in text


def test_a_rank_of_another_job_is_refused_and_disturbs_nobody(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20"))
    wait_for(tmp_path, 1)
    text = start(by_table(tmp_path, 2, 1, JOB_ID="other", HCCL_CONNECT_TIMEOUT="20")).report()[
        "error"
    ]
    assert text.startswith(
        "rank 1 of job 'other' came to the meeting point of another job, 'tests'"
    )
    assert f"pid {chief.process.pid}" in text
    assert "JOB_ID" in text
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20"))
    assert "cluster" in chief.report() and "cluster" in other.report()


# The chief can't be found, or can't listen


def test_a_chief_that_cannot_be_reached_is_named(start: Any, tmp_path: Path) -> None:
    ranks = [start(by_table(tmp_path, 2, 1)), start(by_tf_config(29688, 2, 1, "nobody.invalid"))]
    text, unresolvable = (rank.report()["error"] for rank in ranks)
    assert text.startswith("EI0015: rank 1 of job 'tests' (machine ")
    assert (
        "got no answer from the chief, rank 0 on host node0, within 2 s (HCCL_CONNECT_TIMEOUT):"
        in text
    )
    assert f"  127.0.0.1:{the_port(tmp_path)} refused: nothing listens there\n" in text
    assert "What to do:" in text
    # The last attempt may begin when hardly any time is left.
    reasons = ("the name can't be resolved (", "the name could not be resolved in time")
    assert any(f"  nobody.invalid:29688 {reason}" in unresolvable for reason in reasons)


class _Web(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1000)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


class _WebServer(socketserver.TCPServer):
    allow_reuse_address = True  # this process holds the port


def test_somebody_else_at_the_chiefs_place(start: Any, tmp_path: Path) -> None:
    """A rank looks on until its time has passed; the chief sees at once that its port is taken."""
    environment, silent = (
        by_table(tmp_path, 2, 1),
        socket.create_server(("127.0.0.1", 0)),
    )  # accepts no connection
    with silent, _WebServer(("127.0.0.1", the_port(tmp_path)), _Web) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            rank, chief = (
                start(environment),
                start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="60")),
            )
            waiting = start(by_tf_config(silent.getsockname()[1], 2, 1, "127.0.0.1"))
            assert "another program answers there" in rank.report()["error"]
            assert "no answer: another program, or one" in waiting.report()["error"]
            text = chief.report()["error"]
            assert text.startswith(
                f"EI0019: the ranks are to meet at 127.0.0.1:{the_port(tmp_path)} on "
            )
            assert "What to do: end the other program, or choose another port" in text
        finally:
            web.shutdown()
            thread.join()


def test_two_jobs_on_one_port(start: Any, tmp_path: Path) -> None:
    first = start(by_table(tmp_path, 2, 0))
    connect(("127.0.0.1", the_port(tmp_path))).close()
    second = start(by_table(tmp_path, 2, 0, JOB_ID="other", HCCL_CONNECT_TIMEOUT="60"))
    text = second.report()["error"]
    assert text.startswith(
        "rank 0 of job 'other' came to the meeting point of another job, 'tests'"
    )
    refused = f"rank 0 of another job, 'other': refused (machine {socket.gethostname()}, pid {second.process.pid}"
    assert refused in one_error([first])


def test_ctrl_c_ends_a_rank_at_once(start: Any, tmp_path: Path) -> None:
    """Ctrl-C ends a rank at once, not after HCCL_CONNECT_TIMEOUT; if it is the chief, the others hear of it."""
    chief, other = (
        start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="60")) for rank in range(2)
    )
    lost = start({**by_tf_config(29688, 2, 1, "nobody.invalid"), "HCCL_CONNECT_TIMEOUT": "60"})
    wait_for(tmp_path, 2)
    for rank in (lost, chief):
        rank.process.send_signal(signal.SIGINT)
        _, errors = rank.process.communicate(timeout=15)
        assert "KeyboardInterrupt" in errors
    assert "stopped while the ranks were meeting: KeyboardInterrupt()" in other.report()["error"]


def test_a_hub_that_stands_still(start: Any, tmp_path: Path) -> None:
    limits = {"HCCL_CONNECT_TIMEOUT": "3", **time_limits(VERDICT_MARGIN_SECONDS=0.5)}
    ranks = [start(by_table(tmp_path, 3, rank, **limits)) for rank in range(2)]
    wait_for(tmp_path, 2)
    hub = ranks[0].hub()
    os.kill(hub, signal.SIGSTOP)
    for rank in ranks:
        assert "the chief accepted this rank, and then sent nothing more" in rank.report()["error"]
    os.kill(hub, signal.SIGKILL)


def test_the_hub_ends_with_its_job_or_its_starter(start: Any, tmp_path: Path) -> None:
    """And nothing on its command line tells the secret."""
    killed = start({**by_tf_config(free_port(), 2, 0), "HCCL_CONNECT_TIMEOUT": "60"})
    hubs = [killed.hub()]
    killed.process.kill()
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="0f1e2d"))
    hubs.append(hub := chief.hub())
    assert "0f1e2d" not in Path(f"/proc/{hub}/cmdline").read_text()
    assert not any(
        name in Path(f"/proc/{hub}/maps").read_text() for name in ("numpy", "tensorflow")
    )
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="0f1e2d"))
    assert "cluster" in chief.report() and "cluster" in other.report()
    wait_until(lambda: not any(map(is_running, hubs)), 5)


def test_two_jobs_one_after_the_other(start: Any, tmp_path: Path) -> None:
    """The next job's ranks wait for the hub of the last one."""
    channels = """
import sys, time
from npu_device._src.membership.schemes import membership_from_environment
from npu_device._src.cluster.rendezvous import meet
for number in range(2):
    cluster, channel = meet(membership_from_environment())
    print(number, cluster.rank, flush=True)
    if cluster.rank == 1:
        time.sleep(0.5)  # rank 0 is at the next meeting meanwhile
    channel.close()
"""
    more = {"HCCL_CONNECT_TIMEOUT": "20", **time_limits(FIRST_PROGRESS_SECONDS=0.1)}
    variables = [by_table(tmp_path, 2, rank, **more) for rank in range(2)]
    ended = job.run_anew([[sys.executable, "-c", channels]] * 2, variables)
    numbers = [re.findall(r"^\d \d$", rank.output, re.MULTILINE) for rank in ended]
    assert numbers == [["0 0", "1 0"], ["0 1", "1 1"]]
    wait = (
        f"waits for its port: 127.0.0.1:{the_port(tmp_path)} the ranks of this job have met already"
    )
    assert wait in ended[0].output
