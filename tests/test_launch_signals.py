"""Signals to npurun and its ranks: everybody stops, once, and nothing is left running. A request to stop is passed on,
and exit code 75 means "resumable", never a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launcher import is_running, npurun, script, start, wait_for_files, wait_until
from ranks import time_limits

from npu_device._src.testing import leaks

pytestmark = pytest.mark.xdist_group("waiting")

# Each rank starts a child. It is deaf to signals; or plain, as Python is by default; or saves, and ends. In the modes
# of preemption it stands for a script with JobCheckpoint: ends its step when asked, writes a checkpoint, ends with 75.
SCRIPT = """
    import os, pathlib, signal, subprocess, sys, time
    here, mode, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK_ID"]
    numbers = signal.SIGINT, signal.Signals[os.environ["NPU_DEVICE_PREEMPT_SIGNAL"]]
    got = []
    def note(pid, name):
        path = here / f"{name}{rank}.pid"
        path.with_suffix(".part").write_text(str(pid))
        path.with_suffix(".part").rename(path)
    if mode == "deaf":
        [signal.signal(number, signal.SIG_IGN) for number in numbers]
    child = subprocess.Popen(["sleep", "100"])
    note(child.pid, "child")
    if mode not in ("deaf", "plain"):
        [signal.signal(number, lambda number, _: got.append(signal.Signals(number).name)) for number in numbers]
    note(os.getpid(), "rank")
    while not got:
        time.sleep(0.01)
    time.sleep(1.0 if mode == "every" else 0.3)
    if mode in ("step", "every"):
        assert len(got) == 1 or mode == "every"
        assert child.poll() is None, "the step still needs it"
        if rank == "0":
            pathlib.Path(os.environ["NPU_DEVICE_PROGRESS_FILE"]).write_text("12")
    elif mode == "bug" and rank == "1":
        raise ValueError("while stopping")
    print("saved after", got)
    sys.exit(0 if mode == "polite" else 75)
"""


def running(
    tmp_path: Path, mode: str, *options: str, wrapper: Sequence[str] = (), **variables: str
) -> tuple[subprocess.Popen[bytes], list[int]]:
    command = [*wrapper, script(tmp_path, SCRIPT), str(tmp_path), mode]
    launch = start("-n", "2", *options, *command, **variables)
    return launch, wait_for_files(tmp_path, "*.pid", 4)


def left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [("polite", signal.SIGINT, 130), ("polite", signal.SIGHUP, 129), ("plain", signal.SIGINT, 130)],
)
def test_one_signal_of_a_terminal_stops_everybody(
    tmp_path: Path, mode: str, number: int, code: int
) -> None:
    limits = time_limits(SAME_SIGNAL_SECONDS=10.0)
    launch, pids = running(tmp_path, mode, "--max-restarts", "3", "--grace", "60", **limits)
    for _ in range(3 if number == signal.SIGINT else 1):  # more at once are one
        os.killpg(launch.pid, number)
        time.sleep(0.03)
    out, err = launch.communicate(timeout=30)  # nobody had to be killed
    assert launch.returncode == code
    assert signal.Signals(number).name.encode() in err
    assert not any(word in err for word in (b"restart", b"npu_device/launch", b"first failure"))
    if mode == "polite":
        assert all(line.startswith(b"npurun: ") for line in err.splitlines())
        saved = [b"[%d] saved after ['SIGINT']" % rank for rank in (0, 1)]
        assert sorted(out.splitlines()) == (saved if number == signal.SIGINT else [])
    assert left(pids) == []


@pytest.mark.parametrize(
    ("number", "code", "limits"),
    [
        (signal.SIGINT, 130, ("--grace", "1")),
        (signal.SIGTERM, 143, ("--preempt-timeout", "1", "--grace", "60")),
        (signal.SIGTERM, 143, ("--preempt-timeout", "60")),
    ],
    ids=["grace", "preempt-timeout", "second signal"],
)
def test_who_does_not_stop_is_killed(
    tmp_path: Path, number: int, code: int, limits: tuple[str, ...]
) -> None:
    """After the limit, or at once by a second signal."""
    launch, pids = running(tmp_path, "deaf", *limits, **time_limits(SAME_SIGNAL_SECONDS=0.1))
    began = time.monotonic()
    launch.send_signal(number)
    if "60" in limits[:2]:
        time.sleep(1.0)
        assert launch.poll() is None
        launch.send_signal(number)
    launch.communicate(timeout=20)
    assert time.monotonic() - began >= 1
    assert launch.returncode == code
    assert left(pids) == []


def test_when_the_launcher_is_killed_nothing_stays(tmp_path: Path) -> None:
    directory = tmp_path / "temporary"
    directory.mkdir()
    launch, pids = running(tmp_path, "deaf", TMPDIR=str(directory))
    assert list(directory.iterdir()) != []
    pids += leaks.children_of(launch.pid)  # the hub, too
    os.killpg(launch.pid, signal.SIGKILL)
    launch.communicate(timeout=10)
    wait_until(lambda: left(pids) == [])
    wait_until(lambda: list(directory.iterdir()) == [])


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """nohup npurun ... survives the end of the terminal."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch, pids = running(tmp_path, "polite")
    finally:
        signal.signal(signal.SIGHUP, previous)
    os.killpg(launch.pid, signal.SIGHUP)
    time.sleep(1.0)
    assert launch.poll() is None
    launch.terminate()
    launch.communicate(timeout=10)
    assert launch.returncode == 143
    assert left(pids) == []


