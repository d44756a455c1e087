"""Variables that say that there are several processes, in a process that has no rank: it would train by itself."""

from __future__ import annotations

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.environment import Variable

_STARTED_BY_NPURUN = "start the script with npurun on every node, without options: npurun train.py"
_SAYS: tuple[tuple[Variable[int | None], str, str], ...] = (
    (environment.PET_NNODES, "Kubeflow's torch runtime has started one process per node", _STARTED_BY_NPURUN),
    (environment.SKYPILOT_NUM_NODES, "SkyPilot has started one process per node", _STARTED_BY_NPURUN),
    (
        environment.WORLD_SIZE,
        "the job has several processes",
        "set RANK, MASTER_ADDR and MASTER_PORT, too, as torchrun does, or let npurun start the ranks: npurun -n N "
        "train.py",
    ),
    (
        environment.JAX_NUM_PROCESSES,
        "the job has several processes",
        "set JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS, too, or let npurun start the ranks: npurun -n N train.py",
    ),
    (environment.HOROVOD_SIZE, "horovodrun has started several processes", "use npurun instead: npurun -n N train.py"),
    (
        environment.FLUX_JOB_SIZE,
        "Flux has started several tasks",
        "start one task per node, and in it npurun -n N --nnodes M --node-rank R --master-addr ADDR train.py",
    ),
)


def require_single() -> None:
    """Refuse to train alone in one of several processes. Only called where nothing gives this process a rank.

    Raises:
        ClusterError: names the variable, and npurun.
        ValueError: a variable is malformed.
    """
    if environment.NPU_DEVICE_LAUNCHER.get() == "off":
        return
    for variable, meaning, remedy in _SAYS:
        size = variable.get()
        if size is not None and size > 1:
            raise ClusterError(
                f"{variable.name} is {size}: {meaning}, but nothing gives this one a rank. It would train a model of "
                f"its own.\nWhat to do: {remedy}. For a training on this process alone, set NPU_DEVICE_LAUNCHER=off."
            )
