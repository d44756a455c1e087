"""npurun --max-restarts and --nnodes MIN:MAX on several nodes: launchers on the loopback that act together."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest
from launcher import script, start, wait_until
from ranks import free_port, time_limits

from npu_device._src.testing import hosts
from npu_device.launch.node_protocol import (
    AttemptPlan,
    JobEnd,
    Link,
    NodeHello,
    NodeOutcome,
    StopOrder,
    serve,
)

pytestmark = pytest.mark.xdist_group("waiting")

LIMIT = 120.0

# A job of ranks that wait for each other through files, without npu_device: "ready.<count>.<rank>".
TOGETHER = """
    import os, pathlib, signal, sys, time
    here = pathlib.Path(sys.argv[1])
    count, rank, size = (int(os.environ[n]) for n in ("NPU_DEVICE_RESTART_COUNT", "RANK_ID", "RANK_SIZE"))
    def mark(name, text=""):
        (here / (name + ".part")).write_text(text)
        (here / (name + ".part")).rename(here / name)
    def all_are(name):
        while len(list(here.glob(f"{name}.{count}.*[0-9]"))) < size:
            time.sleep(0.02)
    mark(f"ready.{count}.{rank}", os.environ["JOB_ID"] + " " + os.environ["NPU_DEVICE_HUB"])
    all_are("ready")
"""
FIRST_WAITS = """
    if count == 0:
        time.sleep(100)
"""


class Nodes:
    """Launchers of one job, each as a node of its own."""

    def __init__(
        self,
        directory: Path,
        text: str,
        *options: str,
        nnodes: str = "2",
        address: str = "127.0.0.1",
    ) -> None:
        self.here = directory
        self.port = free_port()
        meeting = ["--nnodes", nnodes, "--master-addr", address, "--master-port", str(self.port)]
        self._common = [*meeting, "--restart-backoff", "0.1", *options]
        self._script = script(directory, TOGETHER + text)
        self._launches: list[subprocess.Popen[bytes]] = []

    def start(
        self, node: int, *options: str, on: Callable[[list[str]], list[str]] = list, **limits: float
    ) -> subprocess.Popen[bytes]:
        launch = start(
            *self._common,
            *("--node-rank", str(node), *options, self._script, str(self.here)),
            on=on,
            **time_limits(RANKS_NOTICE_SECONDS=0.2, **limits),
            NPU_DEVICE_SECRET="ours",
        )
        self._launches.append(launch)
        return launch

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for launch in self._launches:
            if launch.poll() is None:
                os.killpg(launch.pid, signal.SIGKILL)
            stdout, stderr = (
                launch.communicate()
            )  # nothing if it has been read; pytest shows it with a failure
            print((stdout + stderr).decode())

    def wait_for(self, *names: str) -> None:
        for name in names:
            wait_until((self.here / name).exists, LIMIT)


def ends(launch: subprocess.Popen[bytes], code: int) -> str:
    """Wait for the end of a launcher, which is to have this exit code; return what it has said."""
    stderr = launch.communicate(timeout=LIMIT)[1].decode()
    assert launch.returncode == code, stderr
    return stderr


@pytest.mark.parametrize(("node", "is_killed"), [(0, True), (1, True), (1, False)])
def test_a_killed_launcher_that_is_started_again_joins_again(
    tmp_path: Path, node: int, is_killed: bool
) -> None:
    """And so does another one that takes the place of a running one."""
    with Nodes(tmp_path, FIRST_WAITS, "--max-restarts", "2") as nodes:
        both = [nodes.start(node) for node in (0, 1)]
        nodes.wait_for("ready.0.0", "ready.0.1")
        if is_killed:
            os.killpg(both[node].pid, signal.SIGKILL)
        again = nodes.start(node)
        if not is_killed:
            stderr = ends(both[node], 2)
            assert "npurun: another npurun was started as node 1\n" in stderr
        for launch in (both[1 - node], again):
            stderr = ends(launch, 0)
            assert f"node {node}" in stderr or launch is again, stderr
            assert is_killed or "node 1 was started again" in stderr
    told = [
        {(tmp_path / f"ready.{count}.{rank}").read_text() for rank in (0, 1)} for count in (0, 1)
    ]
    assert len(told[0]) == len(told[1]) == 1, "all ranks have the same job and hub"
    (first,), (second,) = told
    assert first.split()[0] != second.split()[0] and first.split()[1] != second.split()[1]


@contextlib.contextmanager
def node_1_of(nodes: Nodes) -> Iterator[tuple[subprocess.Popen[bytes], Link]]:
    """Start node 1, to which the test is node 0; yield its launcher, and the connection to it."""
    links: queue.SimpleQueue[Link] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", nodes.port)) as listener:
        serving = threading.Thread(target=serve, args=(listener, b"ours", links.put))
        serving.start()
        try:
            launch = nodes.start(1)
            link = links.get(timeout=LIMIT)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()
        link.connection.settimeout(LIMIT)
        yield launch, link
        link.close()


def plan(*copies: str) -> AttemptPlan:
    """The order of the first attempt, given where the nodes take copies in memory: host and port."""
    return AttemptPlan(0, (0, 1), "job", free_port(), copies)


def test_a_node_stops_an_attempt_that_it_is_told_to_begin_and_to_stop_at_once(
    tmp_path: Path,
) -> None:
    """Both messages come before the node has handled the first one."""
    with (
        Nodes(tmp_path, "    time.sleep(100)", "--max-restarts", "1") as nodes,
        node_1_of(nodes) as (launch, link),
    ):
        messages = link.messages()
        hello = next(messages)
        assert isinstance(hello, NodeHello) and hello.node == 1
        link.send(plan(" 1", " 1"))
        link.send(StopOrder("a rank failed"))
        outcome = next(messages)
        link.send(JobEnd(1, ""))
        assert "npurun: a rank failed; stopping the ranks of this node" in ends(launch, 1)
    assert isinstance(outcome, NodeOutcome)


COPIES = """
    from npu_device._src import environment
    from npu_device._src.training.checkpoint.memory_slots import open_slots

    [slot, _], _ = open_slots(environment.NPU_DEVICE_MEMORY_COPIES.get())
    header = {"attempt": 0, "step": 1, "rank": 1, "directory": "", "records": []}
    slot.write(header, [])
    while slot.is_unsent:
        time.sleep(0.02)
    os.ftruncate(slot.descriptor, 0)  # nothing is left to be written before npurun ends
