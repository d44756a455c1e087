"""A node of ``--nnodes MIN:MAX`` that comes or goes while the job runs: the job goes on with all of its steps."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Callable

import join_bodies as bodies
import numpy as np
import pytest
from launcher import script, start, wait_until
from pool import Pool
from rank_comparison import same_bits
from ranks import all_through, free_port, time_limits

from npu_device._src.testing import hosts

pytestmark = pytest.mark.xdist_group("waiting")

LIMIT = 120.0
STEPS = 3 * bodies.EPOCH
NO_HOSTS = pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, ip and tc to make hosts")


class Node:
    """An npurun of one rank."""

    def __init__(self, launch: subprocess.Popen[bytes]) -> None:
        self.launch = launch
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.launch.stderr is not None
        for line in self.launch.stderr:
            self.lines.append(line.decode())

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.text or self.launch.poll() is not None, LIMIT)
        assert words in self.text, self.text

    def end(self, code: int) -> None:
        assert self.launch.wait(LIMIT) == code, self.text
        self._reader.join()

    def close(self) -> None:
        if self.launch.poll() is None:
            self.launch.kill()
            self.launch.wait()
        self._reader.join()
        for pipe in (self.launch.stdout, self.launch.stderr):
            assert pipe is not None
            pipe.close()
        print(self.text)


def _in_directory(directory: Path, command: list[str]) -> list[str]:
    return ["env", "-C", str(directory), *command]


class Job:
    """A job of up to two nodes, each of which is an npurun on the loopback, perhaps with checkpoints of its own."""

    def __init__(
        self,
        here: Path,
        *options: str,
        script: str = bodies.__file__,
        nnodes: str = "1:2",
        address: str = "127.0.0.1",
        steps: int | str = STEPS,
        are_apart: bool = False,
        **variables: str,
    ) -> None:
        self.here = here
        self._are_apart = are_apart
        self._variables = variables
        meeting = ("--nnodes", nnodes, "--master-addr", address)
        self._options = (*meeting, "--master-port", str(free_port()), "-n", "1", *options)
        checkpoints = here / "checkpoints"
        if are_apart:
            checkpoints = Path("/proc/self/cwd/checkpoints")
        self._command = (script, str(here), str(steps), str(checkpoints))
        self._nodes: list[Node] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.close()

    def start(
        self,
        node: int,
        *options: str,
        on: Callable[[list[str]], list[str]] = list,
        **limits: float,
    ) -> Node:
        command = (*self._options, "--node-rank", str(node), *options, *self._command)
        limits = {"RANKS_NOTICE_SECONDS": 0.2, **limits}
        if self._are_apart:
            directory = self.here / f"node{node}"
            directory.mkdir(exist_ok=True)
            on = functools.partial(_in_directory, directory)
        launch = start(
            *command,
            on=on,
            **time_limits(**limits),
            NPU_DEVICE_SECRET="ours",
            TF_CPP_MIN_LOG_LEVEL="2",
            **self._variables,
        )
        self._nodes.append(Node(launch))
        return self._nodes[-1]

    def wait_in(self, step: int, *ranks: int) -> None:
        """Wait until ranks are in a step in which they wait."""
        for rank in ranks:
            wait_until((self.here / f"at.{step}.{rank}").exists, LIMIT)

    def hold(self, *steps: int) -> None:
        for step in steps:
            (self.here / f"wait.{step}").touch()

    def release(self, step: int) -> None:
        (self.here / f"go.{step}").touch()

    def wait_for_size(self, size: int) -> None:
        """Wait until the job trains with a number of ranks."""
        wait_until(lambda: self.sizes()[-1][0] == size, LIMIT)

    def sizes(self) -> list[tuple[int, int]]:
        """Return the numbers of ranks that the job has had, one after the other, and the last step with each."""
        counts: Counter[int] = Counter()
        for path in self.here.glob("samples.*"):
            counts.update(int(line.split()[0]) for line in path.read_text().splitlines())
        sizes: list[tuple[int, int]] = []
        for step, size in sorted(counts.items()):
            if sizes and sizes[-1][0] == size:
                sizes.pop()
            sizes.append((size, step))
        return sizes

    def samples(self) -> dict[int, list[int]]:
        """Return the samples of each step; a step of which several attempts had some has all of them."""
        by_step: dict[int, list[int]] = {}
        for path in self.here.glob("samples.*"):
            for line in path.read_text().splitlines():
                step, *numbers = map(int, line.split())
                by_step.setdefault(step, []).extend(numbers)
        return by_step


# Ranks without TensorFlow, of which rank 0 takes requests as a JobCheckpoint does, unless there is a file "deaf". They
# end when there is none called "hold", for the request unless there is a file "refuse"; with "clean", without one. With
# "go" they succeed, and with "fail.N" the last rank of attempt N fails.
SCRIPT = """
    import os, pathlib, sys, time
    here = pathlib.Path(sys.argv[1])
    count, rank, size = (int(os.environ[name]) for name in ("NPU_DEVICE_RESTART_COUNT", "RANK_ID", "RANK_SIZE"))
    requests = None
    if rank == 0 and not (here / "deaf").exists():
        requests = os.open(os.environ["NPU_DEVICE_JOIN_REQUESTS"], os.O_RDWR | os.O_NONBLOCK)
    (here / f"at.{count}.{rank}").touch()
    while not (here / "go").exists():
        if requests is not None:
            try:
                (here / f"stop.{count}").write_text(os.read(requests, 100).decode())
                requests = None
            except BlockingIOError:
                pass
        if (here / f"stop.{count}").exists() and not (here / "hold").exists():
            if rank == 0 and not (here / "refuse").exists():
                os.unlink(os.environ["NPU_DEVICE_JOIN_REQUESTS"])
            sys.exit(75)
        if (here / "clean").exists() and rank == 0:
            os.unlink(os.environ["NPU_DEVICE_JOIN_REQUESTS"])
            sys.exit(75)
        if (here / f"fail.{count}").exists() and rank == size - 1:
            sys.exit(3)
        time.sleep(0.02)
