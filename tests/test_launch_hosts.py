"""npurun --hosts: all nodes are started and stopped from one place. ssh is a script that runs its command here."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest
from launcher import LIMIT, is_running, npurun, script, start, wait_for_files, wait_until
from ranks import free_port, time_limits
from test_launch_failure import RECORD

from npu_device._src.cluster.ports import addresses_of_this_host
from npu_device.launch.connection import is_this_host

pytestmark = pytest.mark.xdist_group("waiting")

HOSTS = ("--hosts", "one:2,me@two:2", "--master-addr", "127.0.0.1")
WAITS = """
    import os, time
    from pathlib import Path
    Path("pid" + os.environ["RANK_ID"]).write_text(str(os.getpid()))
    time.sleep(60)
    """


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """A command in ssh's place, which writes its command lines down; the host "off" can't be reached."""
    path = tmp_path / "ssh"
    path.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/lines\nif [ "$1" = off ]; then echo no such host >&2; exit 255; fi\n'
        'shift\nexec sh -c "$*"\n'
    )
    path.chmod(0o755)
    return str(path)


def port() -> tuple[str, str]:
    return "--master-port", str(free_port())


def test_all_hosts_are_started(tmp_path: Path, ssh: str) -> None:
    shows = """
        import os
        print("of", os.environ["RANK_SIZE"], os.getcwd(), os.environ["NPU_DEVICE_SECRET"], os.environ["TF_MINE"])
        from npu_device._src.membership.schemes import membership_from_environment
        from npu_device._src.cluster.rendezvous import meet
        cluster, channel = meet(membership_from_environment())
        channel.close()
        """
    done = npurun(
        *HOSTS, *port(), script(tmp_path, shows), cwd=tmp_path, NPU_DEVICE_SSH=ssh, TF_MINE="mine"
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.decode().splitlines())
    assert [line.split()[0] for line in lines] == ["[0]", "[1]", "[2]", "[3]"]
    assert len({line[4:] for line in lines}) == 1
    _, _, size, directory, secret, mine = lines[0].split()
    assert (size, directory, mine) == ("4", str(tmp_path), "mine")
    commands = (tmp_path / "lines").read_text()
    assert [line.split()[0] for line in sorted(commands.splitlines())] == ["me@two", "one"]
    assert len(secret) == 64 and secret not in commands


def test_ranks_know_their_place_by_horovods_variables(tmp_path: Path, ssh: str) -> None:
    shows = """
        import os
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        print(*(os.environ["HOROVOD_" + name] for name in names))
        """
    done = npurun(*HOSTS, *port(), "--horovod", script(tmp_path, shows), NPU_DEVICE_SSH=ssh)
    lines = sorted(done.stdout.decode().splitlines())
    assert lines == ["[0] 0 4 0 2 0 2", "[1] 1 4 1 2 0 2", "[2] 2 4 0 2 1 2", "[3] 3 4 1 2 1 2"]


def test_a_hostfile_and_the_secret_of_the_user(tmp_path: Path, ssh: str) -> None:
    (tmp_path / "hosts").write_text("one slots=1  # the first\n\nlocalhost:1\n")
    (tmp_path / "secret").write_text("ours")
    shows = 'import os; print(os.environ["NPU_DEVICE_SECRET"], os.environ["NPU_DEVICE_SECRET_FILE"] == "")'
    done = npurun(
        *("--hostfile", str(tmp_path / "hosts"), *port(), script(tmp_path, shows)),
        NPU_DEVICE_SSH=ssh,
        NPU_DEVICE_SECRET_FILE=str(tmp_path / "secret"),
    )
    assert sorted(done.stdout.splitlines()) == [b"[0] ours True", b"[1] ours True"], done.stderr
    assert (tmp_path / "lines").read_text().count("\n") == 1  # this host needs no ssh


@pytest.mark.slow
def test_a_host_that_fails_ends_the_others(tmp_path: Path, ssh: str) -> None:
    fails = """
        import os, sys, time
        if os.environ["RANK_ID"] == "3":
            sys.exit(7)
        time.sleep(60)
        """
    done = npurun(
        *HOSTS, *port(), "--grace", "1", script(tmp_path, fails), limit=20, NPU_DEVICE_SSH=ssh
    )
    assert done.returncode == 7, done.stderr
    assert b"npurun: host me@two ended with exit code 7" in done.stderr
    assert b"rank 3: exit code 7" in done.stderr


def test_the_code_is_that_of_the_cause_even_if_its_host_ends_last(tmp_path: Path, ssh: str) -> None:
    fails = """
    import pathlib, signal
    here = pathlib.Path(sys.argv[1])
    def wait_for(condition):
        while not condition():
            time.sleep(0.01)
    if rank == 0:
        wait_for((here / "other").exists)
        record("ValueError: the cause")
        (here / "failed").touch()
        sys.exit(3)
    if rank == 2:
        (here / "part").write_text(str(os.getppid()))
        (here / "part").rename(here / "other")
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for((here / "failed").exists)
    if rank == 1:
        npurun = pathlib.Path("/proc", (here / "other").read_text())
        wait_for(lambda: not npurun.exists())
    record("PeerError: rank 0 failed", secondary=True)
    sys.exit(1)
    """
    done = npurun(
        *(*HOSTS, *port(), script(tmp_path, RECORD + fails), str(tmp_path)), NPU_DEVICE_SSH=ssh
    )
    assert done.returncode == 3, done.stderr
    assert b"npurun: host me@two ended with exit code 1" in done.stderr


def test_the_code_of_a_failed_connection(tmp_path: Path, ssh: str) -> None:
    """A host can't be reached; a rank ends with the same code, on this host and on another one."""
    fails = ("--grace", "1", "sh", "-c", "[ $RANK_ID = 0 ] && exit 255; sleep 60")
    off, here, one = (
        npurun("--hosts", host, *port(), *fails, NPU_DEVICE_SSH=ssh)
        for host in ("off,one", "127.0.0.1", "one")
    )
    assert [done.returncode for done in (off, here, one)] == [255, 255, 255]
    assert b"no such host" in off.stderr
    assert b"npurun: off: the connection failed or ended" in off.stderr
    assert b"connection" not in here.stderr + one.stderr


