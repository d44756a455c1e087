"""A rank that fails: the others are stopped, nothing is left running, and the first failure in time is told last."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from launcher import LIMIT, is_running, npurun, script, start, wait_for_files

pytestmark = pytest.mark.xdist_group("waiting")

# A rank starts late on a busy machine: the order of two failures is made by a file with the number of a process.
ORDER = """
    import os, pathlib, time
    def will_end():
        path = pathlib.Path(os.environ["HERE"], "ending")
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
    def wait_for_its_end():
        path = pathlib.Path(os.environ["HERE"], "ending")
        while not path.exists():
            time.sleep(0.01)
        stat = pathlib.Path("/proc", path.read_text(), "stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)
        time.sleep(0.3)  # npurun has seen it
"""

# What npu_device leaves for the launcher when a rank raises (npu_device._src.cluster.health).
RECORD = """
    import json, os, sys, time
    rank = int(os.environ["RANK_ID"])
    def record(error, secondary=False, seconds_ago=0.0):
        path = os.environ["NPU_DEVICE_ERROR_FILE"]
        frame = '  File "train.py", line 1, in whole traceback of rank %d' % rank
        traceback = "Traceback (most recent call last):\\n%s\\n%s" % (frame, error)
        found = dict(time=time.time() - seconds_ago, error=error, traceback=traceback, secondary=secondary)
        json.dump(found, open(path + ".part", "w"))
        os.replace(path + ".part", path)
"""


def last_lines(stderr: bytes) -> str:
    return stderr.decode().rpartition("npurun: ")[2]


def test_the_first_failure_is_told_last_with_its_traceback(tmp_path: Path) -> None:
    source = script(
        tmp_path,
        ORDER
        + """
    import json
    if os.environ["RANK_ID"] == "1":
        will_end()
        try:
            json.loads("{")
        except ValueError as error:
            raise ValueError("bad größe") from error
    wait_for_its_end()
    raise RuntimeError("a consequence")
    """,
    )
    done = npurun("-n", "3", source, HERE=str(tmp_path))
    assert done.returncode == 1
    head, *traceback, left_out = (
        done.stderr.decode().rpartition("npurun: the first failure ")[2].splitlines()
    )
    assert head.startswith(f"on host {socket.gethostname()}: rank 1: exit code 1, ")
    assert traceback.count("Traceback (most recent call last):") == 2, (
        "the cause of the exception is told too"
    )
    assert any("JSONDecodeError: Expecting property name" in line for line in traceback)
    assert traceback[-1] == "ValueError: bad größe"
    assert [line for line in traceback if f"json{os.sep}" in line] == []
    assert (
        left_out
        == "npurun: frames of libraries left out: 3; the whole traceback is in its output above"
    )
    assert "npurun: 3 of 3 ranks ended with an error" in done.stderr.decode()


FIRST = {
    "the other's is a consequence": (
        """
    if rank == 0:
        record("PeerError: rank 1 failed", secondary=True, seconds_ago=5.0)
        will_end()
        sys.exit(1)
    wait_for_its_end()
    record("ValueError: the cause")
    sys.exit(3)
    """,
        3,
        "rank 1: exit code 3, ",
    ),
    "killed without a record": (
        """
    if rank == 1:
        will_end()
        os.kill(os.getpid(), 9)
    wait_for_its_end()
    record("UnavailableError: connection reset")
    sys.exit(1)
    """,
        128 + 9,
        "rank 1: killed by SIGKILL",
    ),
    "hangs at its exit": (
        """
    if rank == 0:
        sys.exit(7)
    record("ValueError: the cause", seconds_ago=1.0)
    time.sleep(60)
    """,
        1,
        "rank 1: stopped by npurun, killed by SIGTERM, ",
    ),
}


@pytest.mark.parametrize(("text", "code", "first"), FIRST.values(), ids=FIRST)
def test_the_rank_that_failed_first_is_named(
    tmp_path: Path, text: str, code: int, first: str
) -> None:
    done = npurun("-n", "2", script(tmp_path, ORDER + RECORD + text), HERE=str(tmp_path))
    assert done.returncode == code
    assert first in last_lines(done.stderr)
    if code != 128 + 9:
        assert last_lines(done.stderr).endswith(
            '  File "train.py", line 1, in whole traceback of rank 1\nValueError: the cause\n'
        )


def test_the_line_about_an_error_says_what_it_is(tmp_path: Path) -> None:
    source = script(
        tmp_path,
        ORDER
        + RECORD
        + """
    if rank == 0:
        will_end()
        sys.exit(0)
    wait_for_its_end()
    if rank == 1:
        record("  File 'mine.py', line 1\\n    (\\n    ^\\nSyntaxError: invalid syntax".replace("'", '"'))
    else:
        record("ValueError: these differ:\\n  rank 0: 1\\n  rank 1: 2")
    time.sleep(0.2 * rank)
    sys.exit(1)
    """,
    )
    stderr = npurun("-n", "3", source, HERE=str(tmp_path)).stderr.decode()
    assert ': SyntaxError: invalid syntax (File "mine.py", line 1)\n' in stderr
    assert ": ValueError: these differ: rank 0: 1\n" in stderr
    assert "npurun: before that, rank 0 had ended with exit code 0\n" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("legacy", ["0", "1"])
def test_the_first_failure_is_that_of_the_script_when_keras_adds_lines(
    tmp_path: Path, legacy: str
) -> None:
    """It is read from what the rank leaves; from stderr without npu_device, under tf-keras."""
    source = script(
        tmp_path,
        """
        import os
        import tensorflow as tf
        class Broken(tf.keras.layers.Layer):
            def call(self, x):
                raise ValueError(f"no {x.shape[0]} rows")
        if os.environ["TF_USE_LEGACY_KERAS"] == "0":
            import npu_device as npu
            npu.open()
        layer = Broken()
        tf.function(lambda: layer(tf.zeros([3, 1])))()
        """,
    )
    done = npurun("-n", "1", source, TF_USE_LEGACY_KERAS=legacy)
    [line] = [
        line
        for line in done.stderr.decode().splitlines()
        if line.startswith("npurun: the first failure")
    ]
    assert line.endswith(" s after the start: ValueError: no 3 rows")


def test_only_consequences_on_this_node(tmp_path: Path) -> None:
    source = script(
        tmp_path, RECORD + "    record('PeerError: rank 0 failed', secondary=True); sys.exit(1)"
    )
    done = npurun("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", source)
    assert done.returncode == 1
    assert "other nodes" in done.stderr.decode()


def test_a_broken_record_is_no_record(tmp_path: Path) -> None:
    source = script(
        tmp_path,
        """
        import os
        text = ["", "[]", '{"time": "never"}', '{"time": 1.0}'][int(os.environ["RANK_ID"])]
        open(os.environ["NPU_DEVICE_ERROR_FILE"], "w").write(text)
        raise ValueError("seen")
        """,
    )
    done = npurun("-n", "4", source)
    assert done.returncode == 1
    assert done.stderr.count(b" s after the start: ValueError: seen\n") == 4
    assert last_lines(done.stderr).endswith("ValueError: seen\n")


@pytest.mark.parametrize(("status", "code"), [("os._exit(42)", 42), ("os.abort()", 134)])
def test_without_a_traceback_the_last_lines_are_told(
    tmp_path: Path, status: str, code: int
) -> None:
    source = script(
        tmp_path,
        f"""
        import os, sys
        for number in range(1000):
            print("noise", number, file=sys.stderr)
        print("2026-11-28 03:43:49.930816: I tensorflow/core/util/port.cc:153] a remark", file=sys.stderr)
        {status}
        """,
    )
    done = npurun(source)
    assert done.returncode == code
    assert last_lines(done.stderr).splitlines() == [
        "the last lines of its error output:",
        *[f"noise {number}" for number in range(980, 1000)],
    ]


def test_a_wrong_variable_is_told_before_ranks_start(tmp_path: Path) -> None:
    done = npurun("-n", "2", script(tmp_path, "print('started')"), NPU_DEVICE_AUDIT="daily")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count(b"NPU_DEVICE_AUDIT is 'daily'") == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_nothing_is_left_running(tmp_path: Path) -> None:
    """Ranks hear SIGTERM; those that are stopped, and deaf children, are killed after the grace period."""
    source = script(
        tmp_path,
        f"""
        import os, signal, subprocess, sys, time
        rank = int(os.environ["RANK_ID"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits it
        child = subprocess.Popen(["sleep", "100"])
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
        for name, pid in (("rank", os.getpid()), ("child", child.pid)):
            path = os.path.join({str(tmp_path)!r}, f"{{name}}{{rank}}.pid")
            open(path + ".part", "w").write(str(pid))
            os.rename(path + ".part", path)
        if rank == 2:
            while len([name for name in os.listdir({str(tmp_path)!r}) if name.endswith(".pid")]) < 6:
                time.sleep(0.01)
            sys.exit(3)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
        """,
    )
    began = time.monotonic()
    done = npurun("-n", "3", "--grace", "1", source)
    assert time.monotonic() - began > 1  # the grace period
    assert done.returncode == 3
    assert done.stdout == b"[1] saved\n"
    stderr = done.stderr.decode()
    assert (
        f"1 of 3 ranks ended with an error on host {socket.gethostname()}; npurun stopped 1 rank:\n"
        in stderr
    )
    assert "rank 0: stopped by npurun, killed by SIGKILL" in stderr
    pids = wait_for_files(tmp_path, "*.pid", 6)
    assert [pid for pid in pids if is_running(pid)] == []


AS_FIRST_PROCESS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def test_the_first_process_of_a_container_takes_orphans(tmp_path: Path) -> None:
    """They stay zombies in the process group of the rank until npurun waits for them."""
    trial = subprocess.run([*AS_FIRST_PROCESS, "true"], check=False, capture_output=True)
    if trial.returncode:
        pytest.skip(f"needs namespaces of the kernel: {trial.stderr.decode()}")
    began = time.monotonic()
    command = ("--grace", "10", "sh", "-c", "sleep 100 & exit 3")
    launch = start(*command, on=lambda words: [*AS_FIRST_PROCESS, *words])
    launch.communicate(timeout=LIMIT)
    assert launch.returncode == 3
    assert time.monotonic() - began < 10  # the grace period


def test_a_rank_that_cannot_be_started_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "rank2.log").mkdir()
    done = npurun("-n", "3", "--log-dir", str(tmp_path), "sleep", "60")
    assert done.returncode == 126
    assert b"could not start all ranks" in done.stderr and b"rank2.log" in done.stderr
    assert b"Traceback" not in done.stderr
