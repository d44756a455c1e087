"""Processes that a rank starts: they are no ranks, stay outside the job, and leave it alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import job
import pytest
from launcher import environment
from ranks import table_environment
from rendezvous_ranks import WORKER, without_table

from npu_device._src.cluster.description import ParentRank
from npu_device._src.membership import parent_rank
from npu_device._src.membership.rank_environment import free_port

pytestmark = pytest.mark.xdist_group("waiting")

# Every child imports this: `open` at the top of a script, as the README has it.
_CHILD = """
import os, sys
import numpy as np
import tensorflow as tf
import npu_device as npu
from hccl.manage import api as hccl

handle = npu.open().as_default()
npu.distribute.barrier()
with npu.distribute.rank_zero_first() as is_main:
    pass
model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
checkpoint = npu.train.JobCheckpoint(os.environ["FOLDER"], model=model)


def is_child():
    optimizer = tf.keras.optimizers.SGD()
    before, plain = model.get_weights(), model.train_step
    assert npu.distribute.replicate(model) is model
    assert npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer) is optimizer
    assert "apply" not in vars(optimizer) and model.train_step == plain
    npu.distribute.broadcast(model.trainable_variables)
    assert all(map(np.array_equal, before, model.get_weights()))
    data = tf.data.Dataset.range(4)
    shard, batch = npu.distribute.shard_and_rebatch_dataset(data, 2)
    mine = [int(element) for element in shard]
    problems = []
    for call in (
        lambda: npu.distribute.all_reduce(np.float32(1)),
        lambda: npu.distribute.broadcast_object("x"),
        lambda: npu.distribute.gather_object("x"),
        lambda: npu.distribute.weighted_mean(1.0, 1),
        lambda: checkpoint.save(1),
    ):
        try:
            call()
        except RuntimeError as error:
            problems.append(str(error))
    assert len(problems) == 5, problems
    assert (npu.distribute.local_rank(), npu.distribute.local_size()) == (handle.worker_id, 2)
    place = hccl.get_rank_id(), hccl.get_local_rank_id(), hccl.get_local_rank_size()
    print("child of", npu.distribute.rank(), npu.distribute.size(), handle.worker_id, handle.workers_num, is_main, mine,
          batch, *place, problems[0], flush=True)
    npu.close()
"""


def _expected(rank: int) -> str:
    """Return what a child of a rank prints: its parent's place, and the error of a collective."""
    place = f"child of {rank} 2 {rank} 2 {rank == 0} [{rank}, {rank + 2}] 1 {rank} {rank} 2"
    return rf"{re.escape(place)} this process \(\d+\) is a child of rank {rank} of 2 \(process \d+\), and no rank"


_STARTS = (
    _CHILD
    + """
import concurrent.futures, multiprocessing, signal

def total():
    return float(npu.distribute.all_reduce(np.float32(npu.distribute.rank() + 1), "sum"))

def opens_again():
    npu.open()
    is_child()

def fork(act):
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def updates():
    try:
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
    except RuntimeError as error:
        print("update:", error, flush=True)

def trains_alone():
    alone = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    alone.compile("sgd", "mse", run_eagerly=True)
    alone.fit(np.ones([4, 1]), np.ones([4, 1]), verbose=0)

if __name__ == "__main__":
    assert total() == 3
    optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(tf.keras.optimizers.SGD())
    weight = tf.Variable(1.0)
    worker = multiprocessing.get_context("fork").Process(target=opens_again)
    worker.start()
    worker.join()
    print("codes", worker.exitcode, fork(updates), fork(sys.exit), fork(npu.close), fork(lambda: 1 / 0), flush=True)
    assert total() == 3  # the job goes on, whatever its children did
    print("training ends with", fork(trains_alone), total())
    endless = multiprocessing.get_context("fork").Process(target=signal.pause)
    endless.start()
    endless.terminate()
    endless.join()
    print("terminated", endless.exitcode, total())
    if npu.distribute.rank() == 1:
        context = multiprocessing.get_context("forkserver")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(is_child).result()
    print("at the end", total())
"""
)


def test_processes_that_a_rank_starts_leave_the_job_alone(tmp_path: Path) -> None:
    """Both ranks fork, and rank 1 has a process in which everything is imported anew."""
    for rank, output in enumerate(
        job.outputs(tmp_path, 2, _STARTS, FOLDER=str(tmp_path / "saved"))
    ):
        assert len(re.findall(_expected(rank), output)) == 1 + rank, output
        said = rf"npu.open\(\) does nothing in this process \(\d+\): it is a child of rank {rank} of 2 \(process \d+\)"
        assert len(re.findall(said, output)) == 1 + rank, output
        assert re.search(
            rf"update: this process \(\d+\) is a forked child of rank {rank} on host", output
        )
        for end in (
            "codes 0 3 0 3 1",
            "training ends with 3 3.0",
            "terminated -15 3.0",
            "at the end 3.0",
        ):
            assert end in output, output


