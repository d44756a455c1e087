"""A request to stop: npurun passes it on once, waits, and takes exit code 75 for "resumable", never for a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launcher import is_running, npurun, script, start, wait_for_files, wait_until

from npu_device._src.testing import leaks

pytestmark = pytest.mark.xdist_group("waiting")

# Stands for a script with JobCheckpoint: ends its step when asked, writes a checkpoint, and ends with 75.
SCRIPT = """
    import os, pathlib, signal, subprocess, sys, time
    here, mode, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK_ID"]
    number = signal.Signals[os.environ["NPU_DEVICE_PREEMPT_SIGNAL"]]
    got = []
    def note(pid, name):
        path = here / f"{name}{rank}.pid"
        path.with_suffix(".part").write_text(str(pid))
        path.with_suffix(".part").rename(path)
    if mode == "deaf":
        signal.signal(number, signal.SIG_IGN)
    else:
        child = subprocess.Popen(["sleep", "100"])
        note(child.pid, "child")
        signal.signal(number, lambda *_: got.append(1))
    note(os.getpid(), "rank")
    while not got:
        time.sleep(0.01)
    time.sleep(1.0)
    if mode in ("step", "every"):
        assert len(got) == 1 or mode == "every"
        assert child.poll() is None, "the step still needs it"
        if rank == "0":
            pathlib.Path(os.environ["NPU_DEVICE_PROGRESS_FILE"]).write_text("12")
    elif mode == "bug" and rank == "1":
        raise ValueError("while stopping")
    print("ended its step")
    sys.exit(75)
"""


def running(tmp_path: Path, mode: str, *options: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    launch = start("-n", "2", *options, script(tmp_path, SCRIPT), str(tmp_path), mode)
    return launch, wait_for_files(tmp_path, "*.pid", 2 if mode == "deaf" else 4)


def ignores_sigterm(pid: int) -> bool:
    (mask,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    return bool(int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_ranks_end_their_step_and_npurun_ends_with_75(tmp_path: Path, name: str) -> None:
    options = [] if name == "SIGTERM" else ["--preempt-signal", name[3:]]
    launch, pids = running(tmp_path, "step", "--max-restarts", "3", *options)
    launch.send_signal(signal.Signals[name])
    out, err = launch.communicate(timeout=60)
    assert launch.returncode == 75, err.decode()
    assert sorted(out.splitlines()) == [b"[0] ended its step", b"[1] ended its step"]
    assert f"npurun: {name}: asking 2 ranks to stop within 25 s".encode() in err
    assert err.endswith(b"npurun: stopped on request at step 12, resumable\n")
    assert b"failed" not in err and b"restart" not in err
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_request_to_the_ranks_themselves(tmp_path: Path) -> None:
    launch, pids = running(tmp_path, "step", "--max-restarts", "3")
    for pid in pids:
        if Path(f"/proc/{pid}/comm").read_text().strip() != "sleep":
            os.kill(pid, signal.SIGTERM)
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 75, err.decode()
    assert err == b"npurun: stopped on request at step 12, resumable\n"


def test_a_scheduler_that_signals_every_process(tmp_path: Path) -> None:
    """As Slurm does. The hub and the guard stay."""
    launch, pids = running(tmp_path, "every")
    children = list(leaks.children_of(launch.pid))
    hub_and_guard = [pid for pid in children if pid not in pids]
    assert len(hub_and_guard) == 2
    wait_until(lambda: all(map(ignores_sigterm, hub_and_guard)))
    for pid in (*children, launch.pid):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert all(map(is_running, hub_and_guard))
    out, err = launch.communicate(timeout=60)
    assert launch.returncode == 75, err.decode()
    assert len(out.splitlines()) == 2


def test_ranks_that_do_not_follow_the_others_are_stopped(tmp_path: Path) -> None:
    source = script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK_ID"] == "1":
            sys.exit(75)
        time.sleep(100)
        """,
    )
    began = time.monotonic()
    done = npurun("-n", "2", "--preempt-timeout", "1", source)
    assert done.returncode == 143
    assert time.monotonic() - began >= 1
    assert b"rank 0: stopped by npurun, killed by SIGTERM" in done.stderr
    assert b"rank 1" not in done.stderr, "75 is no failure"


def test_the_limit(tmp_path: Path) -> None:
    launch, pids = running(tmp_path, "deaf", "--preempt-timeout", "1", "--grace", "60")
    began = time.monotonic()
    launch.send_signal(signal.SIGTERM)
    launch.communicate(timeout=20)
    assert time.monotonic() - began >= 1
    assert launch.returncode == 143
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(("options", "expected"), [([], b"7.5"), (["--preempt-timeout", "9"], b"9")])
def test_a_limit_from_the_environment(tmp_path: Path, options: list[str], expected: bytes) -> None:
    source = script(tmp_path, "import os; print(os.environ['NPU_DEVICE_PREEMPT_TIMEOUT'])")
    assert npurun(*options, source, NPU_DEVICE_PREEMPT_TIMEOUT="7.5").stdout == b"[0] " + expected + b"\n"


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    launch, pids = running(tmp_path, "deaf", "--preempt-timeout", "60")
    launch.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert launch.poll() is None
    launch.send_signal(signal.SIGTERM)
    launch.communicate(timeout=15)
    assert launch.returncode == 143
    assert not any(map(is_running, pids))


def test_a_rank_that_fails_while_stopping_is_not_resumable(tmp_path: Path) -> None:
    launch, _ = running(tmp_path, "bug", "--max-restarts", "3")
    launch.send_signal(signal.SIGTERM)
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 143
    assert b"ValueError: while stopping" in err
    assert b"resumable" not in err and b"restart" not in err
