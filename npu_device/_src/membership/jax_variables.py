"""JAX's variables, which Kubeflow's jax runtime sets: one process per node.

Source: Kubeflow Trainer 2.3, the jax plugin of the runtime framework.
"""

from __future__ import annotations

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.membership.launched import Launched


def read() -> Launched | None:
    """Return this process's place; None unless JAX_NUM_PROCESSES and JAX_PROCESS_ID are set.

    Raises:
        ClusterError: JAX_COORDINATOR_ADDRESS is missing.
        ValueError: a variable is malformed.
    """
    size, rank = environment.JAX_NUM_PROCESSES.get(), environment.JAX_PROCESS_ID.get()
    if size is None or rank is None:
        return None
    place = environment.JAX_COORDINATOR_ADDRESS.get()
    if size > 1 and place is None:
        raise ClusterError(
            f"JAX_COORDINATOR_ADDRESS is missing or empty, while JAX_PROCESS_ID ({rank}) and JAX_NUM_PROCESSES "
            f"({size}) are set.\nWhat to do: set it to host:port of rank 0's host, the same on every rank. To train on "
            "a single device, set NPU_DEVICE_LAUNCHER=off."
        )
    address, port = place or ("", None)
    return Launched(
        launcher="JAX",
        variable=environment.JAX_PROCESS_ID.name,
        size=size,
        rank=rank,
        local_rank=None,
        on_one_host=False,
        job=f"{address}:{port}",
        address=address,
        port=port,
    )
