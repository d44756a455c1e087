"""What a platform says of the nodes: defaults of npurun's options, where the command line says nothing."""

from __future__ import annotations

from dataclasses import dataclass

from npu_device._src import environment


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
