"""Declare the variables by which launchers and platforms describe the processes or nodes of a job."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.forms import Form, Variable, optional

# Slurm's job steps

SLURM_STEP_NUM_TASKS = optional(
    "SLURM_STEP_NUM_TASKS",
    forms.COUNT,
    "number of ranks in the job. Only `srun` sets it: a batch script is not a rank.",
)
SLURM_PROCID = optional("SLURM_PROCID", forms.INDEX, "rank of this process.")
SLURM_LOCALID = optional(
    "SLURM_LOCALID", forms.INDEX, "number of this process among the ranks of its host."
)
SLURM_STEP_NODELIST = optional(
    "SLURM_STEP_NODELIST", forms.TEXT, "nodes of the step. The ranks meet on the first one."
)
SLURMD_NODENAME = optional("SLURMD_NODENAME", forms.TEXT, "name of this node.")
SLURM_JOB_ID = optional(
    "SLURM_JOB_ID", forms.TEXT, "number of the job; the port where the ranks meet follows from it."
)
SLURM_STEP_ID = optional(
    "SLURM_STEP_ID", forms.TEXT, "number of the step in the job; as SLURM_JOB_ID."
)

# MPI

_MEANING_OF_RANK = "rank of this process"
_MEANING_OF_SIZE = "number of ranks in the job"
_MEANING_OF_LOCAL_RANK = "number of this process among the ranks of its host"
_MEANING_OF_LOCAL_SIZE = "number of ranks on this host"


def _index(name: str, meaning: str) -> Variable[int | None]:
    return optional(name, forms.INDEX, f"{meaning}.")


def _count(name: str, meaning: str) -> Variable[int | None]:
    return optional(name, forms.COUNT, f"{meaning}.")


OMPI_COMM_WORLD_SIZE = _count("OMPI_COMM_WORLD_SIZE", _MEANING_OF_SIZE)
OMPI_COMM_WORLD_RANK = _index("OMPI_COMM_WORLD_RANK", _MEANING_OF_RANK)
OMPI_COMM_WORLD_LOCAL_RANK = _index("OMPI_COMM_WORLD_LOCAL_RANK", _MEANING_OF_LOCAL_RANK)
OMPI_COMM_WORLD_LOCAL_SIZE = _count("OMPI_COMM_WORLD_LOCAL_SIZE", _MEANING_OF_LOCAL_SIZE)
PMIX_NAMESPACE = optional("PMIX_NAMESPACE", forms.TEXT, "name of an Open MPI job.")
PMI_SIZE = _count("PMI_SIZE", f"{_MEANING_OF_SIZE} (MPICH, Intel MPI, PALS)")
PMI_RANK = _index("PMI_RANK", f"{_MEANING_OF_RANK} (MPICH, Intel MPI)")
MPI_LOCALRANKID = _index("MPI_LOCALRANKID", f"{_MEANING_OF_LOCAL_RANK} (MPICH, Intel MPI)")
MPI_LOCALNRANKS = _count("MPI_LOCALNRANKS", f"{_MEANING_OF_LOCAL_SIZE} (MPICH, Intel MPI)")
PALS_RANKID = _index("PALS_RANKID", f"{_MEANING_OF_RANK} (PALS)")
PALS_LOCAL_RANKID = _index("PALS_LOCAL_RANKID", f"{_MEANING_OF_LOCAL_RANK} (PALS)")
PMI_LOCAL_SIZE = _count("PMI_LOCAL_SIZE", f"{_MEANING_OF_LOCAL_SIZE} (PALS)")
PALS_APID = optional("PALS_APID", forms.TEXT, "name of a PALS job.")

# torchrun

WORLD_SIZE = optional(
    "WORLD_SIZE",
    forms.COUNT,
    "number of ranks in the job. RANK, WORLD_SIZE and MASTER_ADDR together describe a job.",
)
RANK = optional("RANK", forms.INDEX, "rank of this process.")
LOCAL_RANK = optional(
    "LOCAL_RANK", forms.INDEX, "number of this process among the ranks of its host."
)
LOCAL_WORLD_SIZE = optional("LOCAL_WORLD_SIZE", forms.COUNT, "number of ranks on this host.")
MASTER_ADDR = optional(
    "MASTER_ADDR",
    forms.TEXT,
    "address or name of the host of rank 0. Ranks that Slurm or MPI started also meet at MASTER_ADDR and MASTER_PORT, "
    "if both are set.",
)
MASTER_PORT = optional(
    "MASTER_PORT",
    forms.PORT,
    "port on the host of rank 0 where the ranks meet. If the store of torchrun listens there, the ranks compute a "
    "different one from it.",
)
TORCHELASTIC_USE_AGENT_STORE = optional(
    "TORCHELASTIC_USE_AGENT_STORE",
    forms.TEXT,
    "`True` if the store of torchrun listens at MASTER_PORT.",
)

# Platforms, and launchers that are only recognized

_NPURUN = "`npurun` takes it as the default of"
_SEVERAL = "A process without a rank refuses to train alone if it is above 1."

PET_NNODES = optional(
    "PET_NNODES",
    Form(forms.most_nodes, "a number of nodes, or MIN:MAX"),
    f"number of nodes, as Kubeflow's torch runtime sets it. {_NPURUN} `--nnodes`. {_SEVERAL}",
    "nodes",
)
PET_NODE_RANK = optional(
    "PET_NODE_RANK", forms.INDEX, f"number of this node. {_NPURUN} `--node-rank`."
)
PET_MASTER_ADDR = optional(
    "PET_MASTER_ADDR", forms.TEXT, f"address of node 0. {_NPURUN} `--master-addr`."
)
PET_MASTER_PORT = optional(
    "PET_MASTER_PORT", forms.PORT, f"port of node 0. {_NPURUN} `--master-port`."
)
SKYPILOT_NUM_NODES = optional(
    "SKYPILOT_NUM_NODES",
    forms.COUNT,
    f"number of nodes, as SkyPilot sets it. {_NPURUN} `--nnodes`. {_SEVERAL}",
    "nodes",
)
SKYPILOT_NODE_RANK = optional(
    "SKYPILOT_NODE_RANK", forms.INDEX, f"number of this node. {_NPURUN} `--node-rank`."
)
SKYPILOT_NODE_IPS = optional(
    "SKYPILOT_NODE_IPS",
    forms.TEXT,
    f"addresses of the nodes, one per line. {_NPURUN} `--master-addr`, from the first line.",
)
JAX_NUM_PROCESSES = optional(
    "JAX_NUM_PROCESSES",
    forms.COUNT,
    "number of ranks in the job, as Kubeflow's jax runtime sets it. JAX_NUM_PROCESSES, JAX_PROCESS_ID and "
    "JAX_COORDINATOR_ADDRESS together describe a job with one rank per node.",
)
JAX_PROCESS_ID = optional("JAX_PROCESS_ID", forms.INDEX, "rank of this process.")
JAX_COORDINATOR_ADDRESS = optional(
    "JAX_COORDINATOR_ADDRESS",
    Form(forms.address_and_port, '"host:port", or "[address]:port" for IPv6'),
    "address and port on the host of rank 0, where the ranks meet.",
)
HOROVOD_SIZE = optional("HOROVOD_SIZE", forms.COUNT, f"number of Horovod processes. {_SEVERAL}")
HOROVOD_TIMELINE = optional(
    "HOROVOD_TIMELINE",
    forms.PATH,
    "file that rank 0 of a job with `hvd.init()` writes at the end: the trace of the iterations for Chrome. "
    "The directory of that name with `.trace` has the report.",
)
FLUX_JOB_SIZE = optional("FLUX_JOB_SIZE", forms.COUNT, f"number of Flux tasks. {_SEVERAL}")
KUBEFLOW_TRAINER_SERVER_URL = optional(
    "KUBEFLOW_TRAINER_SERVER_URL",
    forms.TEXT,
    "where `npu.callbacks.KubeflowProgress` reports progress.",
)
KUBEFLOW_TRAINER_SERVER_CA_CERT = optional(
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    forms.PATH,
    "file with the certificate of the authority of that server.",
)
KUBEFLOW_TRAINER_SERVER_TOKEN = optional(
    "KUBEFLOW_TRAINER_SERVER_TOKEN", forms.PATH, "file with the token that the server wants to see."
)