"""


def test_a_node_goes_on_beside_one_that_takes_no_copies(tmp_path: Path) -> None:
    with (
        Nodes(tmp_path, COPIES, "--max-restarts", "1") as nodes,
        node_1_of(nodes) as (launch, link),
    ):
        (tmp_path / "ready.0.0").touch()
        messages = link.messages()
        next(messages)
        link.send(plan(" ", "127.0.0.1 "))
        outcome = next(messages)
        link.send(JobEnd(0, ""))
        assert "copies" not in ends(launch, 0)
    assert outcome == NodeOutcome(0)


def test_a_node_that_waits_for_a_stopped_node_0_gives_up(tmp_path: Path) -> None:
    options = ("--max-restarts", "1", "--restart-backoff", "60", "--rejoin-timeout", "1")
    with Nodes(tmp_path, "    os._exit(3 * rank)", *options) as nodes:
        limits = {"NODE_ALIVE_SECONDS": 0.5, "NODE_SILENT_SECONDS": 3.0}
        leader, waiting = (nodes.start(node, **limits) for node in (0, 1))
        assert any(b"restart 1 of 1 in 60 s" in line for line in waiting.stderr)
        leader.send_signal(signal.SIGSTOP)
        stderr = ends(waiting, 1)
        assert "node 0 has said nothing for 3 s: its npurun is stopped, or its host hangs" in stderr
        assert "node 0 could not be reached" in stderr


def test_too_few_nodes(tmp_path: Path) -> None:
    """Nobody comes; one has other arguments; nobody is there any more."""
    with Nodes(tmp_path, "", "--max-restarts", "1", "--rejoin-timeout", "4") as nodes:
        other = nodes.start(
            1, "-n", "2", "--rejoin-timeout", "60"
        )  # first, so that it comes in time
        leader = nodes.start(0)
        stderr = ends(other, 2)
        assert "node 1 doesn't match node 0: nproc 2 (node 0: 1)" in stderr
        stderr = ends(leader, 1)
        assert "node(s) 1 did not come within 4 s (--rejoin-timeout)" in stderr
        stderr = ends(nodes.start(1, "--rejoin-timeout", "1"), 1)
        assert "node 0 could not be reached at 127.0.0.1" in stderr


def test_a_signal_to_one_node_ends_the_job_on_all(tmp_path: Path) -> None:
    with Nodes(tmp_path, "    time.sleep(100)", "--max-restarts", "5") as nodes:
        both = [nodes.start(node) for node in (0, 1)]
        nodes.wait_for("ready.0.0", "ready.0.1")
        both[1].send_signal(signal.SIGINT)
        for launch in both:
            ends(launch, 130)
    assert not list(tmp_path.glob("ready.1.*"))


# The script carries the request to stop from rank to rank, as JobCheckpoint does.
UNTIL_STOPPED = """
    signal.signal(signal.SIGTERM, lambda *_: (here / f"stop.{count}").touch())
    mark(f"armed.{count}.{rank}")
    while not (here / f"stop.{count}").exists():
        time.sleep(0.02)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that of another node may come as Python ends
