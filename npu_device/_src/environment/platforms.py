"""Declare the variables by which platforms describe the nodes or processes of a job."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import Form, optional

_NPURUN = "`npurun` takes it as the default of"
_SEVERAL = "A process without a rank refuses to train alone if it is above 1."

PET_NNODES = optional(
    "PET_NNODES",
    Form(forms.most_nodes, "a number of nodes, or MIN:MAX"),
    f"number of nodes, as Kubeflow's torch runtime sets it. {_NPURUN} `--nnodes`. {_SEVERAL}",
    "nodes",
)
PET_NODE_RANK = optional("PET_NODE_RANK", forms.INDEX, f"number of this node. {_NPURUN} `--node-rank`.")
PET_MASTER_ADDR = optional("PET_MASTER_ADDR", forms.TEXT, f"address of node 0. {_NPURUN} `--master-addr`.")
PET_MASTER_PORT = optional("PET_MASTER_PORT", forms.PORT, f"port of node 0. {_NPURUN} `--master-port`.")
SKYPILOT_NUM_NODES = optional(
    "SKYPILOT_NUM_NODES",
    forms.COUNT,
    f"number of nodes, as SkyPilot sets it. {_NPURUN} `--nnodes`. {_SEVERAL}",
    "nodes",
)
SKYPILOT_NODE_RANK = optional("SKYPILOT_NODE_RANK", forms.INDEX, f"number of this node. {_NPURUN} `--node-rank`.")
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
    "KUBEFLOW_TRAINER_SERVER_URL", forms.TEXT, "where `npu.callbacks.KubeflowProgress` reports progress."
)
KUBEFLOW_TRAINER_SERVER_CA_CERT = optional(
    "KUBEFLOW_TRAINER_SERVER_CA_CERT", forms.PATH, "file with the certificate of the authority of that server."
)
KUBEFLOW_TRAINER_SERVER_TOKEN = optional(
    "KUBEFLOW_TRAINER_SERVER_TOKEN", forms.PATH, "file with the token that the server wants to see."
)
