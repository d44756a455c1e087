"""npurun --hosts while it loses a host: what is started again, what ends, and the exit code.

ssh is a script that runs its command here, in a session of its own, as sshd does.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import is_running, script, start, wait_until
from ranks import free_port, time_limits

pytestmark = pytest.mark.xdist_group("waiting")

LIMIT = 60.0
SSH = """\
    #!/bin/sh
    # Writes down its number. A host can't be reached while there is a file "off.HOST", and has no Python with
    # "bare.HOST". The remote end doesn't notice the end of this client while there is "deaf".
    here={here} host=$1
    shift
    exec 3<&0
    echo $$ > $here/client.$host
    if [ -e $here/off.$host ]; then echo "$host: no route" >&2; exit 255; fi
    if [ -e $here/bare.$host ]; then echo "python: not found" >&2; exit 127; fi
    mkfifo $here/input.$$
    {{ cat <&3; while [ -e $here/deaf ]; do sleep 0.1; done; }} > $here/input.$$ 2> $here/cat.log &
    setsid sh -c "$*" < $here/input.$$ &
    wait $!
    """

# Ranks that wait for each other through files, without npu_device. Those of the first attempt are to be stopped, and
# the others while there is a file "hold". A rank that finds the one of the attempt before still running says so.
SCRIPT = """
    import os, pathlib, signal, sys, time
    here = pathlib.Path(sys.argv[1])
    count, rank, size = (int(os.environ[n]) for n in ("NPU_DEVICE_RESTART_COUNT", "RANK_ID", "RANK_SIZE"))
    def mark(name, text=""):
        part = here / f"{name}.{os.getpid()}.part"  # two ranks may mark the same
        part.write_text(text)
        part.rename(here / name)
    before = here / f"ranks.{count - 1}.{rank}"
    if before.exists():
        pid = before.read_text().split()[0]
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state not in "ZX":
            mark("two at once", state)
    runs_on = lambda: count == 0 or (here / "hold").exists()
    if runs_on():
        signal.signal(signal.SIGTERM, lambda *_: mark("stop"))
    mark(f"ranks.{count}.{rank}", f"{os.getpid()} {os.getppid()} {size}")
    while len(list(here.glob(f"ranks.{count}.[0-9]"))) < size:
        time.sleep(0.02)
    while runs_on():
        if (here / "stop").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which may come as Python ends
            sys.exit(75)
        time.sleep(0.02)
