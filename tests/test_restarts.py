"""npurun --max-restarts on one node: what is started again and what isn't, what the ranks find, and what is told."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest
from launcher import npurun, script, start
from ranks import free_port

from npu_device.launch.events import Exit
from npu_device.launch.failures import examine

AGAIN = ("--restart-backoff", "0.1", "--max-restarts")


def attempts(stderr: bytes) -> list[str]:
    """Return the lines of the list of attempts at the end."""
    _, found, after = stderr.decode().partition("npurun: the attempts of this job:\n")
    assert found, stderr.decode()
    return [
        line[len("npurun:   ") :] for line in after.splitlines() if line.startswith("npurun:   ")
    ]


@pytest.mark.parametrize(
    ("failing", "end", "waits", "told"),
    [
        ("1", "os.kill(os.getpid(), 9)", True, "rank 1 on host {}: killed by SIGKILL"),
        ("01", "os.kill(os.getpid(), 9)", False, " on host {}: killed by SIGKILL"),
        (
            "1",
            "raise ValueError('bad label')",
            False,
            "rank 1 on host {}: exit code 1: ValueError: bad label",
        ),
    ],
    ids=["SIGKILL", "SIGKILL to all ranks", "exception"],
)
def test_a_failed_rank_is_started_again_with_all_others(
    tmp_path: Path, failing: str, end: str, waits: bool, told: str
) -> None:
    source = script(
        tmp_path,
        f"""
        import os, sys, time
        count, rank = int(os.environ["NPU_DEVICE_RESTART_COUNT"]), os.environ["RANK_ID"]
        print("attempt", count, "job", os.environ["JOB_ID"], "port", os.environ["NPU_DEVICE_HUB"], flush=True)
        if count == 0:
            if rank in "{failing}":
                {end}
            if {waits}:
                time.sleep(60)
        """,
    )
    done = npurun("-n", "2", *AGAIN, "1", "--job-id", "mine", source)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    for rank in (0, 1):
        mine = [line.split() for line in lines if line.startswith(f"[{rank}]")]
        assert [(words[2], words[4]) for words in mine] == [("0", "mine"), ("1", "mine-restart1")]
    first, second = attempts(done.stderr)
    assert (
        first.startswith("0: ")
        and "2 ranks: rank " in first
        and told.format(socket.gethostname()) in first
    )
    assert second.startswith("1: ") and second.endswith("2 ranks: succeeded")
    assert b"npurun: restart 1 of 1 in 0.1 s: rank " in done.stderr


def test_restarts_are_counted_and_the_logs_of_all_attempts_kept(tmp_path: Path) -> None:
    """Each attempt fails at another place, and the last one's exit code is the job's."""
    source = script(
        tmp_path,
        """
        import os, sys
        count = int(os.environ["NPU_DEVICE_RESTART_COUNT"])
        print("attempt", count)
        sys.exit(10 + count)
        """,
    )
    logs = tmp_path / "logs"
    done = npurun(
        "-n", "2", "--log-dir", str(logs), "--master-port", str(free_port()), *AGAIN, "2", source
    )
    assert done.returncode == 12
    assert b"no restart: all 2 restart(s) have been used" in done.stderr
    assert [line.rpartition(" ")[2] for line in attempts(done.stderr)] == ["10", "11", "12"]
    assert b"in 0.1 s" in done.stderr and b"in 0.2 s" in done.stderr, "the wait doubles"
    names = [f"rank{rank}{part}.log" for rank in (0, 1) for part in ("", ".restart1", ".restart2")]
    assert sorted(path.name for path in logs.iterdir()) == sorted(names)
    assert (logs / "rank0.log").read_text() == "attempt 0\n"
    assert (logs / "rank1.restart2.log").read_text() == "attempt 2\n"
    assert done.stderr.count(b"the output goes to") == 1
    assert re.search(rb"its output is in .*rank[01].restart1.log", done.stderr)


CRASHING = """
    import os, sys
    path, count = os.environ["NPU_DEVICE_PROGRESS_FILE"], int(os.environ["NPU_DEVICE_RESTART_COUNT"])
    def train():
        if sys.argv[1] == "progress" and count < 2:
            open(path, "w").write(str(100 * (count + 1)))
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), 9)
        raise ValueError(f"wrong at the {count}th time")
    print("began")
    train()
