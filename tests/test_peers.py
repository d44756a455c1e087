"""The ranks' direct connections: who may send, and what happens when one is lost."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from typing import Callable

import pytest
import tensorflow as tf
from pool import Pool
from ranks import all_through

import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from npu_device._src.cluster import frames
from npu_device._src.cluster.handshake import AttemptFailedError, TimedConnection, authenticate
from npu_device._src.collectives.job import current

_SHARED = pytest.mark.xdist_group("point to point")  # whose process has such ranks


def body_strangers() -> tuple[list[bool], list[float]]:
    """Let strangers connect to this rank; return whether each was turned away, and sums after that."""
    running = current()
    host, _, port = running.peers.addresses[running.cluster.rank].rpartition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    turned_away = [soft == hard]  # as many connections as the system allows
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\2{}",
        frames.encode({"npu_device": 2, "nonce": 7}),
        None,
    ):
        with socket.create_connection((host, int(port)), 10) as stranger:
            if said is None:
                with pytest.raises(AttemptFailedError):
                    authenticate(
                        TimedConnection(stranger), b"a wrong secret", rank=1 - running.cluster.rank
                    )
                turned_away.append(True)
            else:
                stranger.sendall(said)
                turned_away.append(stranger.recv(1) == b"")
    return turned_away, npu.distribute.all_reduce(tf.ones([2]), "sum").numpy().tolist()


def test_strangers_are_turned_away(tensorflow_ranks: Pool) -> None:
    for turned_away, sums in tensorflow_ranks.run(body_strangers):
        assert turned_away == [True] * 5
        assert sums == [tensorflow_ranks.size] * 2


def body_group_made_again() -> float:
    """Let rank 0 use a group that it has made again, before the others destroy the first one; return a sum of it."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    sums: list[float] = []

    def add_up() -> None:
        sums.append(float(npu.distribute.all_reduce(tf.constant(1.0), "sum", group="again")))

    def make_again() -> None:
        destroy_group("again")
        create_group("again", size, list(range(size)))
        thread.start()

    thread = threading.Thread(target=add_up, name="of the group")
    create_group("again", size, list(range(size)))
    npu.distribute.all_reduce(tf.constant(1.0), "sum", group="again")
    if rank == 0:
        make_again()
        time.sleep(0.5)  # its message is on its way
    npu.distribute.all_reduce(tf.constant(1.0), "sum")  # the others read it, before this one
    if rank > 0:
        make_again()
    thread.join()
    destroy_group("again")
    return sums[0]


@_SHARED
def test_messages_for_a_group_that_is_made_again_are_kept(pool_with: Callable[..., Pool]) -> None:
    assert (
        pool_with(3, "3", **all_through("tcp")).run(body_group_made_again, timeout=30) == [3.0] * 3
    )


def body_lost(elements: int) -> tuple[str, float]:
    """Close this rank's connections behind its back: those for messages, or of a group; return the error of the next
    sum, and how long it took.
    """
    running = current()
    npu.distribute.all_reduce(tf.ones([elements]), "sum")
    began = time.monotonic()
    for connection in running.peers.owned_connections:
        if connection.fileno() >= 0:
            connection.shutdown(socket.SHUT_RDWR)
    try:
        npu.distribute.all_reduce(tf.ones([elements]), "sum")
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize("elements", [200, 300_000])
def test_a_lost_connection_is_an_error_on_both_sides(elements: int) -> None:
    with contextlib.closing(Pool(2, "3", **all_through("tcp"))) as pool:
        results = pool.run(body_lost, elements)
    for rank, (error, seconds) in enumerate(results):
        assert f"has lost its connection to rank {1 - rank} on host" in error
        assert "NPU_DEVICE_PORT_RANGE" in error
        assert seconds < 20


def body_deliver() -> tuple[int, float]:
    """Let rank 0 send as much as the kernel takes, and rank 1 read it a second later; return the number of bytes, and
    when rank 0 knew that they had arrived, or rank 1 began to read.
    """
    peers, total = current().peers, 0
    if npu.distribute.rank() == 0:
        with peers.connect(1, 77) as connection:
            with contextlib.suppress(BlockingIOError):
                while True:
                    total += connection.send(bytes(1 << 20))
            npu.distribute.broadcast_object("sent", root_rank=0)
            peers.deliver()
            return total, time.monotonic()
    npu.distribute.broadcast_object(None, root_rank=0)
    time.sleep(1)
    began = time.monotonic()
    with peers.accept(0, 77, lambda: False) as arrived:
        arrived.settimeout(30)
        while data := arrived.recv(1 << 20):
            total += len(data)
    return total, began


@_SHARED
def test_a_rank_waits_until_the_others_hosts_have_what_it_sent(
    pool_with: Callable[..., Pool],
) -> None:
    (sent, delivered_at), (received, read_at) = pool_with(2, "3", **all_through("tcp")).run(
        body_deliver
    )
    assert sent == received > 0
    assert delivered_at > read_at


def body_waiting() -> int:
    """Return how often a rank that waits half a second for a connection looks for it."""
    running, looks, until = current(), [0], time.monotonic() + 0.5

    def gives_up() -> bool:
        looks[0] += 1
        return time.monotonic() > until

    assert running.peers.accept(1 - running.cluster.rank, 79, gives_up) is None
    return looks[0]


@_SHARED
def test_a_rank_that_waits_for_a_connection_sleeps(pool_with: Callable[..., Pool]) -> None:
    for looks in pool_with(2, "3", **all_through("tcp")).run(body_waiting):
        assert 2 <= looks < 20  # not one each millisecond
