"""The control channel: frozen, killed and lost processes, and who listens where. Real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import job
import pytest
from conftest import ENGINES
from launcher import ROOT, assert_no_shared_files_since, environment, npurun, shared_files, start
from ranks import SHORT_LIMITS, all_through, free_port
from rendezvous_ranks import WORKER, without_table

from npu_device._src.cluster.time_limits import KEEPALIVE_AFTER_SECONDS
from npu_device._src.environment import TF_GRPC_DEFAULT_OPTIONS
from npu_device._src.pools.forked import ForkedProcess
from npu_device._src.testing import leaks
from npu_device._src.testing.hosts import address, can_be_made, cut_off, hosts, on_host
from npu_device._src.testing.soak.proxy import Proxy

pytestmark = pytest.mark.xdist_group("waiting")

BEGIN = """
import os, sys, time
import tensorflow as tf
import npu_device as npu
rank = npu.open().worker_id
one = tf.ones([{elements}])
step = tf.function(lambda: npu.distribute.all_reduce(one, "sum"))
print("sum", float(step()[0]), flush=True)
"""
SMALL, LARGE = 16, 300_000  # of a 256 KiB slot, and more than one
READY = BEGIN.format(elements=SMALL) + 'print("ready", flush=True)\n'


def _hub_of(pid: int) -> int:
    """The hub that a rank has started."""
    return next(
        child for child, command in leaks.children_of(pid).items() if "cluster.hub" in command
    )


def _until(path: Path, condition: str = "True") -> str:
    """Return a line of a script that waits for a file."""
    return f"while {condition} and not os.path.exists({str(path)!r}): time.sleep(0.02)\n"


def _side_by_side(
    directory: Path, sources: dict[str, str], **variables: str
) -> list[list[ForkedProcess]]:
    """Start two ranks of each script, on the engine that has its name if there is one; wait until all are ready."""
    jobs = []
    for name, source in sources.items():
        (place := directory / name).mkdir()
        engine = all_through(name) if name in ENGINES else {}
        jobs.append(job.start(place, 2, source, **engine, **variables))
    for processes in jobs:
        job.wait_for(processes)
    return jobs


# Frozen


@pytest.mark.slow
def test_a_frozen_rank_that_goes_on_harms_nobody(tmp_path: Path) -> None:
    """gRPC closes a connection on which a ping was not acknowledged for 60 s; here its clients do so after 1 s."""
    options = (
        TF_GRPC_DEFAULT_OPTIONS.default
        + ",grpc.keepalive_time_ms=100000,grpc.http2.ping_timeout_ms=1000"
    )
    source = BEGIN.format(elements=LARGE) + (
        'print("ready", flush=True)\n'
        f"while not float(npu.distribute.all_reduce(float(os.path.exists({str(tmp_path / 'end')!r})), 'max')):\n"
        "    assert float(step()[0]) == 2.0\n"
        'print("all well", flush=True)\n'
    )
    jobs = _side_by_side(
        tmp_path, dict.fromkeys(ENGINES, source), **{TF_GRPC_DEFAULT_OPTIONS.name: options}
    )
    time.sleep(0.5)
    for frozen, processes in enumerate(jobs):
        processes[frozen].send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    (tmp_path / "end").touch()
    for frozen, processes in enumerate(jobs):
        processes[frozen].send_signal(signal.SIGCONT)
    for processes in jobs:
        for result in job.finish(processes):
            assert result.code == 0, result.output
            assert "all well" in result.output


@pytest.mark.slow
def test_when_rank_0_is_frozen_the_others_end_after_the_limit(tmp_path: Path) -> None:
    sources = dict.fromkeys(ENGINES, READY + _until(tmp_path / "go") + "step()\n")
    jobs = _side_by_side(
        tmp_path, sources, NPU_DEVICE_STALL_WARNING="1", NPU_DEVICE_STALL_TIMEOUT="2"
    )
    for frozen, _ in jobs:
        frozen.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    for frozen, other in jobs:
        [result] = job.finish([other], timeout=20)
        job.kill([frozen])
        assert result.code == 1
        assert (
            "rank 0 on host node0: does not answer: stopped, overloaded, or cut off"
            in result.output
        )
        assert "This is the limit (NPU_DEVICE_STALL_TIMEOUT seconds)" in result.output


# Killed


@pytest.mark.slow
def test_a_killed_hub_is_an_error_of_every_rank(tmp_path: Path) -> None:
    """And a frozen one, of those that need it."""
    go = tmp_path / "go"
    hurry = """
