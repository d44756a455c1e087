"""``python -m npu_device.testing.soak``: a job that is disturbed again and again has the same result."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from launcher import environment, npurun, script, start, wait_until
from ranks import time_limits

from npu_device._src.cluster.roster import parent_and_start
from npu_device._src.testing.hosts import can_be_made

pytestmark = pytest.mark.xdist_group("waiting")

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

# Two ranks that need each other for each step, on the control channel alone, so that they start without TensorFlow.
GATHERING = """
    import os, sys, time
    from npu_device._src.cluster import rendezvous
    from npu_device._src.collectives.job import start
    from npu_device._src.membership.schemes import membership_from_environment

    path = f"{sys.argv[1]}/step{os.environ['RANK_ID']}"
    job = start(*rendezvous.meet(membership_from_environment()), serves_others=False)
    step = min(job.control.gather("begin", int(open(path).read()) if os.path.exists(path) else 0, 60))
    while step < 40:
        time.sleep(0.05)
        step = sum(job.control.gather(f"after {step}", step, 60)) // 2 + 1
        with open(path + ".part", "w") as file:
            file.write(str(step))
        os.replace(path + ".part", path)
    print("step", step, flush=True)
"""


def soak(*arguments: str, limit: int = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "npu_device.testing.soak", *arguments]
    return subprocess.run(
        command,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


@pytest.mark.slow
def test_a_job_that_resumes_has_the_same_result(tmp_path: Path) -> None:
    faults = ("--mtbf", "0.3", "--for", "3", "--longest", "0.3", "--dir", str(tmp_path / "soak"))
    job = ("-n", "2", "--restart-backoff", "0.05", script(tmp_path, COUNTING), "{dir}", "whole")
    done = soak(*faults, "--", *job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the results are the same" in done.stdout
    assert " fault(s), " in done.stdout and " 0 fault(s)" not in done.stdout
    output = (tmp_path / "soak" / "disturbed" / "output").read_text()
    assert ("killed by SIGKILL" in output) is ("kill rank" in done.stdout)
    again = soak(*faults, "--", *job)
    assert (again.returncode, "is not empty" in again.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["proxies", pytest.param("namespaces", marks=pytest.mark.full)])
def test_a_disturbed_network(tmp_path: Path, network: str) -> None:
    """The seed's faults: a half-closed and a reset network end an attempt, a short loss of all packets doesn't."""
    if network == "namespaces" and not can_be_made():
        pytest.skip("needs root, ip and tc")
    faults = (
        "--faults",
        "drop,delay,reset,half-close",
        "--mtbf",
        "0.2",
        "--for",
        "10",
        "--longest",
        "0.8",
    )
    nodes = (
        "--hosts",
        "2",
        "--network",
        network,
        "--seed",
        "1088",
        "--dir",
        str(tmp_path / "soak"),
    )
    done = soak(
        *faults, *nodes, "--", "--restart-backoff", "0.05", script(tmp_path, GATHERING), "{dir}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the results are the same" in done.stdout
    for row in ("half-close +[1-9]", "reset +[1-9]", "drop +0 +[1-9]"):
        assert re.search(row, done.stdout), done.stdout
    for node in ("", "1"):
        output = (tmp_path / "soak" / "disturbed" / f"output{node}").read_text()
        assert "node 1 is gone" in output and "succeeded" in output


# Counts alone on rank 0, which ends for nodes that have come; the others only wait, and end with it.
RESIZED = """
    import os, pathlib, sys, time

    here, rank, attempt = pathlib.Path(sys.argv[1]), os.environ["RANK_ID"], os.environ["NPU_DEVICE_RESTART_COUNT"]
    ended = here / f"ended{attempt}"
    requests = -1
    if rank == "0":
        requests = os.open(os.environ["NPU_DEVICE_JOIN_REQUESTS"], os.O_RDWR | os.O_NONBLOCK)
    path = here / "step"
    step = int(path.read_text()) if path.exists() else 0
    while not ended.exists() and not (here / "done").exists():
        time.sleep(0.05)
        if rank == "0":
            step += 1
            (here / "next").write_text(str(step))
            (here / "next").rename(path)
            if step == 120:
                (here / "done").touch()
            try:
                os.read(requests, 100)
                ended.touch()
            except BlockingIOError:
                pass
    if ended.exists():
        sys.exit(75)
    print("step", 120, flush=True)
