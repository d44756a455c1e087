"""The control channel: frozen, killed and lost processes, and who listens where. Real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import job
import pytest
from conftest import BACKENDS
from launcher import (
    NPURUN,
    ROOT,
    assert_no_shared_files_since,
    environment,
    is_running,
    script,
    shared_files,
    start,
    wait_until,
)
from ranks import all_through, clean_environment

from npu_device._src.environment import TF_GRPC_DEFAULT_OPTIONS
from npu_device._src.testing import leaks
from npu_device._src.testing.hosts import address, can_be_made, cut_off, hosts, on_host

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
    return next(child for child, command in leaks.children_of(pid).items() if "cluster.hub" in command)


# Frozen


@pytest.mark.slow
def test_a_frozen_rank_that_goes_on_harms_nobody(tmp_path: Path) -> None:
    """gRPC closes a connection on which a ping was not acknowledged for 60 s; here its clients do so after 1 s."""
    options = TF_GRPC_DEFAULT_OPTIONS.default + ",grpc.keepalive_time_ms=100000,grpc.http2.ping_timeout_ms=1000"
    source = BEGIN.format(elements=LARGE) + (
        'print("ready", flush=True)\n'
        f"while not float(npu.distribute.all_reduce(float(os.path.exists({str(tmp_path / 'end')!r})), 'max')):\n"
        "    assert float(step()[0]) == 2.0\n"
        'print("all well", flush=True)\n'
    )
    jobs = []
    for frozen, backend in enumerate(BACKENDS):
        (directory := tmp_path / backend).mkdir()
        variables = {**all_through(backend), TF_GRPC_DEFAULT_OPTIONS.name: options}
        jobs.append((job.start(directory, 2, source, **variables), frozen))
    for processes, _ in jobs:
        job.wait_for(processes)
    time.sleep(0.5)
    for processes, frozen in jobs:
        processes[frozen].send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    (tmp_path / "end").touch()
    for processes, frozen in jobs:
        processes[frozen].send_signal(signal.SIGCONT)
    for processes, _ in jobs:
        for result in job.finish(processes):
            assert result.code == 0, result.output
            assert "all well" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_when_rank_0_is_frozen_the_others_end_after_the_limit(tmp_path: Path, backend: str) -> None:
    source = READY + "time.sleep(1)\nstep()\n"
    limits = {"NPU_DEVICE_STALL_WARNING": "1", "NPU_DEVICE_STALL_TIMEOUT": "2"}
    processes = job.start(tmp_path, 2, source, **all_through(backend), **limits)
    job.wait_for(processes)
    processes[0].send_signal(signal.SIGSTOP)
    results = job.finish(processes[1:], timeout=20)
    processes[0].kill()
    processes[0].wait()
    for result in results:
        assert result.code == 1
        assert "rank 0 on host node0: does not answer: stopped, overloaded, or cut off" in result.output
        assert "This is the limit (NPU_DEVICE_STALL_TIMEOUT seconds)" in result.output


@pytest.mark.slow
def test_a_frozen_hub_is_an_error_that_says_so(tmp_path: Path) -> None:
    hurry = "from npu_device._src.cluster import control_channel\ncontrol_channel.MARGIN_SECONDS = 1.0\n"
    source = hurry + READY + "time.sleep(1)\nif rank: step()\ntime.sleep(60)"
    processes = job.start(tmp_path, 2, source, NPU_DEVICE_STALL_WARNING="1", NPU_DEVICE_STALL_TIMEOUT="2")
    job.wait_for(processes)
    hub = _hub_of(processes[0].pid)
    os.kill(hub, signal.SIGSTOP)
    [result] = job.finish(processes[1:], timeout=40)
    assert result.code == 1
    assert "the hub of the job has not answered for 3 s" in result.output
    processes[0].kill()
    processes[0].wait()
    os.kill(hub, signal.SIGKILL)


# Killed


@pytest.mark.slow
def test_a_killed_hub_is_an_error_of_every_rank(tmp_path: Path) -> None:
    source = READY + "if rank == 0: time.sleep(1)\nstep()\ntime.sleep(1)\nstep()\n"
    source = source.replace('print("ready"', 'time.sleep(0.5); print("ready"')
    processes = job.start(tmp_path, 2, source)
    job.wait_for(processes)
    os.kill(_hub_of(processes[0].pid), signal.SIGKILL)
    for result in job.finish(processes, timeout=20):
        assert result.code == 1
        assert "the connection to the hub of the job has ended" in result.output
        assert "What to do" in result.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_is_known_to_all_within_half_a_second(tmp_path: Path, backend: str) -> None:
    """It leaves nothing in /dev/shm."""
    before = shared_files()
    source = (
        BEGIN.format(elements=LARGE)
        + """
if rank == 0:
    time.sleep(1)
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), 9)
try:
    step()
finally:
    print("raised at", time.time(), flush=True)