import os
os.environ.update(NPU_DEVICE_STALL_WARNING="1", NPU_DEVICE_STALL_TIMEOUT="2")
"""
    sources = {
        "killed": READY
        + _until(go, "rank == 0")
        + "while True:\n    step()\n    time.sleep(0.3 * rank)\n",
        "frozen": hurry + READY + _until(go) + "if rank: step()\ntime.sleep(60)",
    }
    jobs = _side_by_side(tmp_path, sources, **SHORT_LIMITS)
    killed, frozen = (_hub_of(processes[0].pid) for processes in jobs)
    os.kill(killed, signal.SIGKILL)
    os.kill(frozen, signal.SIGSTOP)
    go.touch()
    for result in job.finish(jobs[0], timeout=20):
        assert result.code == 1
        assert "the connection to the hub of the job has ended" in result.output
        assert "What to do" in result.output
    [result] = job.finish(jobs[1][1:], timeout=40)
    job.kill(jobs[1][:1])
    os.kill(frozen, signal.SIGKILL)
    assert result.code == 1
    assert "the hub of the job has not answered for 3 s" in result.output


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_rank_is_known_to_all_before_any_limit(tmp_path: Path, engine: str) -> None:
    """It leaves nothing in /dev/shm. The shortest limit is that of the kernel's keepalive."""
    before = shared_files()
    kill = """
if rank == 0:
    time.sleep(1)
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), 9)
try:
    step()
finally:
    print("raised at", time.time(), flush=True)
"""
    killed, other = job.run(tmp_path, 2, BEGIN.format(elements=LARGE) + kill, **all_through(engine))
    assert_no_shared_files_since(before)
    assert other.code == 1
    seconds = job.stamp(other.output, "raised") - job.stamp(killed.output, "killed")
    assert seconds < KEEPALIVE_AFTER_SECONDS  # 0.1 s on a free machine
    # TensorFlow's ring may see the broken connection first, and names the rank in its own way.
    if engine != "tensorflow" or "/job:worker/replica:0/task:0" not in other.output:
        assert (
            "PeerError" in other.output
            and "rank 0 on host node0 is gone: its process" in other.output
        )
        assert "look at the output of rank 0" in other.output


def test_two_programs_one_after_the_other_in_one_launch(tmp_path: Path) -> None:
    """The hub serves the next job of the same ranks; one that is early waits for the end of the last."""
    shell, program = tmp_path / "twice.sh", f"{sys.executable} {WORKER}"
    shell.write_text(f"#!/bin/sh\n{program} && {program}\n")
    shell.chmod(0o755)
    done = npurun("-n", "2", str(shell), limit=60)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(rb'"rank": (\d)', done.stdout)) == [b"0", b"0", b"1", b"1"]


# Who listens where

LISTENING = """
import glob, os
def listening():
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    files = [file for pid in ["self", *children] for file in glob.glob(f"/proc/{pid}/fd/*")]
    own = {os.path.basename(os.path.realpath(file)) for file in files}
    lines = [line.split() for table in ("tcp", "tcp6") for line in list(open(f"/proc/net/{table}"))[1:]]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
"""


def test_a_job_of_one_host_listens_on_the_loopback_only(tmp_path: Path) -> None:
    source = LISTENING + BEGIN.format(elements=LARGE)
    source += (
        'print("listening", listening(), step()[0].device)\nnpu.distribute.all_reduce(one, "sum")\n'
    )
    first, second = job.outputs(tmp_path, 2, source, NPU_DEVICE_BACKEND="auto")
    assert re.search(r"listening \['0100007F:\w+'\] /job:localhost", first), "the hub, on 127.0.0.1"
    assert "listening [] /job:localhost" in second