@pytest.mark.parametrize(
    "scheme, changes, is_child",
    [
        (
            {"RANK_ID": "1", "RANK_SIZE": "2"},
            {"ASCEND_DEVICE_ID": "3"},
            True,
        ),  # the rank's number is given
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, {"RANK_ID": "0"}, False),
        (
            {"RANK_ID": "1", "RANK_SIZE": "2"},
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            False,
        ),
        (
            {"CM_WORKER_SIZE": "2", "ASCEND_DEVICE_ID": "1"},
            {"ASCEND_DEVICE_ID": "0"},
            False,
        ),  # the device is the rank
        (
            {"PMIX_NAMESPACE": "a", "OMPI_COMM_WORLD_RANK": "0"},
            {"PMIX_NAMESPACE": "b"},
            False,
        ),  # mpirun within mpirun
        ({"RANK": "0"}, {"NPU_DEVICE_RANK_PROCESS": "something else"}, False),
    ],
)
def test_who_is_a_child(
    monkeypatch: pytest.MonkeyPatch, scheme: dict[str, str], changes: dict[str, str], is_child: bool
) -> None:
    for name, value in environment(**scheme).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NPU_DEVICE_RANK_PROCESS", "")  # is restored
    parent_rank.mark(ParentRank(os.getpid(), 1, 2, [0, 1], 1))
    assert parent_rank.inherited() is None
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    code = "from npu_device._src.membership import parent_rank; print(parent_rank.inherited())"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found == (f"rank 1 of 2 (process {os.getpid()})\n" if is_child else "None\n")


_STARTS_CHILDREN = """
import contextlib, glob, json, os, subprocess, sys, time
from npu_device._src.cluster.rendezvous import meet
from npu_device._src.membership.schemes import membership_from_environment

def child(**environment):
    return subprocess.Popen([sys.executable, sys.argv[1]], stdout=subprocess.PIPE, env={**os.environ, **environment})

def is_at_the_hub(process):
    for file in glob.glob(f"/proc/{process.pid}/fd/*"):
        with contextlib.suppress(OSError):  # it may be closed by now
            if os.readlink(file).startswith("socket:"):
                return True
    return False

children = [child()]
while not is_at_the_hub(children[0]):
    time.sleep(0.01)
time.sleep(1)
_, channel = meet(membership_from_environment())
children.append(child(NPU_DEVICE_RANK_PROCESS=""))
print(*(json.loads(each.communicate()[0])["error"] for each in children), sep="\\n")
channel.close()
"""


def started(directory: Path, variables: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(directory / "script.py"), *arguments],
        env={**environment(), **variables, "HCCL_CONNECT_TIMEOUT": "20"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("scheme", ["rank table", "CM_*"])
def test_children_that_come_before_their_parents(tmp_path: Path, scheme: str) -> None:
    """One of them waits at the hub before its parent comes. The other comes when the ranks have met, without a mark."""
    (tmp_path / "script.py").write_text(_STARTS_CHILDREN)
    port = free_port()
    by_table = [table_environment(tmp_path, 2, rank) for rank in (0, 1)]
    variables = (
        by_table if scheme == "rank table" else [without_table(port, 2, rank) for rank in (0, 1)]
    )
    ranks = [started(tmp_path, each, str(WORKER)) for each in variables]
    for rank, process in enumerate(ranks):
        output, errors = process.communicate(timeout=60)
        assert output == f"this process is a child of rank {rank}\n" * 2, errors
        assert f"was started by process {process.pid}, which has the same variables" in errors


_COMES_LATE = """
import os, subprocess, sys
from npu_device._src.cluster.rank_errors import RendezvousError
from npu_device._src.cluster.rendezvous import meet
from npu_device._src.membership.schemes import membership_from_environment

child = None
if sys.argv[1:] == ["parent"]:
    environment = {**os.environ, "NPU_DEVICE_RANK_PROCESS": ""}
    child = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    child.stdout.readline()
try:
    _, channel = meet(membership_from_environment())
    print("met", flush=True)
    sys.stdin.readline()
    channel.close()
except RendezvousError as error:
    print(error)
if child is not None:
    child.communicate()
"""


def test_a_parent_whose_child_has_become_the_rank(tmp_path: Path) -> None:
    """Nobody waits for the parent of a process without a mark, and the parent is told at once."""
    (tmp_path / "script.py").write_text(_COMES_LATE)
    rank = started(tmp_path, table_environment(tmp_path, 2, 0))
    parent = started(tmp_path, table_environment(tmp_path, 2, 1), "parent")
    said = parent.communicate(timeout=15)[0]
    assert (
        f"rank 1: a process that this one (machine {socket.gethostname()}, pid {parent.pid}) has started"
        in said
    )
    assert "call npu.open() before starting processes that import the same script" in said
    assert rank.communicate(timeout=15)[0] == "met\n"


_KILLED = """
import os, signal, time
import numpy as np
import npu_device as npu
npu.open().as_default()
npu.distribute.all_reduce(np.ones(300_000, np.float32))
if npu.distribute.rank() == 1:
    rank = os.getpid()
    if os.fork() == 0:
        while os.getppid() == rank:
            time.sleep(0.01)
        time.sleep(12)
        os._exit(0)
    os.kill(rank, signal.SIGKILL)
began = time.monotonic()
try:
    npu.distribute.all_reduce(np.ones(300_000, np.float32))
except RuntimeError as error:
    print(error, "after", time.monotonic() - began)
"""


@pytest.mark.parametrize("engine", ["shared_memory", "tcp"])
def test_a_killed_rank_is_noticed_although_its_forked_child_lives(
    tmp_path: Path, engine: str
) -> None:
    environment = (
        {}
        if engine == "shared_memory"
        else {"NPU_DEVICE_BACKEND": engine, "NPU_DEVICE_SHARED_MEMORY": "off"}
    )
    survivor, killed = job.run(tmp_path, 2, _KILLED, **environment)
    assert killed.code == -9
    assert "rank 1 on host node0 is gone" in survivor.output
    assert float(survivor.output.rpartition("after ")[2]) < 10
