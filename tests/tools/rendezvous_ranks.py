"""Ranks for the tests of the rendezvous: real processes that meet, by each scheme, and say what came of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher import wait_until
from ranks import clean_environment, table_environment

from npu_device._src.testing import leaks

WORKER = Path(__file__).with_name("rendezvous_worker.py")
TIMEOUT = "2"
PATIENT = {"HCCL_CONNECT_TIMEOUT": "12"}  # where all ranks come, on a machine that is busy
# What a test of a failure may take: the time-out, starting Python, and a machine that is busy.
LIMIT = 15.0


class Rank:
    """A process that goes to the rendezvous, with installed versions of its own."""

    def __init__(self, environment: dict[str, str], versions: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(versions)],
            env={**clean_environment(), "HCCL_CONNECT_TIMEOUT": TIMEOUT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hub(self) -> int:
        """Return the process of the hub that this rank starts."""
        wait_until(lambda: bool(leaks.children_of(self.process.pid)))
        return next(iter(leaks.children_of(self.process.pid)))

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
    """Starts ranks, and kills those that are still there at the end."""
    ranks: list[Rank] = []

    def begin(*of_rank: Any) -> Rank:
        ranks.append(Rank(*of_rank))
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
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        )
    }


def one_error(ranks: list[Rank]) -> str:
    """The error that all of them got, with the same text."""
    text, *others = (rank.report()["error"] for rank in ranks)
    assert others == [text] * len(others)
    return str(text)


def wait_for(directory: Path, count: int) -> None:
    """Wait until ``count`` ranks have connected to the hub, and give them the time to say hello."""
    port = f":{the_port(directory):04X}"

    def connected() -> bool:
        rows = [
            row.split()
            for table in ("tcp", "tcp6")
            for row in Path(f"/proc/net/{table}").read_text().splitlines()
        ]
        return sum(row[2].endswith(port) and row[3] == "01" for row in rows) >= count

    wait_until(connected)
    time.sleep(0.5)


def connect(address: tuple[str, int], source: str = "") -> socket.socket:
    """Connect to a hub that may not listen yet, from an address of this host."""
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address, source_address=(source, 0) if source else None)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.05)