def test_tensorflows_server_listens_where_the_port_range_allows(tmp_path: Path) -> None:
    source = LISTENING + BEGIN.format(elements=SMALL)
    source += 'print("listening", listening())\nnpu.distribute.all_reduce(one, "sum")\n'
    variables = {**all_through("tensorflow"), "NPU_DEVICE_PORT_RANGE": "61200-61207"}
    for output in job.outputs(tmp_path, 2, source, **variables):
        ports = [
            int(port, 16) for port in re.findall(r":(\w+)'", output.partition("listening [")[2])
        ]
        assert any(61200 <= port <= 61207 for port in ports), ports


# A host that is lost


@pytest.mark.slow
@pytest.mark.skipif(not can_be_made(), reason="needs root, ip and tc to make two hosts")
def test_a_host_that_is_cut_off_is_noticed_on_both_sides(tmp_path: Path) -> None:
    """Packets are dropped, nothing is reset."""
    notice = """
from npu_device._src.training.opening.device import running_job
health = running_job().health
while not health.is_over:
    time.sleep(0.05)
print("noticed at", time.time(), flush=True)
health.require_running()
"""
    path = tmp_path / "script.py"
    path.write_text(READY + notice)
    with hosts(2, gbit=1.0):
        where = (
            "--nnodes",
            "2",
            "--master-addr",
            address(0),
            "--master-port",
            "29700",
            "--grace",
            "1",
        )
        launches = [
            start(
                *("-n", "1", "--node-rank", str(host), *where, str(path)),
                on=lambda command, host=host: on_host(host, command),
                NPU_DEVICE_SECRET="the same",
            )
            for host in range(2)
        ]
        try:
            assert all(any(b"ready" in line for line in launch.stdout or ()) for launch in launches)
            cut = time.time()
            cut_off(1)
            outputs = [b"".join(launch.communicate(timeout=40)).decode() for launch in launches]
        finally:
            for launch in launches:
                launch.kill()
    for launch, output in zip(launches, outputs):
        assert launch.returncode
        assert job.stamp(output, "noticed") - cut < 15, output
    assert "rank 1 on host node1 is gone" in outputs[0]
    assert "the hub of the job" in outputs[1]


# Faults of the network, made by a proxy

BROADCASTING = """
import time
import npu_device as npu
npu.open()
for _ in range({steps}):
    npu.distribute.broadcast_object("something", root_rank=0)
    print("went on", flush=True)
    time.sleep(0.1)
"""


@contextlib.contextmanager
def _through_a_proxy(directory: Path, steps: int) -> Iterator[tuple[Proxy, list[ForkedProcess]]]:
    """Start two ranks, of which rank 1 reaches the hub through a proxy, and wait until they train."""
    port = free_port()
    proxy = Proxy("127.0.0.1", port)
    places = [without_table(to, 2, rank) for rank, to in enumerate((port, proxy.port))]
    processes = job.start_each(directory, BROADCASTING.format(steps=steps), places)
    job.wait_for(processes, "went on")
    yield proxy, processes
    proxy.close()


@pytest.mark.slow
def test_a_slow_or_cut_control_channel_harms_nobody(tmp_path: Path) -> None:
    with _through_a_proxy(tmp_path, 20) as (proxy, processes):
        proxy.delay = 0.3
        time.sleep(2)
        proxy.delay = 0.0
        proxy.drop()
        time.sleep(2)
        proxy.resume()
        for result in job.finish(processes):
            assert result.code == 0, result.output
            assert result.output.count("went on") == 20


@pytest.mark.parametrize("fault", ["reset", "half_close"])
def test_a_lost_control_channel_is_an_error_on_both_sides(tmp_path: Path, fault: str) -> None:
    with _through_a_proxy(tmp_path, 10_000) as (proxy, processes):
        getattr(proxy, fault)()
        first, second = job.finish(processes, timeout=20)
    assert (first.code, second.code) == (1, 1), first.output + second.output
    assert "rank 1 on host" in first.output and "is gone" in first.output
    assert "the hub of the job" in second.output
    for result in (first, second):  # npurun never takes it for a bug of the script
        assert "PeerError: " in result.output


# Many ranks


def test_messages_grow_with_the_ranks_and_no_faster() -> None:
    """All steps of a job together; the real hub and the package's client code."""
    command = [sys.executable, "-m", "benchmarks.control", "--ranks", "8", "64"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    few, many = (
        float(line.rstrip("| ").rpartition("|")[2]) for line in done.stdout.splitlines()[2:]
    )
    assert many < few + 10, done.stdout
