"""``python -m npu_device.testing.soak``: a job that is killed and stopped again and again has the same result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launcher import environment, script

SOAK = (sys.executable, "-m", "npu_device.testing.soak")

COUNTING = """
    import os, sys, time

    directory, resumes = sys.argv[1:]
    path = f"{directory}/state{os.environ['RANK_ID']}"
    step, total = (int(word) for word in open(path).read().split()) if os.path.exists(path) else (0, 0)
    while step < 30:
        time.sleep(0.05)
        step, total = step + 1, total + step * (1 if resumes == "whole" else os.getpid())
        with open(path + ".part", "w") as file:
            file.write(f"{step} {total}")
        os.replace(path + ".part", path)
    print("total", total, flush=True)
"""


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SOAK, *arguments], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_job_that_resumes_has_the_same_result(tmp_path: Path) -> None:
    faults = ("--mtbf", "0.3", "--for", "4", "--longest-stop", "0.3", "--dir", str(tmp_path / "soak"))
    job = ("-n", "2", "--restart-backoff", "0.05", script(tmp_path, COUNTING), "{dir}", "whole")
    done = soak(*faults, "--", *job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the results are the same" in done.stdout
    assert " fault(s); " in done.stdout and " 0 fault(s)" not in done.stdout
    output = (tmp_path / "soak" / "disturbed" / "output").read_text()
    assert ("killed by SIGKILL" in output) is ("kill rank" in done.stdout)
    again = soak(*faults, "--", *job)
    assert (again.returncode, "is not empty" in again.stderr) == (2, True)


@pytest.mark.parametrize("result", [(), ("--result", "{dir}/state0")], ids=["last line", "file"])
def test_another_result_is_told(tmp_path: Path, result: tuple[str, ...]) -> None:
    faults = ("--mtbf", "100", "--dir", str(tmp_path / "soak"), *result)
    done = soak(*faults, "--", "-n", "1", script(tmp_path, COUNTING), "{dir}", "by process")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the results are DIFFERENT" in done.stdout
    assert "disturbed: " in done.stdout


def test_wrong_usage() -> None:
    assert soak().returncode == 2
    assert "expected kill, stop or kill,stop" in soak("--faults", "burn", "--", "train.py").stderr
