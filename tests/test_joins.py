"""A node of ``--nnodes MIN:MAX`` that comes or goes while the job runs: the job goes on with all of its steps."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path

import join_bodies as bodies
import numpy as np
import pytest
from compared import same_bits
from launcher import start, wait_until
from pool import Pool
from ranks import free_port, time_limits

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]

LIMIT = 120.0
STEPS = 3 * bodies.EPOCH


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
        self._reader.join()
        for pipe in (self.launch.stdout, self.launch.stderr):
            assert pipe is not None
            pipe.close()
        print(self.text)


class Job:
    """A job of up to two nodes, each of which is an npurun on the loopback."""

    def __init__(self, here: Path, *options: str, script: str = bodies.__file__) -> None:
        self.here = here
        meeting = ("--nnodes", "1:2", "--master-addr", "127.0.0.1")
        self._options = (*meeting, "--master-port", str(free_port()), "-n", "1", *options)
        self._command = (script, str(here), str(STEPS))
        self._nodes: list[Node] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.close()

    def start(self, node: int, *options: str, **limits: float) -> Node:
        command = (*self._options, "--node-rank", str(node), *options, *self._command)
        limits = {"RANKS_NOTICE_SECONDS": 0.2, **limits}
        launch = start(
            *command,
            **time_limits(**limits),
            NPU_DEVICE_SECRET="ours",
            TF_CPP_MIN_LOG_LEVEL="2",
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

    def samples(self) -> dict[int, list[int]]:
        """Return the samples of each step; a step of which several attempts had some has all of them."""
        by_step: dict[int, list[int]] = {}
        for path in self.here.glob("samples.*"):
            for line in path.read_text().splitlines():
                step, *numbers = map(int, line.split())
                by_step.setdefault(step, []).extend(numbers)
        return by_step


def test_a_node_comes_and_goes(single: Pool, two_ranks: Pool, tmp_path: Path) -> None:
    """The bits are those of a run that is stopped by hand at these steps; each sample is read once an epoch."""
    with Job(tmp_path) as job:
        job.hold(8, 15)
        first = job.start(0, "--rejoin-timeout", "1")
        job.wait_in(8, 0)
        second = job.start(1)
        first.wait_for("a node has come: all ranks finish the step, and start again as 2 ranks")
        job.release(8)
        job.wait_in(15, 0, 1)
        second.launch.send_signal(signal.SIGTERM)
        second.wait_for("SIGTERM: all ranks finish the step")
        job.release(15)
        second.end(75)
        first.end(0)
        assert "npurun: the job grows from 1 to 2 ranks at step " in second.text
        assert "npurun: the job shrinks from 2 to 1 rank at step " in first.text, first.text
        assert "preemption 1, which costs no restart: node 1 taken away" in first.text
    steps = []
    for word in ("grows", "shrinks"):
        [line] = [line for line in first.lines if f"the job {word}" in line]
        steps.append(int(line.split()[-1]))
    assert 8 <= steps[0] < 15 <= steps[1] < STEPS, steps
    samples = job.samples()
    assert sorted(samples) == list(range(1, STEPS + 1))
    for epoch in range(STEPS // bodies.EPOCH):
        read: Counter[int] = Counter()
        for step in range(epoch * bodies.EPOCH, (epoch + 1) * bodies.EPOCH):
            read.update(samples[step + 1])
        assert read == Counter(range(bodies.SAMPLES)), epoch
    by_hand = str(tmp_path / "by hand")
    Path(by_hand).mkdir()
    single.run(bodies.body_by_hand, by_hand, steps[0])
    two_ranks.run(bodies.body_by_hand, by_hand, steps[1])
    [expected] = single.run(bodies.body_by_hand, by_hand, STEPS)
    with np.load(tmp_path / "values.0.npz") as values:
        same_bits(expected, [values[name] for name in values])
