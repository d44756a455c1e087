"""Ctrl-C and other ends of npurun itself: everybody stops, once, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launcher import is_running, script, start, wait_for_files, wait_until

pytestmark = pytest.mark.xdist_group("waiting")

WAITING = """
    import os, signal, subprocess, sys, time
    here, mode = sys.argv[1:]
    if mode == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def note(pid, name):
        path = os.path.join(here, name + os.environ["RANK_ID"] + ".pid")
        open(path + ".part", "w").write(str(pid))
        os.rename(path + ".part", path)
    note(subprocess.Popen(["sleep", "100"]).pid, "child")
    got = []
    if mode == "polite":
        signal.signal(signal.SIGINT, lambda *_: got.append("SIGINT"))
        signal.signal(signal.SIGTERM, lambda *_: got.append("SIGTERM"))
    note(os.getpid(), "rank")
    while not got:
        time.sleep(0.01)
    time.sleep(0.5)
    print("saved after", got)
"""


def waiting(tmp_path: Path, mode: str, *options: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    launch = start("-n", "2", *options, script(tmp_path, WAITING), str(tmp_path), mode)
    return launch, wait_for_files(tmp_path, "*.pid", 4)


def left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize(
    ("number", "code", "to_group"),
    [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False), (signal.SIGHUP, 129, True)],
)
def test_one_signal_stops_everybody(tmp_path: Path, number: int, code: int, to_group: bool) -> None:
    launch, pids = waiting(tmp_path, "polite")
    if to_group:  # as a terminal does
        os.killpg(launch.pid, number)
    else:
        os.kill(launch.pid, number)
    out, err = launch.communicate(timeout=10)
    name = signal.Signals(number).name
    assert launch.returncode == code
    if number != signal.SIGHUP:
        assert sorted(out.splitlines()) == [b"[%d] saved after ['%s']" % (rank, name.encode()) for rank in (0, 1)]
    assert name.encode() in err
    assert all(line.startswith(b"npurun: ") for line in err.splitlines())
    assert left(pids) == []


def test_ctrl_c_of_a_plain_script(tmp_path: Path) -> None:
    launch, pids = waiting(tmp_path, "plain", "--grace", "60")
    os.killpg(launch.pid, signal.SIGINT)
    _, err = launch.communicate(timeout=30)  # nobody had to be killed
    assert launch.returncode == 130
    assert b"npu_device/launch" not in err, "no traceback of the launcher"
    assert b"first failure" not in err
    assert left(pids) == []


def test_who_does_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    launch, pids = waiting(tmp_path, "deaf", "--grace", "1")
    began = time.monotonic()
    os.kill(launch.pid, signal.SIGINT)
    launch.communicate(timeout=20)
    assert time.monotonic() - began >= 1
    assert launch.returncode == 130
    assert left(pids) == []


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    launch, pids = waiting(tmp_path, "deaf", "--grace", "60")
    os.killpg(launch.pid, signal.SIGINT)
    time.sleep(1.0)
    assert launch.poll() is None
    os.killpg(launch.pid, signal.SIGINT)
    launch.communicate(timeout=30)
    assert launch.returncode == 130
    assert left(pids) == []


def test_a_ctrl_c_that_arrives_twice_at_once_is_one(tmp_path: Path) -> None:
    launch, _ = waiting(tmp_path, "polite")
    for _ in range(3):
        os.kill(launch.pid, signal.SIGINT)
        time.sleep(0.03)
    out, _ = launch.communicate(timeout=10)
    assert len(out.splitlines()) == 2, "the ranks had the time to save"


def test_when_the_launcher_is_killed_nothing_stays(tmp_path: Path) -> None:
    directory = tmp_path / "temporary"
    directory.mkdir()
    launch = start("-n", "2", script(tmp_path, WAITING), str(tmp_path), "deaf", TMPDIR=str(directory))
    pids = wait_for_files(tmp_path, "*.pid", 4)
    assert list(directory.iterdir()) != []
    os.killpg(launch.pid, signal.SIGKILL)
    launch.communicate(timeout=10)
    wait_until(lambda: left(pids) == [], limit=5)
    wait_until(lambda: list(directory.iterdir()) == [], limit=5)


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """nohup npurun ... survives the end of the terminal."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch, pids = waiting(tmp_path, "polite")
    finally:
        signal.signal(signal.SIGHUP, previous)
    os.killpg(launch.pid, signal.SIGHUP)
    time.sleep(1.0)
    assert launch.poll() is None
    os.kill(launch.pid, signal.SIGTERM)
    launch.communicate(timeout=10)
    assert launch.returncode == 143
    assert left(pids) == []
