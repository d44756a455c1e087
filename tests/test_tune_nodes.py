"""``npurun --tune`` on several nodes: they run the same runs, and end when the leader is gone."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from launcher import NPURUN, environment
from ranks import free_port

from npu_device._src.cluster.ports import listen_on_free
from npu_device.launch.tune_nodes import TuningFollower, TuningLeader, TuningRun

pytestmark = pytest.mark.xdist_group("waiting")


def test_nodes_run_the_same_jobs_whatever_an_earlier_tuning_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("NPU_DEVICE_PORT_RANGE", f"{port}-{port}")
    (tmp_path / "session.json").write_text(json.dumps({"port": free_port(), "secret": "old"}))
    runs = [
        TuningRun("first", None, None, 5),
        TuningRun("collectives", ["file", "100"], None, 0),
        TuningRun("run2", None, [3, 7], 4),
    ]
    done: dict[int, list[TuningRun]] = {}

    def follow(node: int) -> None:
        done[node] = list(TuningFollower(tmp_path, node, "127.0.0.1"))

    others = [threading.Thread(target=follow, args=[node]) for node in (1, 2)]
    for other in others:
        other.start()
    with TuningLeader(tmp_path, 3, "127.0.0.1") as leader:
        listen_on_free((port, port)).close()  # as the hub of a run does, while the nodes are connected
        for tuning_run in runs:
            leader.announce(tuning_run)
    for other in others:
        other.join(20)
    assert done == {1: runs, 2: runs}


def test_a_node_ends_when_the_leader_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_DEVICE_STALL_TIMEOUT", "0.5")
    errors: list[str] = []

    def follow() -> None:
        try:
            list(TuningFollower(tmp_path, 1, "127.0.0.1"))
        except OSError as error:
            errors.append(str(error))

    other = threading.Thread(target=follow)
    other.start()
    with TuningLeader(tmp_path, 2, "127.0.0.1"):
        other.join(10)
        assert not other.is_alive()
    assert errors and "node 0 has been silent for 0.5 s (NPU_DEVICE_STALL_TIMEOUT)" in errors[0]


def test_a_node_knows_when_the_leader_fails(tmp_path: Path) -> None:
    """It must not take the leader's end for the end of the tuning."""
    done: list[TuningRun | str] = []

    def follow() -> None:
        try:
            done.extend(TuningFollower(tmp_path, 1, "127.0.0.1"))
        except OSError as error:
            done.append(str(error))

    other = threading.Thread(target=follow)
    other.start()
    with pytest.raises(ZeroDivisionError), TuningLeader(tmp_path, 2, "127.0.0.1"):
        raise ZeroDivisionError
    other.join(10)
    assert len(done) == 1 and "node 0 ended before the tuning was over" in str(done[0])


def two_nodes(directory: Path, **variables: str) -> list[subprocess.Popen[str]]:
    """Tune train.py in the directory on two nodes of a rank each."""
    launch = [*NPURUN, "-n", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), "--grace", "1", "--tune", "train.py"],
            cwd=directory,
            env=environment(NPU_DEVICE_SECRET="the same", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]


KILLS_THE_LEADER = """
import json, os, signal
from pathlib import Path
rank = os.environ["RANK_ID"]
place = Path(json.loads(os.environ["PROFILING_OPTIONS"])["output"]) / f"rank{rank}"
place.mkdir(parents=True)
(place / "iterations.jsonl").write_text("{}\\n" * 100)  # as if it had made the steps
if rank == "0":
    npurun = os.getppid()
    leader = int(Path(f"/proc/{npurun}/stat").read_text().rpartition(") ")[2].split()[1])
    os.kill(leader, signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_node_ends_when_the_leader_is_killed(tmp_path: Path) -> None:
    """When the first run is done."""
    (tmp_path / "train.py").write_text(KILLS_THE_LEADER)
    nodes = two_nodes(tmp_path)
    try:
        output, _ = nodes[1].communicate(timeout=150)
        assert nodes[0].wait(30) == -signal.SIGKILL
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert nodes[1].returncode == 1
    assert "tuning failed: node 0 ended before the tuning was over" in output
    assert "What to do: look at its output, and start again on every node." in output


WAITS = """
import os, signal, time
from pathlib import Path
if os.environ["RANK_ID"] == os.environ["STOPS"]:
    npurun = os.getppid()
    tuning = int(Path(f"/proc/{npurun}/stat").read_text().rpartition(") ")[2].split()[1])
    os.kill(tuning, signal.SIGINT)
time.sleep(300)  # as a rank that hasn't met the others yet, and won't know that they end
"""


@pytest.mark.slow
@pytest.mark.parametrize("stops", [0, 1])
def test_all_nodes_end_when_one_is_stopped(tmp_path: Path, stops: int) -> None:
    """During a run, on its node only, with Ctrl-C."""
    (tmp_path / "train.py").write_text(WAITS)
    nodes = two_nodes(tmp_path, STOPS=str(stops))
    try:
        output, _ = nodes[1 - stops].communicate(timeout=60)
        assert nodes[stops].wait(30) == 128 + signal.SIGINT
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert nodes[1 - stops].returncode == 1
    assert f"{stops} ended before the tuning was over" in output
