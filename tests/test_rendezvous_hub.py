"""Signals during the rendezvous, processes that stand still, and how long the hub lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launcher import is_running, wait_until
from ranks import clean_environment
from rendezvous_ranks import (
    LIMIT,
    Rank,
    by_table,
    by_tf_config,
    one_error,
    started,
    wait_until_connected,
)

from npu_device._src.testing import leaks

pytestmark = pytest.mark.xdist_group("waiting")
start = pytest.fixture(started, name="start")


# Signals


def test_interrupted(start: Any, tmp_path: Path) -> None:
    """Ctrl-C on the chief ends it at once, not after HCCL_CONNECT_TIMEOUT, and the others hear of it."""
    chief, other = (start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="60")) for rank in range(2))
    wait_until_connected(tmp_path, 2)
    chief.process.send_signal(signal.SIGINT)
    _, errors = chief.process.communicate(timeout=LIMIT)
    assert "KeyboardInterrupt" in errors
    assert "stopped while the ranks were meeting: KeyboardInterrupt()" in other.report()["error"]


def test_interrupted_on_the_way(start: Any, tmp_path: Path) -> None:
    environments = (by_table(tmp_path, 2, 1), by_tf_config(29688, 2, 1, "nobody.invalid"))
    ranks = [start({**environment, "HCCL_CONNECT_TIMEOUT": "60"}) for environment in environments]
    time.sleep(1.5)
    for rank in ranks:
        rank.process.send_signal(signal.SIGINT)
    for rank in ranks:
        _, errors = rank.process.communicate(timeout=LIMIT)
        assert "KeyboardInterrupt" in errors


@pytest.mark.slow
def test_a_hub_that_stands_still(start: Any, tmp_path: Path) -> None:
    chief, other = (start(by_table(tmp_path, 3, rank, HCCL_CONNECT_TIMEOUT="4")) for rank in range(2))
    wait_until_connected(tmp_path, 2)
    [hub] = leaks.children_of(chief.process.pid)
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
    while not (children := leaks.children_of(rank.process.pid)):
        assert time.monotonic() < until
        time.sleep(0.02)
    return next(iter(children))


def test_the_hub_ends_with_its_job(start: Any, tmp_path: Path) -> None:
    """And nothing on its command line tells the secret."""
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="0f1e2d"))
    hub = _hub_of(chief)
    assert "0f1e2d" not in Path(f"/proc/{hub}/cmdline").read_text()
    assert not any(name in Path(f"/proc/{hub}/maps").read_text() for name in ("numpy", "tensorflow"))
    other = start(by_table(tmp_path, 2, 1, HCCL_CONNECT_TIMEOUT="20", NPU_DEVICE_SECRET="0f1e2d"))
    assert "cluster" in chief.report()
    assert "cluster" in other.report()
    wait_until(lambda: not is_running(hub), 5)


def test_the_hub_ends_when_its_starter_is_killed(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0, HCCL_CONNECT_TIMEOUT="60"))
    hub = _hub_of(chief)
    chief.process.kill()
    wait_until(lambda: not is_running(hub), 5)


def test_the_hub_ends_when_nobody_comes(start: Any, tmp_path: Path) -> None:
    chief = start(by_table(tmp_path, 2, 0))
    hub = _hub_of(chief)
    one_error([chief])
    wait_until(lambda: not is_running(hub), 8)


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
