"""What a node is by default: its place among the nodes, as platforms say it, and one rank per visible GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from npu_device._src import environment
from npu_device._src.collectives.gpu_choice import visible_names


@dataclass(frozen=True)
class PlatformDefaults:
    """The nodes of a job, as the variables of a platform describe them. None is unknown.

    Attributes:
        variable: name of the variable that holds the number of nodes, for messages.
        nnodes: the fewest and the most nodes.
        node_rank: number of this node.
        master_addr: address of node 0.
        master_port: port of node 0.
    """

    variable: str
    nnodes: tuple[int, int]
    node_rank: int | None
    master_addr: str | None
    master_port: int | None


def read() -> PlatformDefaults | None:
    """Return what Kubeflow's torch runtime (``PET_*``) or else SkyPilot says; None without either.

    The number of ranks per node is not taken from ``PET_NPROC_PER_NODE``, which is the number of CPUs there.

    Raises:
        ValueError: a variable is malformed.
    """
    most = environment.PET_NNODES.get()
    if most is not None:
        fewest = int((environment.PET_NNODES.raw() or "").partition(":")[0])
        return PlatformDefaults(
            environment.PET_NNODES.name,
            (fewest, most),
            environment.PET_NODE_RANK.get(),
            environment.PET_MASTER_ADDR.get(),
            environment.PET_MASTER_PORT.get(),
        )
    nodes = environment.SKYPILOT_NUM_NODES.get()
    if nodes is None:
        return None
    addresses = (environment.SKYPILOT_NODE_IPS.get() or "").split()
    return PlatformDefaults(
        environment.SKYPILOT_NUM_NODES.name,
        (nodes, nodes),
        environment.SKYPILOT_NODE_RANK.get(),
        addresses[0] if addresses else None,
        None,
    )


AUTO = "auto"
"""The default of ``--nproc-per-node``."""


def ranks_per_node() -> int:
    """Return the number of GPUs that CUDA shows to a process of this node; 1 without any.

    Asks neither TensorFlow nor the driver: CUDA_VISIBLE_DEVICES counts, or else NVIDIA's device files.
    """
    names = visible_names(environment.CUDA_VISIBLE_DEVICES.text())
    if names is None:
        names = tuple(file.name for file in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    return max(1, len(names))