"""


class Job:
    """An npurun on two hosts, "one" and "two"."""

    def __init__(
        self,
        here: Path,
        *options: str,
        hosts: str = "one:1,two:1",
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self.here = here
        ssh = Path(script(here, SSH.format(here=here), "ssh"))
        ssh.chmod(0o755)
        where = ("--hosts", hosts, "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        self.launch = start(
            *(
                *where,
                "--grace",
                "1",
                "--restart-backoff",
                "0.1",
                "--preempt-timeout",
                "1",
                *options,
            ),
            *(script(here, SCRIPT), str(here)),
            **time_limits(
                RANKS_NOTICE_SECONDS=0.2,
                HOST_RETRY_SECONDS=0.5,
                HOSTS_NOTICE_SECONDS=1.0,
                **(limits or {}),
            ),
            NPU_DEVICE_SSH=str(ssh),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)

    def _read(self) -> None:
        assert self.launch.stderr is not None
        for line in self.launch.stderr:
            self.lines.append(line.decode())

    def __enter__(self) -> Job:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self.here / "deaf").unlink(missing_ok=True)
        if self.launch.poll() is None:
            self.launch.kill()
        self._reader.join()
        assert self.launch.stdout is not None and self.launch.stderr is not None
        self.launch.stdout.close()
        self.launch.stderr.close()
        print("".join(self.lines))
        wait_until(lambda: not any(map(is_running, self.processes())))
        assert not (self.here / "two at once").exists(), (self.here / "two at once").read_text()

    def processes(self) -> list[int]:
        """Return the ranks and their npuruns, of all attempts."""
        return [
            int(pid)
            for file in self.here.glob("ranks.?.[0-9]")
            for pid in file.read_text().split()[:2]
        ]

    def npurun_of(self, node: int, count: int = 0) -> int:
        return int((self.here / f"ranks.{count}.{node}").read_text().split()[1])

    def client_of(self, node: int) -> int:
        return int((self.here / f"client.{('one', 'two')[node]}").read_text())

    def has_said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: self.has_said(text), LIMIT)

    def wait_for_ranks(self, count: int = 0) -> None:
        wait_until(lambda: len(list(self.here.glob(f"ranks.{count}.[0-9]"))) == 2, LIMIT)

    def sizes(self) -> list[int]:
        """Return how many ranks the attempts had."""
        attempts = itertools.takewhile(
            Path.exists, (self.here / f"ranks.{count}.0" for count in itertools.count())
        )
        return [int(path.read_text().split()[2]) for path in attempts]


LOSSES = (
    "npurun",
    "ssh",
    "ssh unnoticed",
    "signal",
    "signal for good",
    "for a while",
    "cut off",
    "for good",
)
"""What happens: npurun or ssh is killed, and the host doesn't notice the end of ssh; npurun is asked to stop, and the
host is gone for good; npurun is killed, and ssh fails for a while or for good, or lives on while ssh fails.
"""
OF_SSH = ("ssh", "ssh unnoticed", "cut off")


@dataclass(frozen=True)
class Case:
    loss: str
    node: int
    nnodes: str = "2"
    restarts: int = 1
    preemptions: int | None = None

    def __str__(self) -> str:
        preemptions = "any" if self.preemptions is None else self.preemptions
        return f"{self.loss}-{self.node}-{self.nnodes}-{self.restarts}-{preemptions}"

    @property
    def options(self) -> list[str]:
        limit = [] if self.preemptions is None else ["--max-preemptions", str(self.preemptions)]
        rejoin = "4" if "for good" in self.loss else "60"
        words = [
            "--nnodes",
            self.nnodes,
            "--max-restarts",
            str(self.restarts),
            "--rejoin-timeout",
            rejoin,
        ]
        return [*words, *limit]

    @property
    def expected(self) -> tuple[int, list[int]]:
        """The exit code of the job, and how many ranks its attempts have, as docs/reliability.md says."""
        acts_together = self.restarts > 0 or bool(self.preemptions) or self.nnodes == "1:2"
        is_signal = self.loss.startswith("signal")
        if is_signal and (not acts_together or self.preemptions == 0):
            return 75, [2]
        if not acts_together:
            return 137, [2]
        if self.restarts == 0 and not is_signal:
            return 1, [2]
        # The others don't wait for a node that leaves with notice.
        if (self.node, self.nnodes) == (1, "1:2") and (is_signal or "for good" in self.loss):
            return 0, [2, 1]
        if "for good" not in self.loss:
            return 0, [2, 2]
        return (75, [2]) if is_signal and self.node == 1 else (1, [2])


TABLE = list(
    itertools.starmap(Case, itertools.product(LOSSES, (0, 1), ("2", "1:2"), (0, 1), (None, 0, 1)))
)
SHORT = {
    Case("npurun", 0),
    Case("ssh unnoticed", 1),
    Case("signal", 0, preemptions=1),
    Case("for a while", 1),
    Case("for good", 0),
    Case("for good", 1, "1:2"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if case in SHORT else [pytest.mark.full])
        for case in TABLE
    ],
)
def test_a_lost_host(case: Case, tmp_path: Path) -> None:
    code, sizes = case.expected
    with Job(tmp_path, *case.options) as job:
        job.wait_for_ranks()
        name = ("one", "two")[case.node]
        off = tmp_path / f"off.{name}"
        if case.loss in ("ssh unnoticed", "cut off"):
            (tmp_path / "deaf").touch()
        if case.loss in ("for a while", "cut off", "for good", "signal for good"):
            off.touch()
        victim = job.client_of(case.node) if case.loss in OF_SSH else job.npurun_of(case.node)
        os.kill(victim, signal.SIGTERM if case.loss.startswith("signal") else signal.SIGKILL)
        if case.loss in ("for a while", "cut off"):
            text = f"npurun: host {name}: not reached, next try in 1 s"
            wait_until(lambda: job.has_said(text) or job.launch.poll() is not None, LIMIT)
            assert job.has_said(text) or code > 0
            off.unlink()
        assert job.launch.wait(LIMIT) == code
        assert job.sizes() == sizes
    if "for good" in case.loss and case.restarts and code in (1, 75) and case.preemptions != 0:
        error = ("host one, node 0: not reached within 4 s", "node(s) 1 did not come within 4 s")[
            case.node
        ]
        assert job.has_said(error)


@pytest.mark.parametrize("hosts", ["one:1,two:1", pytest.param("one:2", marks=pytest.mark.full)])
def test_all_hosts_are_lost_at_once(hosts: str, tmp_path: Path) -> None:
    """The restarts are counted on, so that a script that begins anew at restart 0 doesn't remove its checkpoints."""
    with Job(tmp_path, "--max-restarts", "1", hosts=hosts) as job:
        job.wait_for_ranks()
        for npurun in {job.npurun_of(0), job.npurun_of(1)}:
            os.kill(npurun, signal.SIGKILL)
        assert job.launch.wait(LIMIT) == 0
        assert job.sizes() == [2, 2]


