"""Faults of the network between a rank and the hub, made by a proxy: delayed, cut, reset and half-closed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import job
import pytest
from ranks import free_port
from rendezvous_ranks import without_table

from npu_device._src.testing.forked import Process
from npu_device._src.testing.soak.proxy import Proxy

pytestmark = pytest.mark.xdist_group("waiting")

SCRIPT = """
import os, sys, time
import tensorflow as tf
import npu_device as npu
rank = npu.open().worker_id
one = tf.constant(1.0)
npu.distribute.all_reduce(one, "sum")
try:
    for _ in range(int(sys.argv[1])):
        npu.distribute.broadcast_object("something", root_rank=0)
        print("went on", flush=True)
        time.sleep(0.1)
finally:
    print("ended", time.monotonic(), flush=True)
""".replace("int(sys.argv[1])", "{steps}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], tuple[Proxy, list[Process]]]]:
    """Start two ranks, of which rank 1 reaches the hub through a proxy, and wait until they train."""
    proxies = []

    def begin(steps: int) -> tuple[Proxy, list[Process]]:
        port = free_port()
        proxy = Proxy("127.0.0.1", port)
        proxies.append(proxy)
        places = [without_table(to, 2, rank) for rank, to in enumerate((port, proxy.port))]
        processes = job.start_each(tmp_path, SCRIPT.format(steps=steps), places)
        job.wait_for(processes, "went on")
        return proxy, processes

    yield begin
    for proxy in proxies:
        proxy.close()


@pytest.mark.slow
def test_a_slow_control_channel_is_only_slow(start: Callable[..., tuple[Proxy, list[Process]]]) -> None:
    proxy, processes = start(30)
    proxy.delay = 0.3
    for result in job.finish(processes):
        assert result.code == 0, result.output


def test_a_short_cut_harms_nobody(start: Callable[..., tuple[Proxy, list[Process]]]) -> None:
    proxy, processes = start(30)
    proxy.drop()
    time.sleep(2)
    proxy.resume()
    for result in job.finish(processes):
        assert result.code == 0, result.output


@pytest.mark.parametrize("fault", ["reset", "half_close"])
def test_a_lost_control_channel_is_an_error_on_both_sides(
    start: Callable[..., tuple[Proxy, list[Process]]], fault: str
) -> None:
    proxy, processes = start(10_000)
    getattr(proxy, fault)()
    first, second = job.finish(processes, timeout=20)
    assert (first.code, second.code) == (1, 1), first.output + second.output
    assert "rank 1 on host" in first.output and "is gone" in first.output
    assert "the hub of the job" in second.output
    for result in (first, second):  # npurun never takes it for a bug of the script
        assert "PeerError: " in result.output
