"""Jobs as clusters start them: real processes under a fake ``srun``, MPICH's and Open MPI's ``mpiexec`` where they are
installed, and torchrun's variables.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import job
import launcher
import pytest
from mpi_ranks import AS_ROOT, mpiexec
from ranks import PYTHONPATH, clean_environment, free_port

from benchmarks import mpiexecs

pytestmark = pytest.mark.xdist_group("waiting")

HERE = Path(__file__).parent
WORKER = [sys.executable, str(HERE / "tools" / "rendezvous_worker.py")]
# Starts the tasks of a job step as Slurm's srun does, all on this machine: NODES TASKS_PER_NODE COMMAND…
FAKE_SRUN = """
import os, subprocess, sys
nodes, per_node, *command = sys.argv[1:]
names = ["localhost", *(f"node{number}" for number in range(1, int(nodes)))]
size = str(len(names) * int(per_node))
step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size}
tasks = []
for rank in range(int(size)):
    node, local = divmod(rank, int(per_node))
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": names[node]}
    variables = {**os.environ, **step, **place, "SLURM_STEP_NODELIST": ",".join(names)}
    tasks.append(subprocess.Popen(command, env=variables))
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SRUN = [sys.executable, "-c", FAKE_SRUN]
LIMIT = 60.0

# Each rank adds up, then rank 1 is killed while the others wait for it.
KILLED = """
import os, signal
import tensorflow as tf
import npu_device as npu
rank = npu.open().worker_id
one = tf.constant(1.0)
os.write(1, f"sum {float(npu.distribute.all_reduce(one, 'sum'))}\\n".encode())  # in one piece
npu.distribute.barrier()  # both have written
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
npu.distribute.all_reduce(one, "sum")
"""


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **clean_environment(),
        **AS_ROOT,
        "HCCL_CONNECT_TIMEOUT": "30",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    return subprocess.run(
        command,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join([PYTHONPATH, *sys.path[1:]]),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def clusters(command: Sequence[str], **variables: str) -> list[dict[str, Any]]:
    """Return what each rank reports, by rank, after they all have met."""
    result = run(command, **variables)
    assert result.returncode == 0, result.stderr
    decoder, text, reports = json.JSONDecoder(), result.stdout.strip(), []
    while text:  # mpiexec may join lines of several ranks
        report, end = decoder.raw_decode(text)
        reports.append({**report["cluster"], "has_secret": report["has_secret"]})
        text = text[end:].lstrip()
    return sorted(reports, key=lambda report: int(report["rank"]))


def test_a_step_on_two_nodes() -> None:
    found = clusters([*SRUN, "2", "2", *WORKER])
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    assert [one["local_rank"] for one in found] == [0, 1, 0, 1]
    assert found[0]["hosts"] == ["localhost", "localhost", "node1", "node1"]
    assert clusters([*SRUN, "1", "2", *WORKER])[0]["addresses"] == ["127.0.0.1"] * 2


def test_variables_of_torchrun_and_jax() -> None:
    """srun starts a torchrun on each node; a shell sets the variables of JAX."""
    loop = (
        "for i in 0 1; do export LOCAL_RANK=$i RANK=$((SLURM_PROCID * 2 + i)); "
        + " ".join(WORKER)
        + " & done; wait"
    )
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = clusters(
        [*SRUN, "2", "1", "sh", "-c", loop], WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", **master
    )
    assert [(one["rank"], one["device_id"]) for one in found] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    loop = "for i in 0 1; do JAX_PROCESS_ID=$i " + " ".join(WORKER) + " & done; wait"
    place = f"127.0.0.1:{free_port()}"
    found = clusters(["sh", "-c", loop], JAX_NUM_PROCESSES="2", JAX_COORDINATOR_ADDRESS=place)
    assert [one["rank"] for one in found] == [0, 1]


def test_a_process_without_a_rank_does_not_train_alone(tmp_path: Path) -> None:
    calls = ("npu.open()", "npu.distribute.rank()", "npu.distribute.replicate(model)")
    script = "import tensorflow as tf, npu_device as npu; model = tf.keras.Sequential([tf.keras.layers.Dense(1)])\n"
    for call in calls:
        script += f"try:\n    {call}\n    print('went on')\nexcept RuntimeError as error:\n    print(error)\n"
    [refused] = job.outputs(tmp_path, 1, script, PET_NNODES="2", PET_NODE_RANK="0")
    assert (
        refused.count("PET_NNODES is 2: Kubeflow's torch runtime") == len(calls)
        and "went on" not in refused
    )
    [allowed] = job.outputs(tmp_path, 1, script, PET_NNODES="2", NPU_DEVICE_LAUNCHER="off")
    assert allowed.count("went on\n") == len(calls)


def test_npurun_in_a_step_starts_a_job_of_its_own(tmp_path: Path) -> None:
    script = launcher.script(
        tmp_path,
        """
        import os
        from npu_device._src.membership.schemes import membership_from_environment
        print(membership_from_environment().scheme, "of", os.environ["JOB_ID"])
        """,
    )
    result = run([*SRUN, "1", "2", *launcher.NPURUN, "-n", "2", script])
    assert result.returncode == 0, result.stderr
    jobs = re.findall(r"rank table of (\S+)", result.stdout)
    assert len(jobs) == 4 and len(set(jobs)) == 2


@pytest.mark.parametrize("kind", mpiexecs.KINDS)
def test_mpiexec_tells_its_ranks_where_they_meet(kind: str) -> None:
    found = clusters([*mpiexec(kind), "-n", "3", *WORKER])
    assert [(one["rank"], one["local_rank"], one["device_id"]) for one in found] == [
        (i, i, i) for i in range(3)
    ]
    assert found[0]["addresses"] == ["127.0.0.1"] * 3


@pytest.mark.parametrize("kind", mpiexecs.KINDS)
def test_mpi4py_tells_the_ranks_of_several_hosts_where_they_meet(kind: str) -> None:
    command = mpiexec(kind)
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py")
    # Two hosts that are this machine. Open MPI can't be told so, but its ranks can.
    command += ["-launcher", "fork", "-hosts", "one,two"] if kind == "MPICH" else []
    worker = WORKER if kind == "MPICH" else ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", *WORKER]
    found = clusters([*command, "-n", "2", *worker], **mpiexecs.variables_of(command[0]))
    assert [one["rank"] for one in found] == [0, 1]
    assert all(one["has_secret"] for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MPICH", pytest.param("Open MPI", marks=pytest.mark.full)])
def test_a_rank_that_is_killed_under_mpiexec_ends_the_job(kind: str, tmp_path: Path) -> None:
    """mpiexec of MPICH kills rank 0 before it can say so; the hub says it."""
    script = launcher.script(tmp_path, KILLED)
    result = run([*mpiexec(kind), "-n", "2", sys.executable, script])
    assert result.returncode != 0
    assert result.stdout.count("sum 2.0") == 2, result.stderr
    assert re.search(r"npu_device: rank 1 on host .* is gone", result.stderr), result.stderr
    assert not re.search(r"rank 0 on host .* is gone", result.stderr)