@contextlib.contextmanager
def two_taken_ports() -> Iterator[int]:
    """Take two neighbouring ports, and yield the lower one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            number = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number + 1)):
                yield number
                return


@pytest.mark.parametrize("restarts", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_a_taken_port_has_a_remedy_that_npurun_follows(restarts: str) -> None:
    with two_taken_ports() as first:
        options = ("--hosts", "localhost:1,127.0.0.1:1", "--max-restarts", restarts)
        limits = time_limits(HOSTS_NOTICE_SECONDS=0.2)
        done = npurun(*options, "--master-port", str(first), "true", **limits)
        here = npurun("-n", "2", "true", NPU_DEVICE_PORT_RANGE=f"{first}-{first + 1}")
    assert (done.returncode, here.returncode) == (2, 2)
    remedy = b"What to do: end the other program, or "
    assert b"another program uses this port" in done.stderr
    assert remedy + b"choose another port: npurun --master-port" in done.stderr
    assert b"this port and the next ones up to %d" % (first + 1) in here.stderr
    assert remedy + b"let NPU_DEVICE_PORT_RANGE have more ports" in here.stderr


MEETS = """
    from npu_device._src.membership.schemes import membership_from_environment
    from npu_device._src.cluster.rendezvous import meet
    meet(membership_from_environment())
    """


# With three nodes, ranks of two can't meet before the third process has come.
DO_NOT_MEET = {
    "--master-addr and --master-port": ["--nnodes 2 -n 1 --node-rank 1"],
    "its own --node-rank": [
        "--nnodes 3 -n 1 --node-rank 0",
        *["--nnodes 3 -n 1 --node-rank 1"] * 2,
    ],
    "the same -n": ["--nnodes 2 -n 2 --node-rank 0", "--nnodes 2 -n 1 --node-rank 1"],
}


def test_nodes_that_do_not_meet_are_told_of_options(tmp_path: Path) -> None:
    meets = script(tmp_path, MEETS)
    launches = {}
    for says, nodes in DO_NOT_MEET.items():
        job = (*port(), "--master-addr", "127.0.0.1", "--grace", "1")
        # A node alone waits for its limit; ranks that contradict each other end once all have come.
        seconds = str(3 if len(nodes) == 1 else LIMIT)
        launches[says] = [
            start(*job, *node.split(), meets, HCCL_CONNECT_TIMEOUT=seconds) for node in nodes
        ]
    outputs = {
        says: [launch.communicate(timeout=LIMIT)[1].decode() for launch in started]
        for says, started in launches.items()
    }
    for says, texts in outputs.items():
        assert any(says in text.partition("What to do: ")[2] for text in texts), texts


def test_ctrl_c_while_a_host_does_not_answer(tmp_path: Path) -> None:
    silent = script(tmp_path, f"echo $$ > {tmp_path}/ssh_pid; exec sleep 100", "ssh")
    process = start("--hosts", "one", "true", NPU_DEVICE_SSH=f"sh {silent}")
    (pid,) = wait_for_files(tmp_path, "ssh_pid", 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert not is_running(pid)


@pytest.mark.parametrize(
    "host", ["localhost", "::1", socket.gethostname(), *addresses_of_this_host()[:1]]
)
def test_a_host_that_is_this_one_needs_no_ssh(host: str, tmp_path: Path) -> None:
    assert not is_this_host("192.0.2.1") and not is_this_host("no-such-host.invalid")
    assert not is_this_host(f"me@{host}"), "which may be another user"
    done = npurun("--hosts", f"[{host}]:1", "sh", "-c", "echo ran", NPU_DEVICE_SSH="false")
    assert (done.returncode, done.stdout) == (0, b"[0] ran\n"), done.stderr


NAMED = """
import os, socket, subprocess, sys
socket.sethostname("alpha")
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/hosts"], check=True)
os.execv(sys.argv[2], sys.argv[2:])
"""
IN_NAMESPACES = ("unshare", "--user", "--map-root-user", "--uts", "--mount")


def in_a_host_of_another_name(names: Path) -> Callable[[list[str]], list[str]]:
    """Return what makes a command run where the host is called alpha, and this file is ``/etc/hosts``."""
    try:
        trial = [*IN_NAMESPACES, sys.executable, "-c", NAMED, str(names), "/bin/true"]
        subprocess.run(trial, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs namespaces of the kernel: {getattr(error, 'stderr', error)}")
    return lambda command: [*trial[:-1], *command]


@pytest.mark.parametrize(
    "address", [pytest.param("127.0.1.1", id="Debian"), pytest.param("203.0.113.7", id="router")]
)
def test_a_host_knows_its_full_name(address: str, tmp_path: Path) -> None:
    """Debian gives the name an address of the loopback. Behind a router, it leads to one that no interface has."""
    names = tmp_path / "names"
    names.write_text(f"127.0.0.1 localhost\n{address} alpha.example.org alpha\n")
    on = in_a_host_of_another_name(names)
    for host, is_here in (("Alpha.example.org", True), ("beta.example.org", False)):
        process = start(
            "--hosts", f"{host}:1", "sh", "-c", "echo ran", on=on, NPU_DEVICE_SSH="false"
        )
        printed, said = process.communicate(timeout=LIMIT)
        assert (printed == b"[0] ran\n") == (process.returncode == 0) == is_here, said


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"NPU_DEVICE_SSH": "ssh '"}, 'NPU_DEVICE_SSH is "ssh \'"; expected a command line'),
        ({"NPU_DEVICE_SECRET_FILE": "secret"}, "the secret is not UTF-8 text"),
    ],
)
def test_wrong_variables_are_refused(variables: dict[str, str], says: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\xff\xfe")
    done = npurun("--hosts", "one", "sh", "-c", "true", cwd=tmp_path, **variables)
    assert done.returncode == 2
    assert says in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_end_of_npurun_is_the_end_of_the_ranks(
    number: int, code: int, restarts: str, tmp_path: Path, ssh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        options = ("--grace", "1", "--max-restarts", restarts)
        process = start(*HOSTS, *port(), *options, script(tmp_path, WAITS), NPU_DEVICE_SSH=ssh)
    finally:
        signal.signal(signal.SIGHUP, previous)
    pids = wait_for_files(tmp_path, "pid*", 4)
    process.send_signal(number)
    output = process.communicate(timeout=30)[1]
    assert process.returncode == code, output
    wait_until(lambda: not any(map(is_running, pids)))