@pytest.mark.full
def test_node_0_is_lost_more_often_than_the_job_may_restart(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with Job(tmp_path, "--max-restarts", "1") as job:
        for count in (0, 1):
            job.wait_for_ranks(count)
            os.kill(job.npurun_of(0, count), signal.SIGKILL)
        assert job.launch.wait(LIMIT) == 1
    assert job.has_said("host one, node 0: lost (exit code ")
    assert job.has_said("no restart: all 1 restart(s) have been used")


# SIGTERM asks for a resumable end, which the rank that still ran has come to.
@pytest.mark.parametrize(
    ("number", "node", "code"),
    [
        (signal.SIGINT, 1, 130),
        pytest.param(signal.SIGTERM, 0, 75, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 1, -9, marks=pytest.mark.full),
    ],
)
def test_npurun_ends_while_it_waits_for_a_host(
    number: int, node: int, code: int, tmp_path: Path
) -> None:
    with Job(tmp_path, "--max-restarts", "1") as job:
        job.wait_for_ranks()
        (tmp_path / f"off.{('one', 'two')[node]}").touch()
        os.kill(job.npurun_of(node), signal.SIGKILL)
        job.wait_for("trying to reach it again" if node == 0 else "restart 1 of 1")
        job.wait_for("next try in 2 s")
        client = job.client_of(node)
        job.launch.send_signal(number)
        assert job.launch.wait(LIMIT) == code
        assert job.client_of(node) == client, "no other try"


def test_a_host_that_is_not_there_at_the_start(tmp_path: Path) -> None:
    """When it has come, a request to stop npurun stops both, resumable."""
    (tmp_path / "off.one").touch()
    with Job(tmp_path, "--max-restarts", "1", "--preempt-timeout", "20") as job:
        job.wait_for("npurun: host one: not reached, next try in 1 s")
        (tmp_path / "off.one").unlink()
        job.wait_for_ranks()
        job.launch.terminate()
        assert job.launch.wait(LIMIT) == 75


def test_a_host_that_comes_when_the_job_has_begun_without_it(tmp_path: Path) -> None:
    (tmp_path / "off.two").touch()
    limits = {"LONGEST_BACKOFF_SECONDS": 0.5}
    with Job(tmp_path, "--nnodes", "1:2", "--rejoin-timeout", "2", limits=limits) as job:
        job.wait_for(
            "host two: not reached within 2 s (--rejoin-timeout); from now on a try every 0.5"
        )
        (tmp_path / "off.two").unlink()
        # The script takes no requests.
        job.wait_for("this node joins at the next restart, or when")
        job.launch.terminate()
        assert job.launch.wait(LIMIT) in (75, 143)


@pytest.mark.parametrize("nnodes", ["2", pytest.param("1:2", marks=pytest.mark.full)])
def test_a_host_on_which_npurun_cannot_be_started(nnodes: str, tmp_path: Path) -> None:
    """It isn't tried again: the job ends, or begins with the other one."""
    (tmp_path / "bare.two").touch()
    with Job(tmp_path, "--max-restarts", "1", "--rejoin-timeout", "4", "--nnodes", nnodes) as job:
        if nnodes == "1:2":
            wait_until((tmp_path / "ranks.0.0").exists, LIMIT)
            (tmp_path / "stop").touch()
        assert job.launch.wait(LIMIT) == (127 if nnodes == "2" else 75)
        assert job.has_said("npurun: host two ended with exit code 127; stopping the others") == (
            nnodes == "2"
        )
    assert not job.has_said("next try")