"""
    )
    results = job.run(tmp_path, 3, source, **all_through(backend))
    assert_no_shared_files_since(before)
    for result in results[1:]:
        assert result.code == 1
        assert (
            job.stamp(result.output, "raised") - job.stamp(results[0].output, "killed") < 1.0
        )  # 0.1 s on a free machine
        if backend == "tensorflow" and "/job:worker/replica:0/task:0" in result.output:
            continue  # TensorFlow's ring saw the broken connection first, and names the rank in its own way
        assert "PeerError" in result.output and "rank 0 on host node0 is gone: its process" in result.output
        assert "look at the output of rank 0" in result.output


def test_the_hub_of_npurun_ends_with_npurun(tmp_path: Path) -> None:
    source = script(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    for number in (signal.SIGTERM, signal.SIGKILL):
        launch = start("-n", "2", source)
        launch.stdout.readline()
        hub = _hub_of(launch.pid)
        launch.send_signal(number)
        launch.wait(20)
        wait_until(lambda hub=hub: not is_running(hub), 10)
        launch.communicate()


def test_two_programs_one_after_the_other_in_one_launch(tmp_path: Path) -> None:
    """The hub serves the next job of the same ranks; one that is early waits for the end of the last."""
    program = """
import sys, time
from npu_device._src.membership.schemes import membership_from_environment
from npu_device._src.cluster.rendezvous import meet
cluster, channel = meet(membership_from_environment())
print(sys.argv[1], "rank", cluster.rank, flush=True)
time.sleep(cluster.rank)
channel.close()
"""
    path = script(tmp_path, program)
    shell = tmp_path / "twice.sh"
    shell.write_text(f"#!/bin/sh\n{sys.executable} {path} first && {sys.executable} {path} second\n")
    shell.chmod(0o755)
    done = subprocess.run(
        [*NPURUN, "-n", "2", str(shell)], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    met = re.findall(r"(first|second) rank (\d)", done.stdout)
    assert sorted(met) == [("first", "0"), ("first", "1"), ("second", "0"), ("second", "1")]


# Who listens where

LISTENING = """
def listening():
    inodes = set()
    for pid in [os.getpid(), *map(int, open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split())]:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                pass
    found = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return found
"""


def test_a_job_of_one_host_listens_on_the_loopback_only(tmp_path: Path) -> None:
    source = (
        BEGIN.format(elements=LARGE) + LISTENING + 'print("listening", listening(), step()[0].device, flush=True)\n'
    )
    source += "npu.distribute.all_reduce(one, 'sum')\n"
    first, second = job.outputs(tmp_path, 2, source, NPU_DEVICE_BACKEND="auto")
    assert "listening ['0100007F'] /job:localhost" in first, "the hub, on 127.0.0.1"
    assert "listening [] /job:localhost" in second


def test_tensorflows_server_listens_where_the_port_range_allows(tmp_path: Path) -> None:
    source = (
        BEGIN.format(elements=SMALL)
        + LISTENING.replace('.split(":")[0]', "")
        + (
            'print("ports", [int(found.split(":")[1], 16) for found in listening()], flush=True)\n'
            "npu.distribute.all_reduce(one, 'sum')\n"
        )
    )
    variables = {**all_through("tensorflow"), "NPU_DEVICE_PORT_RANGE": "61200-61207"}
    for output in job.outputs(tmp_path, 2, source, **variables):
        ports = [int(port) for port in re.findall(r"\d+", re.findall(r"ports \[(.*)\]", output)[0])]
        assert any(61200 <= port <= 61207 for port in ports), ports


# A host that is lost


@pytest.mark.slow
@pytest.mark.skipif(not can_be_made(), reason="needs root, ip and tc to make two hosts")
def test_a_host_that_is_cut_off_is_noticed_on_both_sides(tmp_path: Path) -> None:
    """Packets are dropped, nothing is reset."""
    path = tmp_path / "script.py"
    path.write_text(
        READY
        + """
from npu_device._src.training.device import running_job
health = running_job().health
while not health.is_over:
    time.sleep(0.05)
print("noticed at", time.time(), flush=True)
health.require_running()
"""
    )
    with hosts(2, gbit=1.0):
        launches: list[Any] = []
        for host in range(2):
            launch = [*NPURUN, "-n", "1", "--nnodes", "2", "--node-rank", str(host), "--grace", "1"]
            command = on_host(host, [*launch, "--master-addr", address(0), "--master-port", "29700", str(path)])
            with (tmp_path / f"{host}.log").open("wb") as log:
                launches.append(
                    subprocess.Popen(
                        command,
                        env={**clean_environment(), **environment(), "NPU_DEVICE_SECRET": "the same"},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        logs = [tmp_path / f"{host}.log" for host in range(2)]
        wait_until(lambda: all("ready" in log.read_text() for log in logs), 90)
        cut = time.time()
        cut_off(1)
        try:
            assert [launch.wait(40) != 0 for launch in launches] == [True, True]
        finally:
            for launch in launches:
                launch.kill()
    for log in logs:
        output = log.read_text()
        assert job.stamp(output, "noticed") - cut < 15, output
    assert "rank 1 on host node1 is gone" in logs[0].read_text()
    assert "the hub of the job" in logs[1].read_text()


# Many ranks


def test_messages_grow_with_the_ranks_and_no_faster() -> None:
    """All steps of a job together; the real hub and the package's client code."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.control", "--ranks", "8", "64"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    few, many = (float(line.rstrip("| ").rpartition("|")[2]) for line in done.stdout.splitlines()[2:])
    assert many < few + 10, done.stdout