"""


@pytest.mark.parametrize(
    ("text", "mode", "tries", "told"),
    [
        (CRASHING, "none", 2, "{}:9 (ValueError)"),
        (CRASHING, "progress", 3, "{}:9 (ValueError)"),
        (CRASHING, "killed", 4, None),
        ("import no_such_module", "", 2, "{}:1 (ModuleNotFoundError)"),
        (
            "import argparse; argparse.ArgumentParser().parse_args(['--x'])",
            "",
            2,
            "rank 0, exit code 2",
        ),
    ],
    ids=["a bug", "a new checkpoint", "kills are no bug", "can't be imported", "wrong usage"],
)
def test_two_failures_at_the_same_place_are_a_bug(
    tmp_path: Path, text: str, mode: str, tries: int, told: str | None
) -> None:
    source = script(tmp_path, text)
    done = npurun("-n", "1", *AGAIN, "3", source, mode)
    lines = attempts(done.stderr)
    assert len(lines) == tries, done.stderr.decode()
    assert done.stdout.count(b"began") == (tries if text == CRASHING else 0)
    stderr = " ".join(done.stderr.decode().replace("npurun: ", "").split())
    if told is None:
        assert done.returncode == 137 and "no restart: all 3 restart(s) have been used" in stderr
        return
    assert done.returncode in (1, 2)
    assert f"failed at the same place, {told.format(source)}, and wrote no checkpoint" in stderr
    assert "This is a bug in the script" in stderr
    if mode == "progress":
        steps = [
            "(newest checkpoint: step 100)",
            "(newest checkpoint: step 200)",
            "(newest checkpoint: step 200)",
        ]
        assert [line[line.rindex("(") :] for line in lines] == steps


def test_a_program_that_cannot_be_executed_is_not_started_again(tmp_path: Path) -> None:
    path = Path(script(tmp_path, "#!/no/such/interpreter\n", "program"))
    path.chmod(0o755)
    done = npurun("-n", "1", *AGAIN, "3", str(path))
    assert done.returncode == 126
    assert b"could not start" in done.stderr and b"name the interpreter" in done.stderr
    assert b"no restart: the ranks can't be started" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_signal_between_two_attempts_ends_the_job(tmp_path: Path) -> None:
    launch = start(
        "-n",
        "1",
        "--restart-backoff",
        "60",
        "--max-restarts",
        "3",
        script(tmp_path, "raise ValueError"),
    )
    for line in launch.stderr:
        if b"restart 1 of 3 in 60 s" in line:
            break
    launch.terminate()
    launch.communicate(timeout=30)
    assert launch.returncode == 143


LIBRARY = f"""\
Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    train()
  File "/work/train.py", line 9, in train
    json.loads("x")
  File "{json.__file__}", line 346, in loads
    return _default_decoder.decode(s)
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
W0000 the end of another library"""
CHAINED = (
    f"{LIBRARY}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    + """\
Traceback (most recent call last):
  File "/work/train.py", line 12, in <module>
    raise RuntimeError("no labels") from error
RuntimeError: no labels"""
)
SYNTAX = """\
  File "/work/train.py", line 1
    def broken(:
               ^
SyntaxError: invalid syntax"""
AUTOGRAPH = """\
Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    step()
  File "/venv/lib/python3.11/site-packages/tensorflow/python/util/traceback_utils.py", line 153, in error_handler
    raise e.with_traceback(filtered_tb) from None
  File "/tmp/__autograph_generated_file1x2y.py", line 10, in tf__step
    retval_ = 1
ValueError: in user code:"""


@pytest.mark.parametrize(
    ("status", "stderr", "place"),
    [
        (1, LIBRARY, "/work/train.py:9 (JSONDecodeError)"),
        (1, CHAINED, "/work/train.py:12 (RuntimeError)"),
        (1, SYNTAX, "/work/train.py:1 (SyntaxError)"),
        (1, AUTOGRAPH, "/work/train.py:3 (ValueError)"),
        (1, "it failed", "rank 2, exit code 1"),
        (-signal.SIGSEGV, "", "rank 2, killed by SIGSEGV"),
        (-signal.SIGKILL, LIBRARY, None),
        (137, "", None),  # a shell reports a kill
        (
            1,
            LIBRARY.replace(
                "json.decoder.JSONDecodeError", "npu_device._src.cluster.rank_errors.PeerError"
            ),
            None,
        ),
    ],
)
def test_the_place_of_a_failure(status: int, stderr: str, place: str | None) -> None:
    failure, _ = examine(Exit(2, status, 0.0), "no such file", False, stderr.splitlines())
    assert failure.origin == place


def test_the_folder_of_npurun_lasts_and_is_made_again(tmp_path: Path) -> None:
    """systemd-tmpfiles passes over locked directories; other cleaners of old files may remove it."""
    source = script(
        tmp_path,
        """
        import fcntl, os, pathlib, shutil, sys
        if os.environ["RANK_ID"] == "1" or os.environ["NPU_DEVICE_RESTART_COUNT"] == "1":
            sys.exit()
        folder = pathlib.Path(os.environ["NPU_DEVICE_ERROR_FILE"]).parents[1]
        try:
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("locked", flush=True)
        shutil.rmtree(folder)
        sys.exit(int(sys.argv[1]))
        """,
    )
    again = npurun(*AGAIN, "1", source, "3", TMPDIR=str(tmp_path))
    assert (again.returncode, again.stdout) == (0, b"[0] locked\n"), again.stderr
    # Nobody knows whether ranks whose marks have been removed had opened npu_device.
    done = npurun("-n", "2", source, "0", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and b"independent copies" not in done.stderr


def test_no_room_for_the_folder_is_an_error_of_the_start(tmp_path: Path) -> None:
    limited = ("sh", "-c", 'ulimit -n 7; exec "$0" "$@"')
    launch = start("true", on=lambda words: [*limited, *words], TMPDIR=str(tmp_path))
    _, err = launch.communicate(timeout=30)
    assert (launch.returncode, err.count(b"\n")) == (2, 1), err
    assert b"Too many open files" in err
    assert list(tmp_path.iterdir()) == []