"""


class Requests(Job):
    """A job of that script."""

    def __init__(self, here: Path, *options: str, nnodes: str = "1:2") -> None:
        times = ("--grace", "1", "--restart-backoff", "0.1", "--rejoin-timeout", "1")
        super().__init__(here, *times, *options, script=script(here, SCRIPT), nnodes=nnodes)

    def touch(self, name: str) -> None:
        (self.here / name).touch()


def test_a_node_that_fails_soon_after_it_joined_waits_and_costs_no_restart(tmp_path: Path) -> None:
    with Requests(tmp_path) as job:
        job.touch("fail.1")
        first = job.start(0, JOIN_PAUSE_SECONDS=1.0)
        job.wait_in(0, 0)
        second = job.start(1)
        first.wait_for("a join of node 1 has failed, which costs no restart: rank 1 on host")
        # The job goes on alone, and the node, whose npurun has stayed, joins again.
        job.wait_in(2, 0)
        job.wait_in(3, 0, 1)
        job.touch("go")
        for node in (first, second):
            node.end(0)
        assert not (tmp_path / "at.2.1").exists()
        assert first.text.count("the job grows from 1 to 2 ranks") == 2
        assert "this node joins when the ranks have finished a step" in second.text


def test_a_node_that_is_lost_while_it_joins(tmp_path: Path) -> None:
    """First before the ranks have ended for it, then when they have begun with it; ``--max-resizes`` counts joins."""
    with Requests(tmp_path, "--max-resizes", "2") as job:
        job.touch("hold")
        first = job.start(0, JOIN_PAUSE_SECONDS=0.5)
        job.wait_in(0, 0)
        second = job.start(1)
        wait_until((tmp_path / "stop.0").exists, LIMIT)
        second.launch.kill()
        second.launch.wait()
        (tmp_path / "hold").unlink()
        job.wait_in(1, 0)
        again = job.start(1)
        job.wait_in(2, 0, 1)
        again.launch.kill()
        job.wait_in(3, 0)
        first.wait_for("a join of node 1 has failed, which costs no restart: node 1 is gone")
        # One join is left, as the first of the three has changed nothing.
        job.start(1)
        job.wait_in(4, 0, 1)
        job.touch("fail.4")
        job.wait_in(5, 0)
        third = job.start(1)
        third.wait_for("this node joins at the next restart\n")
        job.touch("go")
        first.end(0)
    assert not list(tmp_path.glob("at.[135].1"))


def test_nodes_that_come_while_one_joins_and_scripts_that_take_none(tmp_path: Path) -> None:
    with Requests(tmp_path, nnodes="1:3") as job:
        job.touch("hold")
        first = job.start(0, JOIN_ASK_SECONDS=0.2)
        job.wait_in(0, 0)
        job.start(1)
        wait_until((tmp_path / "stop.0").exists, LIMIT)
        third = job.start(2)
        third.wait_for("this node joins when the ranks have finished a step")
        (tmp_path / "hold").unlink()
        job.wait_in(1, 0, 1, 2)
        assert "the job grows from 1 to 3 ranks" in first.text
        job.touch("go")
        first.end(0)
    for path in (*tmp_path.glob("at.*"), *tmp_path.glob("stop.*"), tmp_path / "go"):
        path.unlink()
    with Requests(tmp_path) as job:
        job.touch("deaf")
        first = job.start(0, JOIN_ASK_SECONDS=0.2)
        job.wait_in(0, 0)
        second = job.start(1)
        second.wait_for("joins at the next restart, or when the script has a FitCheckpoint or Job")
        # All nodes are sent the signal: the job ends, though one of them only waits.
        for node in (first, second):
            node.launch.send_signal(signal.SIGTERM)
        first.end(143)
        second.end(143)
        assert second.text.count("this node joins") == 1


def test_an_end_after_a_refused_request_is_that_of_the_job(tmp_path: Path) -> None:
    with Requests(tmp_path) as job:
        job.touch("hold")
        job.touch("refuse")
        first = job.start(0)
        job.wait_in(0, 0)
        second = job.start(1)
        wait_until((tmp_path / "stop.0").exists, LIMIT)
        (tmp_path / "hold").unlink()
        for node in (first, second):
            node.end(75)
            assert not list(tmp_path.glob("at.1.*"))
    # Nor is it a join if a cleaner of old files has removed the pipe, and no node has come.
    for path in tmp_path.glob("[ahs]*"):
        path.unlink()
    with Requests(tmp_path) as job:
        job.touch("clean")
        job.start(0).end(75)


def require_whole_epochs(samples: dict[int, list[int]], steps: int) -> None:
    assert sorted(samples) == list(range(1, steps + 1))
    for epoch in range(steps // bodies.EPOCH):
        read: Counter[int] = Counter()
        for step in range(epoch * bodies.EPOCH, (epoch + 1) * bodies.EPOCH):
            read.update(samples[step + 1])
        assert read == Counter(range(bodies.SAMPLES)), epoch


@pytest.mark.slow
def test_a_node_comes_and_goes(single: Pool, two_ranks: Pool, tmp_path: Path) -> None:
    """The bits are those of a run that is stopped by hand at these steps; each sample is read once an epoch.

    The nodes share no directory, and the state is on no disk.
    """
    with Job(tmp_path, are_apart=True) as job:
        job.hold(5, 14)
        first = job.start(0, "--rejoin-timeout", "1")
        job.wait_in(5, 0)
        second = job.start(1)
        first.wait_for("a node has come: all ranks finish the step, and start again as 2 ranks")
        job.release(5)
        job.wait_in(14, 0, 1)
        assert not list(tmp_path.glob("node*/checkpoints/step-*"))
        second.launch.send_signal(signal.SIGTERM)
        second.wait_for("SIGTERM: all ranks finish the step")
        job.release(14)
        second.end(75)
        first.end(0)
        assert "preemption 1, which costs no restart: node 1 taken away" in first.text
    sizes = job.sizes()
    assert [size for size, _ in sizes] == [1, 2, 1]
    steps = [step for _, step in sizes]
    assert 5 <= steps[0] < 14 <= steps[1] < STEPS, steps
    assert f"npurun: the job grows from 1 to 2 ranks at step {steps[0]}\n" in second.text
    assert f"npurun: the job shrinks from 2 to 1 rank at step {steps[1]}\n" in first.text
    require_whole_epochs(job.samples(), STEPS)
    by_hand = str(tmp_path / "by hand")
    Path(by_hand).mkdir()
    single.run(bodies.body_by_hand, by_hand, steps[0])
    two_ranks.run(bodies.body_by_hand, by_hand, steps[1])
    [expected] = single.run(bodies.body_by_hand, by_hand, STEPS)
    with np.load(tmp_path / "values.0.npz") as values:
        same_bits(expected, [values[name] for name in values])


@pytest.mark.full
def test_a_signal_while_a_node_joins_and_a_join_in_the_last_step(
    single: Pool, tmp_path: Path
) -> None:
    """The job is resumable at the step of the join; after a join in the last step nothing is left to be trained."""
    with Job(tmp_path, "--rejoin-timeout", "60") as job:
        job.hold(5, STEPS)
        first = job.start(0, "--rejoin-timeout", "1")
        job.wait_in(5, 0)
        second = job.start(1)
        first.wait_for("a node has come")
        for node in (first, second):
            node.launch.send_signal(signal.SIGTERM)
        first.wait_for("SIGTERM: all ranks finish the step")
        job.release(5)
        first.end(75)
        assert second.launch.wait(LIMIT) in (75, 143)
        first = job.start(0, "--rejoin-timeout", "1")
        job.wait_in(STEPS, 0)
        second = job.start(1)
        first.wait_for("a node has come")
        job.release(STEPS)
        first.end(0)
        second.end(0)
        assert f"the job grows from 1 to 2 ranks at step {STEPS}" in first.text
    require_whole_epochs(job.samples(), STEPS)
    by_hand = tmp_path / "by hand"
    by_hand.mkdir()
    [expected] = single.run(bodies.body_by_hand, str(by_hand), STEPS)
    for rank in (0, 1):
        with np.load(tmp_path / f"values.{rank}.npz") as values:
            same_bits(expected, [values[name] for name in values])


def _with_little_memory(command: list[str]) -> list[str]:
    mount = 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh", *command]


@pytest.mark.full
@pytest.mark.parametrize("is_small", [False, pytest.param(True, marks=NO_HOSTS)])
def test_a_node_is_killed_while_it_joins(single: Pool, is_small: bool, tmp_path: Path) -> None:
    """The others take the state from memory once more, or from the disk if their folder in memory is too small."""
    on = _with_little_memory if is_small else list
    with Job(tmp_path, "--rejoin-timeout", "1", "--restart-backoff", "0.1") as job:
        job.hold(5)
        first = job.start(0, on=on)
        job.wait_in(5, 0)
        second = job.start(1, on=on)
        first.wait_for("a node has come")
        job.release(5)
        first.wait_for("the job grows from 1 to 2 ranks")
        second.launch.kill()
        first.end(0)
        assert "a join of node 1 has failed, which costs no restart" in first.text
        assert is_small == ("It is written to the disk instead." in first.text)
    require_whole_epochs(job.samples(), STEPS)
    by_hand = tmp_path / "by hand"
    by_hand.mkdir()
    [expected] = single.run(bodies.body_by_hand, str(by_hand), STEPS)
    with np.load(tmp_path / "values.0.npz") as values:
        same_bits(expected, [values[name] for name in values])


@pytest.mark.full
@pytest.mark.parametrize("leaving", [[0], [0, 1]])
def test_nodes_are_taken_away_while_one_joins(
    single: Pool, two_ranks: Pool, leaving: list[int], tmp_path: Path
) -> None:
    """The state is in memory of node 0 only, whose npurun writes it to the disk."""
    with Job(tmp_path) as job:
        job.hold(5)
        nodes = [job.start(0, "--rejoin-timeout", "1")]
        job.wait_in(5, 0)
        nodes.append(job.start(1, "--rejoin-timeout", "60"))
        nodes[0].wait_for("a node has come")
        job.release(5)
        nodes[0].wait_for("the job grows from 1 to 2 ranks")
        for node in leaving:
            nodes[node].launch.send_signal(signal.SIGTERM)
        for node in leaving:
            assert nodes[node].launch.wait(LIMIT) in (75, 143)
        first_text = nodes[0].text
        assert "writing the copy of step" in first_text
        for node in leaving:
            nodes[node] = job.start(node, "--rejoin-timeout", "30")
        for again in nodes:
            again.end(0)
    require_whole_epochs(job.samples(), STEPS)
    by_hand = tmp_path / "by hand"
    by_hand.mkdir()
    [step] = re.findall(r"grows from 1 to 2 ranks at step (\d+)\n", first_text)
    single.run(bodies.body_by_hand, str(by_hand), int(step))
    [expected, _] = two_ranks.run(bodies.body_by_hand, str(by_hand), STEPS)
    with np.load(tmp_path / "values.0.npz") as values:
        same_bits(expected, [values[name] for name in values])


def options_of(way: str) -> tuple[list[str], dict[str, str]]:
    """Return the options of npurun and the variables for a way to run a fit."""
    if way == "tf-keras":
        return [], {"TF_USE_LEGACY_KERAS": "1"}
    if way == "divided":
        # Updates aren't divided by TensorFlow's engine, which would send more bytes.
        return ["--shard-optimizer"], {"NPU_DEVICE_BACKEND": "tcp"}
    return [], {}


@pytest.mark.full
@pytest.mark.parametrize("way", ["", "apart", "tf-keras", "divided"])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "repeated", "pipeline"])
def test_a_node_joins_a_fit(kind: str, way: str, tmp_path: Path) -> None:
    options, variables = options_of(way)
    with Job(
        tmp_path,
        "--rejoin-timeout",
        "1",
        *options,
        steps=kind,
        are_apart=way == "apart",
        **variables,
    ) as job:
        first = job.start(0)
        job.wait_in(7, 0)
        second = job.start(1)
        first.wait_for("a node has come")
        job.release(7)
        for node in (first, second):
            node.end(0)
    [step] = re.findall(r"grows from 1 to 2 ranks at step (\d+)", first.text)
    directories = [tmp_path]
    if way == "apart":
        directories = [tmp_path / "node0", tmp_path / "node1"]
    epoch = 4 if kind == "arrays" else 5
    for directory in directories:
        written = [path.name for path in (directory / "checkpoints").glob("step-*")]
        # Only ends of epochs are on the disk.
        assert written and all(int(name[-8:]) % epoch == 0 for name in written), written
    not_kept = (tmp_path / "not_kept").read_text()
    assert "first batch" not in not_kept and "the job now has 2 ranks" in not_kept
    require_bits_of_a_stop(tmp_path, kind, way, int(step), (1, 2))


def require_bits_of_a_stop(
    here: Path, kind: str, way: str, step: int, sizes: tuple[int, int]
) -> None:
    """Check the weights against a fit that is stopped by hand at a step, and resumed by another number of ranks."""
    by_hand = here / "by hand"
    by_hand.mkdir()
    before, after = sizes
    keras = "2" if way == "tf-keras" else "3"
    # Ranks with a divided optimizer return only the slots that all have.
    variables = {"NPU_DEVICE_SHARD_OPTIMIZER": "on"} if way == "divided" else {}
    with contextlib.closing(Pool(before, keras, **variables)) as pool:
        pool.run(bodies.body_fit_by_hand, str(by_hand), kind)
    for path in (by_hand / "checkpoints").glob("step-*"):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    (by_hand / "checkpoints" / "latest.json").write_text(json.dumps({"step": step}))
    with contextlib.closing(Pool(after, keras, **variables)) as pool:
        resumed = pool.run(bodies.body_fit_by_hand, str(by_hand), kind)
    for rank in range(after):
        with np.load(here / f"values.{rank}.npz") as values:
            same_bits(resumed[rank]["values"], [values[name] for name in values])


@pytest.mark.full
@pytest.mark.parametrize("way", ["apart", "tf-keras", "divided"])
def test_a_node_leaves_a_fit(way: str, tmp_path: Path) -> None:
    """What its rank alone had of a divided optimizer stays with the others."""
    options, variables = options_of(way)
    with Job(tmp_path, *options, steps="dataset", are_apart=way == "apart", **variables) as job:
        first = job.start(0, "--rejoin-timeout", "30")
        second = job.start(1, "--rejoin-timeout", "30")
        job.wait_in(7, 0)
        second.launch.send_signal(signal.SIGTERM)
        second.wait_for("SIGTERM: all ranks finish the step")
        job.release(7)
        second.end(75)
        first.end(0)
    [step] = re.findall(r"shrinks from 2 to 1 rank at step (\d+)", first.text)
    written = [path.name for path in tmp_path.glob("**/checkpoints/step-*")]
    assert written and all(int(name[-8:]) % 5 == 0 for name in written), written
    require_bits_of_a_stop(tmp_path, "dataset", way, int(step), (2, 1))


SSH = """\
    #!/bin/sh
    # Runs a command on a host, which is a network namespace, in a directory of the host, if it is up.
    [ -e {here}/up.$1 ] || exit 255
    mkdir -p {here}/$1
    exec ip netns exec $1 sh -c "$(echo "$2" | sed "s|cd [^ ]*|cd {here}/$1|")"
    """


@pytest.mark.full
@NO_HOSTS
def test_a_host_of_the_list_comes_and_goes(single: Pool, two_ranks: Pool, tmp_path: Path) -> None:
    ssh = script(tmp_path, SSH.format(here=tmp_path), "ssh")
    Path(ssh).chmod(0o755)
    names = [hosts.name(0), hosts.name(1)]
    (tmp_path / f"up.{names[0]}").touch()
    meeting = ("--master-addr", hosts.address(0), "--master-port", str(free_port()))
    with hosts.hosts(2, gbit=1.0):
        launch = start(
            *("--hosts", ",".join(f"{name}:1" for name in names), "--nnodes", "1:2", *meeting),
            *("--rejoin-timeout", "2", bodies.__file__, str(tmp_path), str(STEPS)),
            "/proc/self/cwd/checkpoints",
            **time_limits(LONGEST_BACKOFF_SECONDS=0.5),
            NPU_DEVICE_SSH=ssh,
            TF_CPP_MIN_LOG_LEVEL="2",
        )
        node = Node(launch)
        try:
            for step in (5, 14):
                (tmp_path / f"wait.{step}").touch()
            wait_until((tmp_path / "at.5.0").exists, LIMIT)
            (tmp_path / f"up.{names[1]}").touch()
            node.wait_for("a node has come: all ranks finish the step, and start again as 2 ranks")
            (tmp_path / "go.5").touch()
            wait_until((tmp_path / "at.14.1").exists, LIMIT)
            wait_until((tmp_path / "at.14.0").exists, LIMIT)
            assert not list(tmp_path.glob("*/checkpoints/step-*"))
            (tmp_path / f"up.{names[1]}").unlink()
            for number in subprocess.check_output(["ip", "netns", "pids", names[1]]).split():
                command = Path(f"/proc/{int(number)}/cmdline").read_bytes().split(b"\0")
                if b"npu_device.launch.on_host" in command[:4]:
                    os.kill(int(number), signal.SIGTERM)
            node.wait_for("SIGTERM: all ranks finish the step")
            (tmp_path / "go.14").touch()
            node.end(0)
        finally:
            node.close()
    # Each node tells the change.
    steps = sorted({int(step) for step in re.findall(r"ranks? at step (\d+)\n", node.text)})
    assert len(steps) == 2 and 5 <= steps[0] < 14 <= steps[1] < STEPS, node.text
    by_hand = tmp_path / "by hand"
    by_hand.mkdir()
    single.run(bodies.body_by_hand, str(by_hand), steps[0])
    two_ranks.run(bodies.body_by_hand, str(by_hand), steps[1])
    [expected] = single.run(bodies.body_by_hand, str(by_hand), STEPS)
    with np.load(tmp_path / "values.0.npz") as values:
        same_bits(expected, [values[name] for name in values])


@pytest.mark.full
@NO_HOSTS
@pytest.mark.parametrize("seed", [1, 2])
def test_nodes_come_and_go_at_random(seed: int, tmp_path: Path) -> None:
    """Two nodes beside node 0 come and go 20 times, in network namespaces, and now and then both at once."""
    draw = random.Random(seed)
    nodes = {"nnodes": "1:3", "address": hosts.address(0)}
    with (
        hosts.hosts(3, gbit=1.0),
        Job(tmp_path, "--rejoin-timeout", "3", **nodes, steps=100_000) as job,
    ):
        (tmp_path / "slow").touch()

        def begin(node: int) -> Node:
            on = functools.partial(hosts.on_host, node)
            return job.start(node, on=on, JOIN_PAUSE_SECONDS=1.0, JOIN_ASK_SECONDS=1.0)

        first = begin(0)
        wait_until(lambda: bool(job.samples()), LIMIT)
        running: dict[int, Node] = {}
        changes = 0
        while changes < 20:
            for node in draw.sample([1, 2], draw.choice([1, 1, 2])):
                changes += 1
                if node in running:
                    leaving = running.pop(node)
                    leaving.launch.send_signal(signal.SIGTERM)
                    leaving.launch.wait(LIMIT)
                else:
                    running[node] = begin(node)
            # In three of four cases the job has trained with the change before the next one.
            if draw.random() < 0.75:
                job.wait_for_size(1 + len(running))
            time.sleep(draw.uniform(0.0, 3.0))
            assert first.launch.poll() is None, first.text
        job.wait_for_size(1 + len(running))
        # Some seconds ahead of all ranks.
        end = (max(job.samples()) // bodies.EPOCH + 8) * bodies.EPOCH
        (tmp_path / f"last.{end}").touch()
        for node in (first, *running.values()):
            node.end(0)
    require_whole_epochs(job.samples(), end)
    sizes = job.sizes()
    assert len(sizes) > 6, sizes
    by_hand = tmp_path / "by hand"
    by_hand.mkdir()
    pools = {number: Pool(number, "3", **all_through("tensorflow")) for number in (1, 2, 3)}
    try:
        for number, step in sizes:
            [expected, *_] = pools[number].run(bodies.body_by_hand, str(by_hand), step)
    finally:
        for pool in pools.values():
            pool.close()
    with np.load(tmp_path / "values.0.npz") as values:
        same_bits(expected, [values[name] for name in values])
