"""torchrun's variables, which Kubeflow's PyTorchJob and TrainJob set too, and shell loops.

Source: PyTorch documentation, "torchrun", environment variables.
"""

from __future__ import annotations

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.membership.launched import Launched


def read() -> Launched | None:
    """Return this process's place; None unless RANK, WORLD_SIZE and MASTER_ADDR are set.

    Raises:
        ClusterError: MASTER_PORT is missing.
        ValueError: a variable is malformed.
    """
    if not (environment.RANK.is_set() and environment.WORLD_SIZE.is_set() and environment.MASTER_ADDR.is_set()):
        return None
    rank, size = environment.RANK.get(), environment.WORLD_SIZE.get()
    assert rank is not None and size is not None
    if size > 1 and not environment.MASTER_PORT.is_set():
        raise ClusterError(
            f"MASTER_PORT is missing or empty, while RANK ({rank}), WORLD_SIZE ({size}) and MASTER_ADDR are set.\n"
            "What to do: set MASTER_PORT to a free port of rank 0's host, the same on every rank. To train on a single "
            "device, set NPU_DEVICE_LAUNCHER=off."
        )
    return Launched(
        launcher="torchrun",
        variable=environment.RANK.name,
        size=size,
        rank=rank,
        local_rank=environment.LOCAL_RANK.get(),
        on_one_host=environment.LOCAL_WORLD_SIZE.get() == size,
        job=f"{environment.MASTER_ADDR.get()}:{environment.MASTER_PORT.get()}",
    )


def rendezvous_address() -> tuple[str, int | None] | None:
    """Return MASTER_ADDR and MASTER_PORT; None unless both are set.

    The port is None where torchrun's own store listens.
    """
    address, port = environment.MASTER_ADDR.get(), environment.MASTER_PORT.get()
    if address is None or port is None:
        return None
    return address, None if environment.TORCHELASTIC_USE_AGENT_STORE.get() == "True" else port