"""


@pytest.mark.parametrize("signalled", [1, 2])
def test_a_request_to_stop_ends_all_nodes_resumable(tmp_path: Path, signalled: int) -> None:
    """One node is signalled, which may not be taken away, or both."""
    text = f"""{UNTIL_STOPPED}
    if rank == 0:
        pathlib.Path(os.environ["NPU_DEVICE_PROGRESS_FILE"]).write_text("12")
    sys.exit(75)
    """
    options = ("--max-preemptions", "0") if signalled == 1 else ()
    with Nodes(tmp_path, text, "--max-restarts", "5", *options) as nodes:
        both = [nodes.start(node) for node in (0, 1)]
        nodes.wait_for("armed.0.0", "armed.0.1")
        for launch in both[-signalled:]:
            launch.send_signal(signal.SIGTERM)
        stderr, other_stderr = (ends(launch, 75) for launch in both)
        assert "npurun: stopped on request at step 12, resumable" in stderr
        assert "npurun: stopped on request, resumable" in other_stderr
        assert "failed" not in stderr + other_stderr


@pytest.mark.parametrize(("taken", "most"), [(0, 2), (1, 1)])
def test_a_node_that_is_taken_away_costs_no_restart(tmp_path: Path, taken: int, most: int) -> None:
    """It comes back. Later a rank fails, which costs the only restart; then another node is taken away, which ends the
    job if it may happen once only.
    """
    text = f"""
    if count == 1 and rank == 1:
        raise ValueError("bad label")
    if count in (1, 3):
        sys.exit(0)
    {UNTIL_STOPPED}
    time.sleep(0.3)
    all_are("armed")
    sys.exit(75)
    """
    with Nodes(tmp_path, text, "--max-restarts", "1", "--max-preemptions", str(most)) as nodes:
        launches = {node: nodes.start(node) for node in (0, 1)}
        for count, node in ((0, taken), (2, 1)):
            nodes.wait_for(f"armed.{count}.0", f"armed.{count}.1")
            launches[node].send_signal(signal.SIGTERM)
            stderr = ends(launches[node], 75)
            assert "stopped on request" in stderr
            if count == 0 or most == 2:
                launches[node] = nodes.start(node)
        stderr = ends(launches[0], 75 if most == 1 else 0)
        if most == 1:
            assert "preemption 1, which costs no restart: node 1 taken away" in stderr
            assert (
                "no restart: nodes were taken away more than 1 time(s) (--max-preemptions)"
                in stderr
            )
            return
        assert ("preemption 2," in stderr) == (taken == 1), (
            "a new node 0 doesn't know what was before it"
        )
        assert "which costs no restart: node 1 taken away: stopped on request, resumable" in stderr
        assert (
            "restart 1 of 1 in 0.1 s: rank 1 on host" in stderr
            and "exit code 1: ValueError: bad label" in stderr
        )
        assert "2 ranks, nodes 0-1: succeeded" in stderr
        ends(launches[1], 0)


DEAF = """
    if count == 0:
        signal.signal(signal.SIGTERM, lambda *_: mark(f"deaf.{count}.{rank}"))
        mark(f"armed.{count}.{rank}")
        time.sleep(100)
