"""Declare the variables by which launchers and platforms describe the processes or nodes of a job."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.forms import COUNT, INDEX, PATH, PORT, TEXT, Form, optional

# Slurm's job steps

SLURM_STEP_NUM_TASKS = optional(
    COUNT,
    "number of ranks in the job. Only `srun` sets it: a batch script is not a rank.",
)
SLURM_PROCID = optional(INDEX, "rank of this process.")
SLURM_LOCALID = optional(INDEX, "number of this process among the ranks of its host.")
SLURM_STEP_NODELIST = optional(TEXT, "nodes of the step. The ranks meet on the first one.")
SLURMD_NODENAME = optional(TEXT, "name of this node.")
SLURM_JOB_ID = optional(TEXT, "number of the job; the port where the ranks meet follows from it.")
SLURM_STEP_ID = optional(TEXT, "number of the step in the job; as SLURM_JOB_ID.")

# MPI

OMPI_COMM_WORLD_SIZE = optional(COUNT, "number of ranks in the job.")
OMPI_COMM_WORLD_RANK = optional(INDEX, "rank of this process.")
OMPI_COMM_WORLD_LOCAL_RANK = optional(INDEX, "number of this process among the ranks of its host.")
OMPI_COMM_WORLD_LOCAL_SIZE = optional(COUNT, "number of ranks on this host.")
PMIX_NAMESPACE = optional(TEXT, "name of an Open MPI job.")
PMI_SIZE = optional(COUNT, "number of ranks in the job (MPICH, Intel MPI, PALS).")
PMI_RANK = optional(INDEX, "rank of this process (MPICH, Intel MPI).")
MPI_LOCALRANKID = optional(
    INDEX, "number of this process among the ranks of its host (MPICH, Intel MPI)."
)
MPI_LOCALNRANKS = optional(COUNT, "number of ranks on this host (MPICH, Intel MPI).")
PALS_RANKID = optional(INDEX, "rank of this process (PALS).")
PALS_LOCAL_RANKID = optional(INDEX, "number of this process among the ranks of its host (PALS).")
PMI_LOCAL_SIZE = optional(COUNT, "number of ranks on this host (PALS).")
PALS_APID = optional(TEXT, "name of a PALS job.")

# torchrun

WORLD_SIZE = optional(
    COUNT,
    "number of ranks in the job. RANK, WORLD_SIZE and MASTER_ADDR together describe a job.",
)
RANK = optional(INDEX, "rank of this process.")
LOCAL_RANK = optional(INDEX, "number of this process among the ranks of its host.")
LOCAL_WORLD_SIZE = optional(COUNT, "number of ranks on this host.")
MASTER_ADDR = optional(
    TEXT,
    "address or name of the host of rank 0. Ranks that Slurm or MPI started also meet at MASTER_ADDR and MASTER_PORT, "
    "if both are set.",
)
MASTER_PORT = optional(
    PORT,
    "port on the host of rank 0 where the ranks meet. If the store of torchrun listens there, the ranks compute a "
    "different one from it.",
)
TORCHELASTIC_USE_AGENT_STORE = optional(
    TEXT,
    "`True` if the store of torchrun listens at MASTER_PORT.",
)

# Platforms, and launchers that are only recognized

_NPURUN = "`npurun` takes it as the default of"
_SEVERAL = "A process without a rank refuses to train alone if it is above 1."

PET_NNODES = optional(
    Form(forms.most_nodes, "a number of nodes, or MIN:MAX"),
    f"number of nodes, as Kubeflow's torch runtime sets it. {_NPURUN} `--nnodes`. {_SEVERAL}",
    "nodes",
)
PET_NODE_RANK = optional(INDEX, f"number of this node. {_NPURUN} `--node-rank`.")
PET_MASTER_ADDR = optional(TEXT, f"address of node 0. {_NPURUN} `--master-addr`.")
PET_MASTER_PORT = optional(PORT, f"port of node 0. {_NPURUN} `--master-port`.")
SKYPILOT_NUM_NODES = optional(
    COUNT,
    f"number of nodes, as SkyPilot sets it. {_NPURUN} `--nnodes`. {_SEVERAL}",
    "nodes",
)
SKYPILOT_NODE_RANK = optional(INDEX, f"number of this node. {_NPURUN} `--node-rank`.")
SKYPILOT_NODE_IPS = optional(
    TEXT,
    f"addresses of the nodes, one per line. {_NPURUN} `--master-addr`, from the first line.",
)
JAX_NUM_PROCESSES = optional(
    COUNT,
    "number of ranks in the job, as Kubeflow's jax runtime sets it. JAX_NUM_PROCESSES, JAX_PROCESS_ID and "
    "JAX_COORDINATOR_ADDRESS together describe a job with one rank per node.",
)
JAX_PROCESS_ID = optional(INDEX, "rank of this process.")
JAX_COORDINATOR_ADDRESS = optional(
    Form(forms.address_and_port, '"host:port", or "[address]:port" for IPv6'),
    "address and port on the host of rank 0, where the ranks meet.",
)
HOROVOD_SIZE = optional(COUNT, f"number of Horovod processes. {_SEVERAL}")
HOROVOD_TIMELINE = optional(
    PATH,
    "file that rank 0 of a job with `hvd.init()` writes at the end: the trace of the iterations for Chrome. "
    "The directory of that name with `.trace` has the report.",
)
FLUX_JOB_SIZE = optional(COUNT, f"number of Flux tasks. {_SEVERAL}")
KUBEFLOW_TRAINER_SERVER_URL = optional(
    TEXT,
    "where `npu.callbacks.KubeflowProgress` reports progress.",
)
KUBEFLOW_TRAINER_SERVER_CA_CERT = optional(
    PATH,
    "file with the certificate of the authority of that server.",
)
KUBEFLOW_TRAINER_SERVER_TOKEN = optional(PATH, "file with the token that the server wants to see.")
