"""What a machine is made of, and which cores its ranks get: on described machines, and on this one."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any, Callable

import pytest
from launcher import npurun, script

from npu_device._src.machine.core_sets import core_sets, cpus_of, described, threads_of_rank
from npu_device._src.machine.topology import Machine, Quota, has_amd_processor, read_machine
from npu_device._src.wording import ranges
from npu_device.launch import argument_types, arguments, script_runs, speed

Place = tuple[int, int, int]  # socket, NUMA node, L3 cache
Made = Callable[[Callable[[Path], Machine]], Machine]


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def described_machine(root: Path, cores: list[tuple[list[int], Place]]) -> list[int]:
    """Write the files of a machine whose cores have these threads; return all threads."""
    devices = root / "sys/devices/system"
    for threads, (socket, numa, l3cache) in cores:
        for cpu in threads:
            folder = devices / f"cpu/cpu{cpu}"
            write(folder / "topology/thread_siblings_list", ranges(threads))
            write(folder / "topology/physical_package_id", socket)
            write(folder / "cache/index0/level", 1)
            write(folder / "cache/index0/shared_cpu_list", ranges(threads))
            sharing = [thread for each, place in cores if place[2] == l3cache for thread in each]
            write(folder / "cache/index3/level", 3)
            write(folder / "cache/index3/shared_cpu_list", ranges(sharing))
            local = [thread for each, place in cores if place[1] == numa for thread in each]
            write(devices / f"node/node{numa}/cpulist", ranges(local))
    return [thread for threads, _ in cores for thread in threads]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return what makes a described machine, once."""

    @functools.cache
    def make(machine: Callable[[Path], Machine]) -> Machine:
        return machine(tmp_path_factory.mktemp(machine.__name__))

    return make