"""


def test_a_node_that_is_lost_after_the_signal_was_taken_away(tmp_path: Path) -> None:
    """The others go on, though the job has no restarts, when node 0 comes back."""
    with Nodes(tmp_path, DEAF, "--grace", "1", "--max-preemptions", "1", nnodes="1:2") as nodes:
        both = [nodes.start(node) for node in (0, 1)]
        nodes.wait_for("armed.0.0", "armed.0.1")
        both[0].send_signal(signal.SIGTERM)
        nodes.wait_for("deaf.0.0")
        os.killpg(both[0].pid, signal.SIGKILL)
        both[0] = nodes.start(0)
        _, stderr = (ends(launch, 0) for launch in both)
    assert "lost the connection to node 0: trying to reach it again" in stderr
    first, second = ((tmp_path / f"ready.1.{rank}").read_text() for rank in (0, 1))
    assert first == second, "both have the new job and hub"
    assert not list(tmp_path.glob("ready.2.*"))


NO_HOSTS = pytest.mark.skipif(
    not hosts.can_be_made(), reason="needs root, ip and tc to make two hosts"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut_off", [False, pytest.param(True, marks=NO_HOSTS)], ids=["taken away", "cut off"]
)
def test_the_job_goes_on_with_fewer_nodes_and_takes_one_back(tmp_path: Path, cut_off: bool) -> None:
    """Node 1 of three is killed after a signal, and two go on; or the host of node 1 of two is cut off.

    It joins again when a rank fails.
    """
    text = f"""{DEAF}
    if count == 1:
        mark(f"here.{{rank}}.of.{{size}}")
        while not (here / "go").exists():
            time.sleep(0.02)
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    """
    limits = {
        "KEEPALIVE_AFTER_SECONDS": 1,
        "UNACKNOWLEDGED_MILLISECONDS": 2000,
        "NODE_CONNECT_SECONDS": 1,
    }
    most = 2 if cut_off else 3
    address = hosts.address(0) if cut_off else "127.0.0.1"
    options = ("--grace", "1", "--max-restarts", "2" if cut_off else "1", "--max-preemptions", "1")
    job = Nodes(tmp_path, text, *options, nnodes=f"{most - 1}:{most}", address=address)
    with hosts.hosts(2, gbit=1.0) if cut_off else contextlib.nullcontext(), job as nodes:
        # Node 0's limit counts. It comes last, so that the others come within it.
        launches = {
            node: nodes.start(
                node,
                *("--rejoin-timeout", "100" if node else "4"),
                on=functools.partial(hosts.on_host, node) if cut_off else list,
                **(limits if cut_off else {}),
            )
            for node in reversed(range(most))
        }
        nodes.wait_for(*(f"armed.0.{rank}" for rank in range(most)))
        if cut_off:
            hosts.cut_off(1)
        else:
            launches[1].send_signal(signal.SIGTERM)
            nodes.wait_for("deaf.0.1")
            os.killpg(launches[1].pid, signal.SIGKILL)
        nodes.wait_for(*(f"here.{rank}.of.{most - 1}" for rank in range(most - 1)))
        if cut_off:
            hosts.connect_again(1)
        else:
            launches[1] = nodes.start(1, "--rejoin-timeout", "100")
        others = "0" if cut_off else "0,2"
        told = (
            f"the job is running on node(s) {others}; this node joins at the next restart".encode()
        )
        assert any(told in line for line in launches[1].stderr)
        (tmp_path / "go").touch()
        for node in {0, most - 1}:
            stderr = ends(launches[node], 0)
            if node != 1:
                smaller = f"{most - 1} rank{'s' if most > 2 else ''} instead of {most}, renumbered"
                assert f"the job goes on without node 1: {smaller}" in stderr
                assert (
                    f"the job goes on again with node 1: {most} ranks instead of {most - 1}"
                    in stderr
                )
                assert (
                    "preemption 1, which costs no restart: node 1 taken away: node 1 is gone"
                    in stderr
                ) != cut_off
        if not cut_off:
            ends(launches[1], 0)
    assert {path.name for path in tmp_path.glob("ready.2.*")} == {
        f"ready.2.{rank}" for rank in range(most)
    }
