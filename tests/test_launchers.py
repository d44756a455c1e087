"""Reading the variables of Slurm, MPI and torchrun: a process's place, single devices, contradictions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from caught_messages import settings
from test_membership import CM, membership, refused, table, tf_config, variables_of

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership.schemes import (
    membership_from_environment,
    world_size_from_environment,
)

SLURM = variables_of(
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=gpu[07-08] SLURMD_NODENAME=gpu08 "
    "SLURM_PROCID=3 SLURM_LOCALID=1"
)
BATCH_SCRIPT = variables_of("SLURM_JOB_ID=4711 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0")
OPEN_MPI = variables_of(
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 "
    "PMIX_NAMESPACE=prterun-a-7@1"
)
MPICH = variables_of("PMI_SIZE=4 PMI_RANK=3 MPI_LOCALNRANKS=4 MPI_LOCALRANKID=3")
PALS = variables_of(
    "PALS_RANKID=3 PALS_LOCAL_RANKID=3 PALS_APID=8e1 PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_SIZE=4"
)
TORCHRUN = variables_of(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"
)
JAX = variables_of("JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=3 JAX_COORDINATOR_ADDRESS=a.b:6666")
OF_TWO = {"WORLD_SIZE": "2", "RANK": "0"}
TWO_WORKERS = tf_config(1, worker=["a:1", "b:1"])
ALL = {
    "Slurm": SLURM,
    "Open MPI": OPEN_MPI,
    "MPICH": MPICH,
    "PALS": PALS,
    "torchrun": TORCHRUN,
    "JAX": JAX,
}
RANKS = (
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "RANK",
    "JAX_PROCESS_ID",
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with settings():
        for name in (*(variable.name for variable in environment.ALL), *BATCH_SCRIPT):
            os.environ.pop(name, None)
        yield


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK_SIZE": "1", "RANK_ID": "0", "JOB_ID": "10087"},
        {"RANK_SIZE": "1", "CM_CHIEF_IP": "127.0.0.1"},
        {"CM_WORKER_SIZE": "1", "CM_CHIEF_IP": "127.0.0.1"},
        {"RANK_SIZE": "", "CM_WORKER_SIZE": "", "TF_CONFIG": "", "RANK_TABLE_FILE": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": tf_config(0, worker=["a:1"])},
        {
            "TF_CONFIG": tf_config(
                {"type": "evaluator", "index": 0}, chief=["a:1"], worker=["b:1"], ps=["c:1"]
            )
        },
        *({name: "3"} for name in RANKS),
        {"JOB_COMPLETION_INDEX": "1"},
        {"LSB_DJOB_NUMPROC": "4", "LSB_HOSTS": "a b"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"WORLD_SIZE": "4", "NPU_DEVICE_LAUNCHER": "off"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"},
        BATCH_SCRIPT,
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        *({**variables, "NPU_DEVICE_LAUNCHER": "off"} for variables in ALL.values()),
        {
            **SLURM,
            "NPU_DEVICE_LAUNCHER": "torchrun",
            "WORLD_SIZE": "1",
            "RANK": "0",
            "MASTER_ADDR": "a",
        },
    ],
    ids=str,
)
def test_a_process_without_others_is_alone(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    assert world_size_from_environment() == 1
    assert membership_from_environment() is None


@pytest.mark.parametrize(
    "variables",
    [
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"},
        {"SKYPILOT_NUM_NODES": "2"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"},
        {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"},
        {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
        {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
        {"WORLD_SIZE": "4", "RANK_SIZE": "1"},
    ],
    ids=str,
)
def test_not_alone_in_one_of_several_processes(variables: dict[str, str]) -> None:
    name, value = next(iter(variables.items()))
    os.environ.update(variables)
    for call in (world_size_from_environment, membership_from_environment):
        with pytest.raises(
            ClusterError, match=f"(?s)^{name} is {value}: .*npurun.*NPU_DEVICE_LAUNCHER=off"
        ) as raised:
            call()
        assert "What to do:" in str(raised.value)
    os.environ.update(NPU_DEVICE_LAUNCHER="off")
    assert world_size_from_environment() == 1


# One launcher


@pytest.mark.parametrize("launcher", ALL)
def test_a_launchers_variables_tell_the_place_of_a_rank(launcher: str) -> None:
    found = membership(**ALL[launcher])
    assert (found.scheme, found.world_size, found.rank, found.is_chief) == (launcher, 4, 3, False)
    assert found.device_id == {"Slurm": 1, "torchrun": 1, "JAX": 0}.get(launcher, 3)
    assert world_size_from_environment() == 4
    assert membership(DEVICE_ID="7").device_id == 7
    assert membership(JOB_ID="mine").job_id == "mine"
    port = found.chief_port
    assert membership(HCCL_IF_BASE_PORT="6000").chief_port == (
        port if launcher in ("torchrun", "JAX") else 6000
    )
    if launcher in ("Open MPI", "MPICH", "PALS"):
        assert found.chief_hosts == ("127.0.0.1",) and 61000 <= port < 65000
    if launcher not in ("torchrun", "JAX"):
        several_hosts = {
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MPI_LOCALNRANKS": "2",
            "PMI_LOCAL_SIZE": "2",
        }
        found = membership(MASTER_ADDR="10.0.0.7", MASTER_PORT="29500", **several_hosts)
        assert (found.scheme, found.chief_hosts, found.chief_port) == (
            launcher,
            ("10.0.0.7",),
            29500,
        )
    ranks = [name for name in ALL[launcher] if name in RANKS]
    assert membership(**dict.fromkeys(ranks, "0")).is_chief
    assert f"is rank 4 of 4 ({launcher}: " in refused(**dict.fromkeys(ranks, "4"))


@pytest.mark.parametrize("name", [*RANKS, "WORLD_SIZE", "PMI_SIZE", "SLURM_LOCALID", "MASTER_PORT"])
def test_a_malformed_number_is_refused(name: str) -> None:
    variables = next(variables for variables in ALL.values() if name in variables)
    os.environ.update({**variables, name: "x"})
    with pytest.raises(ValueError, match=f"EI0001: .* {name} is 'x'"):
        membership_from_environment()


# Where the ranks meet


def test_slurm_meets_on_the_first_node_of_the_step() -> None:
    found = membership(**SLURM, SLURM_SUBMIT_HOST="login", SLURM_JOB_NODELIST="gpu[01-08]")
    assert (found.chief_hosts, found.host_key, found.job_id) == (
        ("gpu07",),
        "gpu08",
        "Slurm-4711-3",
    )
    assert 61000 <= found.chief_port < 65000
    assert membership(SLURM_PROCID="0").chief_port == found.chief_port
    ports = {membership(SLURM_STEP_ID=str(step)).chief_port for step in range(8)}
    assert len(ports) > 4
    assert 7000 <= membership(NPU_DEVICE_PORT_RANGE="7000-7003").chief_port <= 7003
    assert membership(SLURM_STEP_NODELIST="gpu08").chief_hosts == ("127.0.0.1",)
    for nodes, first in (
        ("a,b", "a"),
        ("n[1,3-5],m7", "n1"),
        ("rack[2-3]n[007,9-11]-ib,c", "rack2n007-ib"),
    ):
        assert membership(SLURM_STEP_NODELIST=nodes).chief_hosts == (first,)


def test_torchruns_variables_describe_the_job() -> None:
    found = membership(**TORCHRUN)
    assert (found.chief_hosts, found.chief_port) == (("10.0.0.1",), 29500)
    computed = membership(TORCHELASTIC_USE_AGENT_STORE="True").chief_port  # 29500 is torchrun's own
    assert 61000 <= computed < 65000
    assert membership(RANK="0").chief_port == computed
    assert membership(MASTER_PORT="29501").chief_port != computed
    assert membership(LOCAL_WORLD_SIZE="4").chief_hosts == ("127.0.0.1",)
    assert "MASTER_PORT is missing" in refused(MASTER_PORT="")


def test_mpi_on_several_hosts_without_mpi4py(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mpi4py.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    text = refused(**{**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    monkeypatch.delitem(sys.modules, "mpi4py")
    assert "Open MPI started the 4 ranks on several hosts" in text
    for word in ("mpi4py", "MASTER_ADDR", "MASTER_PORT"):
        assert word in text


def test_the_process_that_started_the_ranks_names_the_job() -> None:
    code = "from npu_device._src.membership import launchers; print(launchers.read_mpi().job_name)"
    starts = (  # each in a shell that doesn't give way to Python
        "export PMI_SIZE=2 MPI_LOCALNRANKS=2; for rank in 0 1; do PMI_RANK=$rank MPI_LOCALRANKID=$rank "
        f"sh -c '{sys.executable} -c \"{code}\"; true'; done"
    )
    jobs = [_printed(["sh", "-c", starts]).split() for _ in range(2)]
    assert [len(set(names)) for names in jobs] == [1, 1], jobs
    assert jobs[0] != jobs[1]


def test_ranks_that_share_nothing_are_told_what_to_set() -> None:
    container = [
        "unshare",
        "--map-root-user",
        "--pid",
        "--fork",
    ]  # from which the starter can't be seen
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare")
    os.environ.update(MPICH)
    script = (
        "from npu_device._src.membership.schemes import membership_from_environment\n"
        "try: membership_from_environment()\n"
        "except RuntimeError as error: print(error)"
    )
    text = _printed([*container, sys.executable, "-c", script])
    assert "MPICH started the 4 ranks on this host" in text
    assert "set MASTER_ADDR=127.0.0.1 and MASTER_PORT" in text
    assert membership(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500").chief_port == 29500


def _printed(command: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout


# Several descriptions


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            TORCHRUN,
        ),  # srun starts torchrun
        (SLURM, TORCHRUN),  # a wrapper sets torchrun's variables
        (MPICH, TORCHRUN),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
            MPICH,
        ),  # mpiexec starts its daemons with srun
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "9", "SLURM_PROCID": "8"},
            OPEN_MPI,
        ),  # on all nodes of the allocation
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, SLURM),  # srun --mpi=pmi2
    ],
)
def test_launchers_that_agree(outer: dict[str, str], inner: dict[str, str]) -> None:
    alone = membership(**inner)
    assert membership(**outer) == alone


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {**SLURM, **TORCHRUN, "RANK": "2"},
            "is rank 2 of 4 by torchrun, but rank 3 of 4 (Slurm: SLURM_PROCID=3)",
        ),
        (
            {**OPEN_MPI, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
            "is rank 0 of 1 by torchrun, but rank 3 of 4 (Open",
        ),
        (
            {**SLURM, "PMI_RANK": "0", "PMI_SIZE": "1"},
            "is rank 0 of 1 by MPICH, but rank 3 of 4 (Slurm: SLURM_PRO",
        ),
        ({**SLURM, "RANK_ID": "1"}, "is rank 1 of 4 by Slurm and RANK_ID, but rank 3 of 4 (Slurm"),
        (
            {**SLURM, "TF_CONFIG": TWO_WORKERS},
            "is one of 2 ranks by Ascend's variables or TF_CONFIG, but rank 3 of 4",
        ),
        (
            {**TORCHRUN, **OF_TWO, "TF_CONFIG": TWO_WORKERS},
            "is rank 1 of 2 by TF_CONFIG and RANK_ID, but rank 0 of 2",
        ),
    ],
)
def test_launchers_that_contradict_each_other_are_refused(
    variables: dict[str, str], says: str
) -> None:
    text = refused(**variables)
    assert says in text
    assert "NPU_DEVICE_LAUNCHER" in text


def test_other_schemes_go_before_a_launchers(tmp_path: Path) -> None:
    workers = tf_config(3, worker=["a:1", "b:1", "c:1", "d:1"])
    for variables, scheme in (
        (table(tmp_path, RANK_ID="3"), "rank table"),
        ({"RANK_SIZE": "4", "RANK_ID": "3"}, "Slurm"),
        (CM, "CM_*"),
        ({"TF_CONFIG": workers}, "TF_CONFIG"),
    ):
        with settings():
            assert membership(**variables, **SLURM).scheme == scheme


def test_npu_device_launcher_decides() -> None:
    os.environ.update(**SLURM, **{**TORCHRUN, "RANK": "2"})
    for launcher, rank in (("slurm", 3), ("torchrun", 2)):
        assert membership(NPU_DEVICE_LAUNCHER=launcher).rank == rank
    with pytest.raises(ClusterError):
        membership(NPU_DEVICE_LAUNCHER="auto")
