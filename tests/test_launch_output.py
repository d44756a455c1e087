"""npurun carries the ranks' output: whole lines with their rank, nothing lost, nothing mixed."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from pathlib import Path

import pytest
from launcher import (
    NPURUN,
    environment,
    is_running,
    npurun,
    script,
    start,
    wait_for_files,
    wait_until,
    without_hint,
)
from ranks import time_limits

pytestmark = pytest.mark.xdist_group("waiting")


def of_rank(output: bytes, rank: int) -> list[bytes]:
    prefix = b"[%d] " % rank
    return [line[len(prefix) :] for line in output.split(b"\n") if line.startswith(prefix)]


def test_lines_are_those_that_a_rank_wrote(tmp_path: Path) -> None:
    """Bytes that are no text stay, and of a progress bar the newest refresh."""
    source = script(
        tmp_path,
        r"""
        import os
        for byte in "Grüße 世界 🙂\n".encode():  # cut in the middle of characters
            os.write(1, bytes([byte]))
        os.write(1, b"\xff\x00\xfe\n\nwindows\r\n")
        for step in (1, 2, 3):
            os.write(1, b"\rbar %d/3" % step)
        os.write(1, b"\nother 1/2\rother 2/2\r\nno newline")
        """,
    )
    expected = [
        "Grüße 世界 🙂".encode(),
        b"\xff\x00\xfe",
        b"",
        b"windows",
        b"bar 3/3",
        b"other 2/2",
        b"no newline",
    ]
    done = npurun("-n", "2", source)
    assert [of_rank(done.stdout, rank) for rank in (0, 1)] == [expected] * 2


def test_large_output_is_complete_and_never_mixed(tmp_path: Path) -> None:
    source = script(
        tmp_path,
        """
        import os, sys, threading
        rank = os.environ["RANK_ID"]
        def write(stream, name):
            for number in range(10_000):
                stream.write(f"{name}{rank} {number} " + "x" * (number % 100) + "\\n")
            stream.write("y" * 3_000_000)
        threads = [threading.Thread(target=write, args=a) for a in ((sys.stdout, "out"), (sys.stderr, "err"))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """,
    )
    done = npurun("-n", "2", source)
    assert done.returncode == 0
    for rank in (0, 1):
        for name, output in ((b"out", done.stdout), (b"err", done.stderr)):
            lines = of_rank(output, rank)
            expected = [
                b"%s%d %d " % (name, rank, number) + b"x" * (number % 100)
                for number in range(10_000)
            ]
            assert lines[:10_000] == expected
            assert b"".join(lines[10_000:]) == b"y" * 3_000_000
            assert max(map(len, lines)) < 1_200_000, "a line without an end is cut"


@pytest.mark.slow
def test_lines_and_progress_come_while_the_rank_runs(tmp_path: Path) -> None:
    source = script(
        tmp_path,
        r"""
        import time
        print("first")
        for step in range(200):
            print(f"\rstep {step}", end="", flush=True)
            time.sleep(0.1)
        """,
    )
    launch = start(source, **time_limits(REFRESH_SECONDS=1.0))
    began = time.monotonic()
    assert launch.stdout.readline() == b"[0] first\n"
    assert launch.stdout.readline().startswith(b"[0] step ")
    assert 0.9 < time.monotonic() - began < 12
    launch.terminate()
    launch.communicate(timeout=10)


def test_ranks_have_colours_on_a_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    source = script(tmp_path, "print('here')")
    launch = subprocess.Popen(
        [*NPURUN, "-n", "1", source], env=environment(), stdout=slave, stderr=slave
    )
    os.close(slave)
    assert launch.wait(20) == 0
    assert os.read(master, 4096).startswith(b"\x1b[36m[0]\x1b[0m here\r\n")
    os.close(master)


FLOODS = """
    import os, sys
    from pathlib import Path
    if os.environ["RANK_ID"] == "1":
        {other}
    Path("pid").write_text(str(os.getpid()))
    for number in range(20_000):
        print("line", number)
    """


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ("pass", 0),
        ("import time; time.sleep(60)", 143),
        ("import time; time.sleep(2); sys.exit(3)", 3),
    ],
    ids=["goes away", "is stopped before a signal", "is stopped before a failure"],
)
def test_a_reader_that_goes_away_or_is_stopped(
    tmp_path: Path, other: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends no rank, and keeps nothing from the ranks."""
    monkeypatch.chdir(tmp_path)
    source = script(tmp_path, FLOODS.format(other=other))
    launch = start("-n", "2", "--grace", "1", source, **time_limits(READER_SECONDS=1.0))
    (pid,) = wait_for_files(tmp_path, "pid", 1)
    if code == 0:
        launch.stdout.readline()
        launch.stdout.close()
        assert launch.wait(20) == 0
        assert without_hint(launch.stderr.read()) == b""
        launch.stderr.close()
        return
    time.sleep(1.0)  # the pipe is full
    if code == 143:
        launch.terminate()
    wait_until(lambda: not is_running(pid), limit=10)
    if code == 143:
        assert launch.wait(20) == code
    else:
        time.sleep(1.0)
        assert launch.poll() is None, "it waits for its reader"
    out, err = launch.communicate(timeout=20)
    assert launch.returncode == code
    assert of_rank(out, 0)[:2] == [b"line 0", b"line 1"]
    assert code == 143 or b"rank 1 failed (exit code 3); stopping the others" in err


@pytest.mark.parametrize("tee", [(), ("--tee",)])
def test_a_log_dir_has_the_output_of_each_rank(tmp_path: Path, tee: tuple[str, ...]) -> None:
    source = script(
        tmp_path,
        r"""
        import os, sys, time
        sys.stdout.write("out\rbar 1\rbar 2")
        sys.stdout.flush()
        time.sleep(0.3)
        os.write(2, b"err \xff\n")
        time.sleep(0.3)
        print(" end")
        """,
    )
    logs = tmp_path / "logs" / "of a run"
    done = npurun("-n", "2", "--log_dir", str(logs), *tee, source)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ([b"[0] bar 2 end", b"[1] bar 2 end"] if tee else [])
    errors = [line for line in done.stderr.splitlines() if not line.startswith(b"npurun: ")]
    assert sorted(errors) == ([b"[0] err \xff", b"[1] err \xff"] if tee else [])
    assert sorted(path.name for path in logs.iterdir()) == ["rank0.log", "rank1.log"]
    for path in logs.iterdir():
        assert path.read_bytes() == b"err \xff\nbar 2 end\n"


def test_a_process_that_escaped_with_the_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    source = script(
        tmp_path,
        f"""
        import subprocess
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        open({str(pid)!r}, "w").write(str(child.pid))
        print("bye")
        """,
    )
    done = npurun(source, limit=10)
    assert (done.returncode, done.stdout) == (0, b"[0] bye\n")
    wait_until(pid.exists)
    os.kill(int(pid.read_text()), 9)


def test_ranks_that_never_opened_the_device_are_told(tmp_path: Path) -> None:
    source = "import os, subprocess; child = subprocess.Popen(['sleep', '60']); "
    source += "open(f'{os.environ[\"RANK_ID\"]}.pid', 'w').write(str(child.pid))"
    done = npurun("-n", "2", script(tmp_path, source), cwd=tmp_path, limit=20)
    assert done.returncode == 0
    assert not any(map(is_running, wait_for_files(tmp_path, "*.pid", 2))), "children are ended, too"
    assert b"none of the 2 ranks opened npu_device" in done.stderr
    assert b"NPUDistributedOptimizer in a session" in done.stderr
    assert b"npu.open()" in done.stderr


def test_a_rank_that_runs_long_after_another_is_named(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, time; time.sleep(2 * (os.environ['RANK_ID'] == '0'))")
    done = npurun("-n", "2", path, limit=20, **time_limits(LATE_RANK_SECONDS=0.3))
    assert done.returncode == 0
    lines = [line for line in done.stderr.split(b"\n") if b"still runs" in line]
    assert len(lines) == 1 and b"rank 0" in lines[0] and b"0.3 s after another rank" in lines[0]