"""


@pytest.mark.full
def test_nodes_leave_and_join(tmp_path: Path) -> None:
    faults = ("--faults", "leave,join", "--mtbf", "0.7", "--for", "5", "--seed", "3")
    nodes = ("--hosts", "2", "--network", "proxies", "--dir", str(tmp_path / "soak"))
    job = ("--restart-backoff", "0.05", "--grace", "1", script(tmp_path, RESIZED), "{dir}")
    limits = time_limits(JOIN_PAUSE_SECONDS=0.1, JOIN_ASK_SECONDS=0.3, RANKS_NOTICE_SECONDS=0.2)
    done = soak(*faults, *nodes, "--", *job, **limits)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the results are the same" in done.stdout
    for row in ("leave +[1-9]", "join +[1-9]"):
        assert re.search(row, done.stdout), done.stdout
    output = (tmp_path / "soak" / "disturbed" / "output").read_text()
    assert "the job grows from 1 to 2 ranks" in output


def test_another_result_is_told(tmp_path: Path) -> None:
    faults = ("--mtbf", "100", "--dir", str(tmp_path / "soak"), "--result", "{dir}/state0")
    done = soak(*faults, "--", "-n", "1", script(tmp_path, COUNTING), "{dir}", "by process")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the results are DIFFERENT" in done.stdout
    assert "disturbed: " in done.stdout


def test_wrong_usage_is_refused() -> None:
    assert soak().returncode == 2
    assert (
        "drop: the network of this host can't be disturbed"
        in soak("--faults", "drop", "--", "train.py").stderr
    )
    assert "expected some of kill,stop,drop" in soak("--faults", "burn", "--", "train.py").stderr


TRAIN = str(Path(__file__).parents[1] / "examples" / "soak" / "train.py")
EVERY = 10  # steps between copies in memory, without checkpoints on the disk


def training(directory: str, steps: int) -> tuple[str, ...]:
    """Return the script of a small training and its arguments."""
    saves = ("--every", "1000000", "--memory_every", str(EVERY))
    return (TRAIN, "--directory", directory, "--steps", str(steps), *saves)


def require_same_reads(disturbed: Path, undisturbed: Path, steps: int) -> None:
    """Require that each step has read the same batch, also when it was taken again, and that none is left out."""
    for name in ("steps0", "steps1"):
        reads = [
            {line for line in lines if not line.startswith("resumed")}
            for lines in (
                (folder / name).read_text().splitlines() for folder in (disturbed, undisturbed)
            )
        ]
        assert len(reads[0]) == steps and reads[0] == reads[1]


def require_low_costs(output: str) -> int:
    """Require that each restart has cost few steps; return how many there were."""
    pattern = r"of (\d+) restarts, (\d+) cost at most 10 steps, and (\d+) more, .*; the most: (\d+)"
    counts = re.search(pattern, output)
    assert counts, output
    restarts, within, others, most = map(int, counts.groups())
    print(counts.group())
    # A copy takes as long as some of these short steps, and the newest one may not be complete.
    assert restarts == within + others > 0 and most <= 3 * EVERY, counts
    return restarts


@pytest.mark.full
def test_copies_in_memory_keep_the_cost_of_kills_low(tmp_path: Path) -> None:
    """Ranks are killed at random times, also while they start."""
    place = tmp_path / "soak"
    faults = ("--faults", "kill", "--mtbf", "15", "--for", "60", "--dir", str(place))
    job = ("-n", "2", "--restart-backoff", "0.05", *training("{dir}", 4000))
    done = soak(*faults, "--result", "{dir}/weights.npy", "--", *job, limit=500)
    assert done.returncode == 0 and "the results are the same" in done.stdout, done.stdout
    require_same_reads(place / "disturbed", place / "undisturbed", 4000)
    require_low_costs((place / "disturbed" / "output").read_text())


KILLS = 20


@pytest.mark.full
def test_copies_in_memory_keep_the_cost_of_20_kills_at_random_steps_low(tmp_path: Path) -> None:
    random = Random(62)
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    disturbed.mkdir()
    undisturbed.mkdir()
    restarts = ("-n", "2", "--max-restarts", str(KILLS), "--restart-backoff", "0.05")
    # A file takes what all attempts say.
    output = tmp_path / "output"
    to_file = ["sh", "-c", f'exec "$@" > {output} 2>&1', "sh"]
    launched = start(*restarts, *training(str(disturbed), 2500), on=to_file.__add__)
    log = disturbed / "steps0"
    for kill in range(KILLS):
        wait_until(lambda: log.exists() and log.read_text().count("resumed") > kill, 180)  # noqa: B023
        lines = len(log.read_text().splitlines()) + random.randrange(20, 100)
        wait_until(lambda: len(log.read_text().splitlines()) >= lines, 60)  # noqa: B023
        os.kill(random.choice(ranks_of(launched.pid)), signal.SIGKILL)
    launched.communicate(timeout=300)
    assert launched.returncode == 0, output.read_text()
    assert require_low_costs(output.read_text()) == KILLS
    assert npurun("-n", "2", *training(str(undisturbed), 2500), limit=300).returncode == 0
    require_same_reads(disturbed, undisturbed, 2500)
    weights = [(folder / "weights.npy").read_bytes() for folder in (disturbed, undisturbed)]
    assert weights[0] == weights[1]


def ranks_of(launcher: int) -> list[int]:
    """Return the processes of the ranks that a launcher has started."""
    children = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(path.name)
            if parent_and_start(pid)[0] == launcher and TRAIN in (path / "cmdline").read_text():
                children.append(pid)
    return children
