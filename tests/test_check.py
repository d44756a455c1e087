"""npurun check: real jobs of the package's own check, and what it makes of facts that a test machine can't have."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import job
import pytest
from launcher import environment, npurun, start
from ranks import SHORT_LIMITS, free_port, time_limits

from npu_device._src.check import judge
from npu_device._src.check.core_distance import SHARES_CACHE_BELOW, core_distance
from npu_device._src.check.judge import CheckedJob, Facts
from npu_device._src.testing.hosts import address, can_be_made, hosts, on_host

LIMIT = 100.0
SIZES = ("4 B", "64 KiB", "1 MiB", "16 MiB")
ELSEWHERE = "203.0.113.7"  # RFC 5737: an address that no host has


def rows(report: str) -> dict[str, list[float]]:
    """Return the milliseconds in the table of collectives, by size."""
    lines = re.findall(r"^(4 B|64 KiB|1 MiB|16 MiB) (.* ms)$", report, re.MULTILINE)
    return {
        size: [float(number) for number in re.findall(r"(\S+) ms", line)] for size, line in lines
    }


def two_nodes(ranks: int = 1, node0: str = "", **second: str) -> list[tuple[int, str]]:
    """Check two nodes, each on a host of its own if node 0 has an address; return exit code and output of each.
    ``second`` are variables of node 1 only.
    """
    where = (
        "--nnodes",
        "2",
        "--master-addr",
        node0 or "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    launches = [
        start(
            *("check", "-n", str(ranks), "--node-rank", str(node), *where),
            on=partial(on_host, node) if node0 else list,
            **{
                "NPU_DEVICE_SECRET": "ours",
                **time_limits(MEASURED_SECONDS=0.02),
                **(second if node else {}),
            },
        )
        for node in range(2)
    ]
    try:
        outputs = [b"".join(launch.communicate(timeout=LIMIT)).decode() for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    return [(launch.returncode, output) for launch, output in zip(launches, outputs)]


def test_one_rank_reports_versions_and_no_collectives() -> None:
    done = npurun("check", limit=LIMIT)
    assert done.returncode == 0, done.stderr
    report = done.stdout.decode()
    assert report.startswith("1 rank on 1 host: training would work\n")
    assert f"Python {sys.version.split()[0]}, TensorFlow " in report
    assert "all_reduce" not in report


def test_two_ranks_of_another_launcher(tmp_path: Path) -> None:
    checking = "from npu_device.launch import checking\nchecking.main()\n"
    first, second = job.run(tmp_path, 2, checking, LIMIT, **SHORT_LIMITS)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    report = first.output
    assert "2 ranks on 1 host: training would work\n" in report
    assert re.search(
        rf"^node0 +{re.escape(socket.gethostname())} +0-1 +127\.0\.0\.1 +lo +", report, re.MULTILINE
    )
    assert "gradients travel through shared memory: all ranks share that of one host" in report
    found = rows(report)
    assert tuple(found) == SIZES
    assert all(0 < row[0] < 10_000 for row in found.values())
    [(nanoseconds, cache)] = re.findall(
        r"^a value takes (\d+) ns between the cores of two ranks and back: they share (a|no) cache",
        report,
        re.MULTILINE,
    )
    assert (float(nanoseconds) < SHARES_CACHE_BELOW) == (cache == "a")
    assert "problem" not in report
    assert "training would work" not in second.output


def test_the_distance_of_two_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    distance = core_distance(cores[0], cores[1])
    assert distance is not None and 50 < distance < 1e6
    assert core_distance(cores[0], 4095) is None  # there is no such core


def test_ranks_of_a_host_have_cores_of_their_own() -> None:
    facts = replace(HERE, layout=layout(range(4)))
    assert CheckedJob([facts, facts]).cores_of("node0") == [0, 2]
    assert CheckedJob([facts] * 8).cores_of("node0") == [0, 1, 2, 3]
    bound = [replace(facts, layout=layout([core, core + 1])) for core in (0, 2)]
    assert CheckedJob(bound).cores_of("node0") == [0, 2]


@pytest.mark.slow
def test_two_nodes_on_one_machine_from_one_command() -> None:
    where = (
        "--hosts",
        "localhost:1,127.0.0.1:1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    done = npurun("check", *where, limit=LIMIT, **time_limits(MEASURED_SECONDS=0.02))
    assert done.returncode == 0, done.stderr
    report = done.stdout.decode()
    assert "2 ranks on 2 hosts: training would work" in report
    assert "TensorFlow's ring over gRPC: each rank has a host to itself" in report
    found = rows(report)
    assert tuple(found) == SIZES and all(min(row) > 0 for row in found.values())
    fastest = (
        "fastest between these hosts: (tensorflow, which is in use|tcp, with NPU_D.*); "
        "each host sends [0-9.e+]+ Gb"
    )
    assert re.search(fastest, report)
    assert "hosts node0, node1 are the same machine" in report
    [ports] = re.findall(
        r"^open ports: TensorFlow's servers at 127\.0\.0\.1:\d+, \S+ are (.+)$",
        report,
        re.MULTILINE,
    )
    assert "open to everyone" not in done.stderr.decode()  # as the report has it
    assert ports.startswith(
        "open to everyone who can connect, without the job secret. NPU_DEVICE_BACKEND=tcp"
    )
    assert "a firewall can" in ports
    assert "\ntraining would work; node 0 prints the report\n" in f"\n{report}"
    assert done.stderr.count(b"about half a minute") == 1


@pytest.mark.slow
def test_an_address_that_others_cannot_reach_fails_in_one_direction() -> None:
    (first, report), (second, other) = two_nodes(HCCL_IF_IP=ELSEWHERE)
    assert (first, second) == (1, 1)
    assert "2 ranks on 2 hosts: training would not work: 1 problem" in report
    blocked = (
        r"problem 1: rank 0 on host node0 \(.*\) can't connect to rank 1 on host node1 \(.*\) at "
    )
    assert re.search(
        rf"{blocked}{ELSEWHERE}:\d+: .+; host node1 can connect to host node0\.", report
    )
    assert "NPU_DEVICE_PORT_RANGE" in report
    assert "training would not work: 1 problem; node 0 prints the report\n" in other


def test_a_taken_port_is_told_before_ranks_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = npurun("check", "-n", "2", "--master-port", str(taken.getsockname()[1]), limit=15)
    assert done.returncode == 2
    assert (
        b"another program uses this port" in done.stderr
        and b"could not be completed" in done.stderr
    )


def test_an_engine_that_cannot_be_used_is_told_once() -> None:
    done = npurun("check", "-n", "2", NPU_DEVICE_BACKEND="nccl", limit=LIMIT)
    assert (done.returncode, done.stdout) == (1, b"")
    text = (
        "NPU_DEVICE_BACKEND is nccl, but NCCL can't be used:\nnpurun:   no rank has a GPU\n"
        "npurun: What to do: start one rank per GPU"
    )
    output = done.stderr.decode()
    assert output.count(text) == 1, output
    # The rest is that a check begins, that a rank stops the other if that takes longer to end, and that it ends.
    assert len(output.splitlines()) in (5, 6) and output.count("npurun: ") in (5, 6), output


def test_an_engine_that_cannot_be_used_under_another_launcher(tmp_path: Path) -> None:
    checking = "from npu_device.launch import checking\nchecking.main()\n"
    for output in job.outputs(tmp_path, 2, checking, code=1, NPU_DEVICE_BACKEND="nccl"):
        assert "no rank has a GPU\nWhat to do: " in output and "Traceback" not in output


def test_an_engine_that_there_is_not_is_told_before_ranks_start() -> None:
    done = npurun("check", "-n", "2", NPU_DEVICE_BACKEND="nonsense", limit=15)
    assert done.returncode == 2
    assert done.stderr.count(b"What to do: correct or unset NPU_DEVICE_BACKEND") == 1
    assert b"Traceback" not in done.stderr


def test_ranks_that_memory_cannot_hold_are_refused() -> None:
    program = (
        "from npu_device._src.machine import free_memory\n"
        "free_memory.usable_memory = lambda *_: 1 << 30\n"
        "from npu_device.launch.__main__ import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "check", "-n", "3"],
        env=environment(),
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 2
    assert b"3 ranks need more memory than the 1 GiB of this machine" in done.stderr
    assert b"checking" not in done.stderr


def test_wrong_usage_is_refused() -> None:
    for also in (["train.py"], ["--max-restarts", "1"]):
        done = npurun("check", *also)
        assert done.returncode == 2
        assert b"check runs its own script once" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not can_be_made(), reason="needs root, ip and tc to make two hosts")
def test_two_hosts_report_their_engines_and_speed() -> None:
    with hosts(2, gbit=1.0):
        (first, report), (second, _) = two_nodes(2, node0=address(0))
        assert (first, second) == (0, 0)
        assert (
            "shared memory within each host, and TensorFlow's ring over gRPC between them" in report
        )
        (speed,) = re.findall(r"each host sends ([0-9.]+) Gbit/s", report)
        assert 0.1 < float(speed) < 1.1
        _, ring, tcp = rows(report)["16 MiB"]
        assert min(ring, tcp) > 100
        assert "between hosts, tensorflow" in report and "between hosts, tcp" in report


# What a test machine can't have


def layout(cpus: Iterable[int], l3cache: int = 0) -> list[list[Any]]:
    """Return cores with two threads, of which the process may use these."""
    cores: dict[int, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(cpu // 2, []).append(cpu)
    return [[2 * number, threads, 0, 0, l3cache] for number, threads in cores.items()]


HERE = Facts(
    host="node0", machine="a", kernel="1", address="10.0.0.1", interface="eth0", bits=10e9,
    versions={"Python": "3.11.7", "Keras": "3.9.0"}, layout=layout(range(8)), share=8, quota=None,
    memory=16 << 30, free=8 << 30, clock=0.0,
)  # fmt: skip
THERE = replace(HERE, host="node1", machine="b", kernel="2", address="10.0.0.2")
WELL = CheckedJob(
    (HERE, THERE),
    sharing=("", ""),
    unreachable=({}, {}),
    between={"tcp": (2e-4, 1e-3, 3e-3, 0.04)},
    engine_in_use="tcp",
)


def test_the_fastest_engine() -> None:
    measured = replace(
        WELL, between={"tensorflow": (1.0, 3.1), "tcp": (2.0, 1.42)}, engine_in_use="tensorflow"
    )
    assert measured.fastest == "tcp"
    assert (
        replace(measured, between={"tensorflow": (1.0, 3.1), "tcp": (2.0, 3.0)}).fastest
        == "tensorflow"
    )


def _with(**there: Any) -> CheckedJob:
    return replace(WELL, facts=(HERE, replace(THERE, **there)))


def _neighbours(*layouts: list[list[Any]]) -> CheckedJob:
    """Ranks of one host, which may use these cores."""
    facts = [replace(HERE, layout=cores) for cores in layouts]
    return CheckedJob(facts, sharing=[""] * len(facts))


SLOW = replace(WELL, facts=(replace(HERE, bits=25e9), replace(THERE, bits=100e9)))
APART = replace(WELL, facts=(HERE, HERE), sharing=("", "a different kernel"), between={})


@pytest.mark.parametrize(
    ("kind", "found", "expected"),
    [
        (
            "problem",
            _with(versions={"Python": "3.11.7", "Keras": "2.15.0"}),
            "Keras:\n  3.9.0: rank(s) 0\n  2.15.0: ",
        ),
        (
            "problem",
            _with(address="127.0.0.1"),
            "rank 1 on host node1 (b) is known to the others as 127.0.0.1",
        ),
        ("problem", replace(WELL, is_right=False), "wrong sum"),
        (
            "warning",
            _with(versions={"Python": "3.12.1", "Keras": "3.9.0"}),
            "different versions of Python",
        ),
        ("warning", _with(clock=-7.25), "host node1 (b) is 7.2 s behind that of rank 0"),
        ("warning", _with(kernel="1"), "hosts node0, node1 are the same machine"),
        ("warning", _with(layout=[]), "0 core(s) for 1 ranks"),
        ("warning", _with(quota=2.0), "host node1 get the time of 2 of its 4 cores (a quota)"),
        (
            "warning",
            _neighbours(layout([0, 2]), layout([1, 3])),
            "ranks 0 and 1 on host node0 have threads of the same core(s), 0,2",
        ),
        (
            "warning",
            _neighbours(layout(range(4)), layout(range(4, 8), 4)),
            "no cache joins the cores of all ranks on host node0",
        ),
        (
            "warning",
            _neighbours(layout([0, 1]), layout([0, 1])),
            "host node0 has 1 core(s) for 2 ranks",
        ),
        ("warning", _with(free=600 << 20), "0.6 GiB of free memory for 1 rank"),
        ("warning", SLOW, "node0 is rated at 25 Gbit/s, but the fastest engine sends 3.4 Gbit/s"),
        (
            "warning",
            APART,
            "rank 1 on host node0 (a) can't share memory with the others of its host: a different",
        ),
    ],
)
def test_a_problem_or_a_warning(kind: str, found: CheckedJob, expected: str) -> None:
    assert judge.problems(WELL) == judge.warnings(WELL) == []
    problems, warnings = judge.problems(found), judge.warnings(found)
    (text,) = problems + warnings
    assert expected in text and "What to do: " in text
    shown = judge.text(found, problems, warnings)
    assert f"{kind} 1: {text.splitlines()[0]}" in shown
    assert ("training would not work: 1 problem" in shown) == (kind == "problem")


def test_ports_that_are_blocked_in_both_directions() -> None:
    both = judge.problems(replace(WELL, unreachable=({1: "b:1: no answer"}, {0: "a:1: no answer"})))
    assert len(both) == 2 and all("and not in the other direction either" in text for text in both)