# verify and speed become several processes when the script asks for its rank.
ASKS_FOR_ITS_RANK = """
    import os, time
    os.environ.get("RANK_ID")
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("tool", "number", "code"),
    [("verify", signal.SIGHUP, 129), ("verify", signal.SIGKILL, -9), ("speed", signal.SIGKILL, -9)],
)
def test_the_end_of_verify_and_speed_is_the_end_of_the_script(
    tool: str, number: int, code: int, tmp_path: Path
) -> None:
    directory = tmp_path / "temporary"
    directory.mkdir()
    # As nohup does, where the launcher isn't meant to hear of it.
    previous = signal.getsignal(signal.SIGHUP)
    if number == signal.SIGKILL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command = (tool, "-n", "2", script(tmp_path, ASKS_FOR_ITS_RANK))
        launch = start(*command, TMPDIR=str(directory))
    finally:
        signal.signal(signal.SIGHUP, previous)

    def of_the_script() -> list[int]:
        children = leaks.children_of(launch.pid)
        first = [pid for pid, command in children.items() if "script.py" in command]
        return first + [pid for parent in first for pid in leaks.children_of(parent)]

    # One process and the perturbed one, or one process, and the first one.
    wait_until(lambda: len(of_the_script()) == (3 if tool == "verify" else 2))
    pids = [*of_the_script(), *leaks.children_of(launch.pid)]
    if number == signal.SIGKILL:
        launch.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert launch.poll() is None and set(left(pids)) == set(pids)
    launch.send_signal(number)
    launch.communicate(timeout=20)
    assert launch.returncode == code
    wait_until(lambda: left(pids) == [])
    wait_until(lambda: list(directory.iterdir()) == [])


# A request to stop


@pytest.mark.parametrize(
    ("name", "to_ranks"), [("SIGTERM", False), ("SIGUSR1", False), ("SIGTERM", True)]
)
def test_ranks_end_their_step_and_npurun_ends_with_75(
    tmp_path: Path, name: str, to_ranks: bool
) -> None:
    options = [] if name == "SIGTERM" else ["--preempt-signal", name[3:]]
    launch, pids = running(tmp_path, "step", "--max-restarts", "3", *options)
    ranks = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() != "sleep"]
    for pid in ranks if to_ranks else [launch.pid]:
        os.kill(pid, signal.Signals[name])
    out, err = launch.communicate(timeout=60)
    assert launch.returncode == 75, err.decode()
    assert sorted(out.splitlines()) == [
        f"[{rank}] saved after ['{name}']".encode() for rank in (0, 1)
    ]
    asking, _, last = err.rpartition(b"npurun: stopped on request at step 12, resumable\n")
    assert last == b""
    assert asking.startswith(
        b"" if to_ranks else f"npurun: {name}: asking 2 ranks to stop within 25 s".encode()
    )
    assert asking.count(b"\n") == (0 if to_ranks else 1)
    wait_until(lambda: left(pids) == [])


# Each becomes the process of the rank, under a name that isn't this Python's.
WRAPPERS = {
    "another name": ["interpreter"],
    "env": ["env", sys.executable],
    "shell": ["sh", "-c", f'cd . && exec {sys.executable} "$0" "$@"'],
}


def test_a_wrapped_python_keeps_its_children_for_the_last_step(tmp_path: Path) -> None:
    (tmp_path / "interpreter").symlink_to(os.path.realpath(sys.executable))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    launches = []
    for kind, wrapper in WRAPPERS.items():
        (tmp_path / kind).mkdir()
        launches.append(running(tmp_path / kind, "step", wrapper=wrapper, PATH=path))
    for launch, pids in launches:
        launch.send_signal(signal.SIGTERM)
        _, err = launch.communicate(timeout=60)
        assert launch.returncode == 75, err.decode()
        wait_until(lambda pids=pids: left(pids) == [])


def test_a_scheduler_that_signals_every_process(tmp_path: Path) -> None:
    """As Slurm does. The hub and the guard stay."""

    def ignores_sigterm(pid: int) -> bool:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
        return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)

    launch, pids = running(tmp_path, "every")
    children = list(leaks.children_of(launch.pid))
    hub_and_guard = [pid for pid in children if pid not in pids]
    assert len(hub_and_guard) == 2
    wait_until(lambda: all(map(ignores_sigterm, hub_and_guard)))
    for pid in (*children, launch.pid):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert left(hub_and_guard) == hub_and_guard
    out, err = launch.communicate(timeout=60)
    assert launch.returncode == 75, err.decode()
    assert len(out.splitlines()) == 2


def test_ranks_that_do_not_follow_the_others_are_stopped(tmp_path: Path) -> None:
    began = time.monotonic()
    done = npurun(
        "-n",
        "2",
        "--preempt-timeout",
        "1",
        "sh",
        "-c",
        "[ $RANK_ID = 1 ] && exit 75; exec sleep 100",
    )
    assert done.returncode == 143
    assert time.monotonic() - began >= 1
    assert b"rank 0: stopped by npurun, killed by SIGTERM" in done.stderr
    assert b"rank 1" not in done.stderr, "75 is no failure"


def test_a_rank_that_fails_while_stopping_is_not_resumable(tmp_path: Path) -> None:
    launch, _ = running(tmp_path, "bug", "--max-restarts", "3")
    launch.send_signal(signal.SIGTERM)
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 143
    assert b"ValueError: while stopping" in err
    assert b"resumable" not in err and b"restart" not in err