def two_sockets(root: Path) -> Machine:
    """Two sockets of 32 cores with two threads each: CPUs 64 to 127 are the second threads."""
    cores = [([core, core + 64], (core // 32,) * 3) for core in range(64)]
    return read_machine(root, described_machine(root, cores))


def epyc(root: Path) -> Machine:
    """One socket with eight caches of eight cores each, and four NUMA nodes."""
    cores = [([core], (0, core // 16, core // 8)) for core in range(64)]
    return read_machine(root, described_machine(root, cores))


def laptop(root: Path) -> Machine:
    """Four cores with two threads, and eight with one."""
    cores = [([2 * core, 2 * core + 1], (0, 0, 0)) for core in range(4)]
    cores += [([core], (0, 0, 0)) for core in range(8, 16)]
    return read_machine(root, described_machine(root, cores))


def container(root: Path) -> Machine:
    """4 of 16 CPUs, with a thread of each of four cores."""
    described_machine(root, [([core, core + 8], (0, 0, 0)) for core in range(8)])
    return read_machine(root, [2, 3, 12, 13])


def one_core_offline(root: Path) -> Machine:
    """A socket of four cores, of which the second is offline: it has no topology, and isn't allowed."""
    described_machine(root, [([core], (0, 0, 0)) for core in (0, 2, 3)])
    (root / "sys/devices/system/cpu/cpu1").mkdir()
    return read_machine(root, [0, 2, 3])


def without_sys(root: Path) -> Machine:
    return read_machine(root, range(4))


@pytest.mark.parametrize(
    ("machine", "ranks", "binding", "expected"),
    [
        (two_sockets, 1, "core", []),
        (two_sockets, 2, "none", []),
        (two_sockets, 2, "core", ["0-31,64-95", "32-63,96-127"]),
        (two_sockets, 2, "socket", ["0-31,64-95", "32-63,96-127"]),
        (two_sockets, 2, "auto", ["0-31,64-95", "32-63,96-127"]),
        (two_sockets, 3, "core", ["0-20,64-84", "21-41,85-105", "42-62,106-126"]),
        (two_sockets, 3, "auto", []),
        (two_sockets, 4, "numa", ["0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127"]),
        (
            two_sockets,
            16,
            "socket",
            [f"{4 * k}-{4 * k + 3},{4 * k + 64}-{4 * k + 67}" for k in range(16)],
        ),
        (epyc, 2, "core", ["0-31", "32-63"]),
        (epyc, 2, "auto", []),
        (epyc, 4, "auto", ["0-15", "16-31", "32-47", "48-63"]),
        (epyc, 8, "auto", [f"{8 * k}-{8 * k + 7}" for k in range(8)]),
        (epyc, 8, "l3cache", [f"{8 * k}-{8 * k + 7}" for k in range(8)]),
        (epyc, 16, "l3cache", [f"{4 * k}-{4 * k + 3}" for k in range(16)]),
        (laptop, 2, "core", ["0-7,8-9", "10-15"]),
        (laptop, 3, "core", ["0-7", "8-11", "12-15"]),
        (laptop, 12, "auto", []),
        (container, 2, "core", ["2-3", "12-13"]),
        (container, 4, "core", ["2", "3", "12", "13"]),
        (one_core_offline, 3, "core", ["0", "2", "3"]),
        (without_sys, 2, "core", ["0-1", "2-3"]),
        (without_sys, 2, "auto", []),
    ],
)
def test_ranks_get_equal_sets_of_whole_cores(
    machine: Any, ranks: int, binding: str, expected: list[str], made: Made
) -> None:
    found = core_sets(made(machine), ranks, binding)
    assert [ranges(cpus_of(core_set)) for core_set in found] == [
        ranges(map(int, _numbers(text))) for text in expected
    ]
    assert len({len(core_set) for core_set in found}) <= 1


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for span in text.split(","):
        start, _, end = span.partition("-")
        numbers += range(int(start), int(end or start) + 1)
    return numbers


@pytest.mark.parametrize("machine", [two_sockets, epyc, laptop, container, without_sys])
def test_every_number_of_ranks_is_bound_or_refused(machine: Any, made: Made) -> None:
    """Sets don't overlap, and cross no domain."""
    found = made(machine)
    for ranks, binding in itertools.product(
        range(1, 17), ("core", "l3cache", "numa", "socket", "auto")
    ):
        try:
            sets = core_sets(found, ranks, binding)
        except ValueError as error:
            domains = found.domains(binding)
            assert ranks % len(domains) or ranks > len(found.cores), error
            continue
        assert len(sets) in (0, ranks)
        cpus = [cpu for core_set in sets for cpu in cpus_of(core_set)]
        assert len(cpus) == len(set(cpus))
        if binding in ("l3cache", "numa", "socket"):
            assert all(len({getattr(core, binding) for core in core_set}) == 1 for core_set in sets)


@pytest.mark.parametrize(
    ("ranks", "binding", "expected"),
    [
        (3, "numa", "3 ranks can't be divided equally among the 2 NUMA nodes of this host"),
        (66, "socket", "there is no core for each of 66 ranks"),
    ],
)
def test_cores_that_cannot_be_divided_are_refused(
    ranks: int, binding: str, expected: str, made: Made
) -> None:
    with pytest.raises(ValueError, match=expected):
        core_sets(made(two_sockets), ranks, binding)


def test_the_place_of_a_set_is_named(made: Made) -> None:
    machine = made(two_sockets)
    [first, _] = core_sets(machine, 2, "numa")
    assert described(first, machine) == "cores 0-31,64-95 (NUMA node 0)"
    machine = made(epyc)
    assert described(core_sets(machine, 2, "core")[1], machine) == "cores 32-63"


# Quotas


def write_groups(root: Path, version: int, quota: str) -> None:
    """Write the groups of a process in version 2, or 1, with a quota of CPU time on the one above."""
    period = 100_000
    if version == 2:
        write(root / "proc/self/cgroup", "0::/pod/container")
        write(root / "sys/fs/cgroup/pod/cpu.max", f"{quota} {period}")
        write(root / "sys/fs/cgroup/pod/container/cpu.max", f"max {period}")
        return
    write(root / "proc/self/cgroup", "4:memory:/pod\n3:cpu,cpuacct:/pod/container\n0::/")
    folder = root / "sys/fs/cgroup/cpu,cpuacct/pod"
    write(folder / "cpu.cfs_quota_us", quota)
    write(folder / "cpu.cfs_period_us", period)
    write(folder / "container/cpu.cfs_quota_us", -1)
    write(folder / "container/cpu.cfs_period_us", period)


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_a_group_above_counts(version: int, tmp_path: Path) -> None:
    write_groups(tmp_path, version, "400000")
    machine = read_machine(tmp_path, range(64))
    assert machine.quota is not None and machine.quota.cpus == 4
    threads = [threads_of_rank(machine, ranks, ()) for ranks in (1, 2, 3, 8)]
    assert threads == [4, 2, 1, 1]


@pytest.mark.parametrize(("version", "quota"), [(1, "-1"), (2, "max"), (2, "broken")])
def test_a_machine_without_a_quota_has_none(version: int, quota: str, tmp_path: Path) -> None:
    write_groups(tmp_path, version, quota)
    assert read_machine(tmp_path, range(2)).quota is None


def test_a_quota_above_the_cores_changes_nothing(made: Made) -> None:
    machine = Machine(made(two_sockets).cores, Quota(200.0, ""))
    assert threads_of_rank(machine, 2, ()) is None
    sets = core_sets(machine, 2, "numa")
    assert threads_of_rank(machine, 2, sets) == 32, "one for each core, not for each of its threads"


# Real processes on this machine

SHOWS = """
import os, subprocess, sys
print("cpus", *sorted(os.sched_getaffinity(0)), os.environ.get("NPU_DEVICE_CORES"), flush=True)
subprocess.run([sys.executable, "-c", "import os; print('child', *sorted(os.sched_getaffinity(0)))"])
"""
needs_two_cores = pytest.mark.skipif(
    len(read_machine().cores) != 2 or len(os.sched_getaffinity(0)) != 2, reason="needs two cores"
)


@needs_two_cores
def test_each_rank_and_its_children_have_a_core(tmp_path: Path) -> None:
    done = npurun("-n", "2", "--bind-to", "core", script(tmp_path, SHOWS))
    first, second = sorted(os.sched_getaffinity(0))
    lines = sorted(done.stdout.decode().splitlines())
    assert lines == [
        f"[0] child {first}",
        f"[0] cpus {first} 1",
        f"[1] child {second}",
        f"[1] cpus {second} 1",
    ]
    assert f"npurun: rank 1: cores {second}" in done.stderr.decode()


@needs_two_cores
def test_ranks_are_bound_only_where_it_is_asked_for(tmp_path: Path) -> None:
    path = script(tmp_path, SHOWS)
    done = npurun("-n", "2", path)
    assert done.stdout.decode().count("cpus 0 1 None") == 2 and b": cores" not in done.stderr
    done = npurun("-n", "1", "--bind-to", "core", path)
    assert b"cpus 0 1 None" in done.stdout
    done = npurun("-n", "2", "--bind-to", "auto", path)
    assert b"--bind-to auto: nothing is bound" in done.stderr


@needs_two_cores
def test_more_ranks_than_cores_are_refused(tmp_path: Path) -> None:
    done = npurun("-n", "3", "--bind-to", "core", script(tmp_path, SHOWS))
    assert done.returncode == 2 and b"there is no core for each of 3 ranks" in done.stderr


def test_a_wrong_word_is_refused(tmp_path: Path) -> None:
    done = npurun("-n", "2", "--bind-to", "thread", script(tmp_path, SHOWS))
    assert done.returncode == 2 and b"invalid choice: 'thread'" in done.stderr


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(two_sockets, "2 NUMA nodes"), (epyc, "4 NUMA nodes"), (laptop, ""), (without_sys, "")],
)
def test_one_rank_by_default_names_speed_where_more_may_be_faster(
    machine: Any,
    expected: str,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(arguments, "read_machine", lambda: made(machine))
    monkeypatch.setattr(argument_types, "visible_gpus", int)
    assert arguments.parse([__file__]).nproc_per_node == 1
    hint = capsys.readouterr().err
    assert hint.count("npurun speed measures that") == bool(expected)
    assert expected in hint
    # Whoever gives the number has chosen.
    assert arguments.parse(["-n", "1", __file__]).nproc_per_node == 1
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (two_sockets, ["1", "2", "2 bound", "3", "4", "4 bound", "8", "8 bound"]),
        (epyc, ["1", "2", "3", "4", "4 bound", "8", "8 bound"]),
        (laptop, ["1", "2", "3", "4", "8"]),
    ],
)
def test_speed_tries_ranks_bound_and_not(machine: Any, expected: list[str], made: Made) -> None:
    options = speed.make_parser().parse_args([__file__])
    setups = speed.setups_to_measure(made(machine), [1, 2, 3, 4, 8], options)
    assert [setup.label for setup in setups] == expected
    options.bind_to = "core"
    bound = speed.setups_to_measure(made(machine), [1, 2, 128], options)
    # There are fewer than 128 cores.
    assert [setup.label for setup in bound] == ["1", "2 bound"]
    options.n = [1, 128]
    with pytest.raises(ValueError, match="no core for each of 128 ranks"):
        speed.setups_to_measure(made(machine), options.n, options)


def test_runs_of_verify_and_speed_keep_proxies_and_lose_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "RANK", "TF_CONFIG", "NPU_DEVICE_SPLIT"):
        monkeypatch.setenv(name, "25%,75%")
    variables = script_runs._variables()
    assert {"no_proxy", "NPU_DEVICE_SPLIT"} <= variables.keys()
    assert not {"RANK", "TF_CONFIG"} & variables.keys()


@pytest.mark.parametrize("vendor, expected", [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_the_processor_is_told_by_its_vendor(tmp_path: Path, vendor: str, expected: bool) -> None:
    assert not has_amd_processor(tmp_path)
    write(tmp_path / "proc/cpuinfo", f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert has_amd_processor(tmp_path) is expected
