"""TensorFlow's server, collective runtime and coordination service for one rank: started once a process, closed at
exit.

``start`` needs a cluster on which all ranks have agreed (``rendezvous``) and a TensorFlow context that doesn't exist
yet.
"""

from __future__ import annotations

import atexit
import logging

import tensorflow as tf

from npu_device import _compat, environment
from npu_device.cluster import resources
from npu_device.cluster.description import Cluster
from npu_device.cluster.errors import ClusterError
from npu_device.cluster.health import Health
from npu_device.cluster.store import Store

_JOB = "worker"
_LEADER = f"/job:{_JOB}/replica:0/task:0"

_log = logging.getLogger("npu_device")


class Runtime:
    """The running cluster as this rank sees it.

    Attributes:
        cluster: the ranks, their hosts and addresses.
        store: key-value store and barrier.
        health: failures of the ranks.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.store = Store()
        self.health = Health(cluster, self.store)

    def device(self, kind: str) -> str:
        """The full name of this rank's first device of a kind (``"CPU"`` or ``"GPU"``)."""
        return f"/job:{_JOB}/replica:0/task:{self.cluster.rank}/device:{kind}:0"


_runtime: Runtime | None = None
_closed = False


def current() -> Runtime | None:
    """The runtime of this process, or None before ``start`` and after ``close``."""
    return _runtime


def is_closed() -> bool:
    """True once the runtime has been closed; TensorFlow can't start it a second time in a process."""
    return _closed


def require_uninitialized() -> None:
    """Refuse to go on when TensorFlow has been used already.

    Raises:
        ClusterError: TensorFlow's context exists, so the collective runtime can't be configured any more.
    """
    if _closed:
        raise ClusterError(
            "npu_device has been closed in this process, and TensorFlow can't start its collective runtime twice.\n"
            "What to do: call npu.close() at the end of the script only, or leave it to the exit of the process."
        )
    if _compat.context_is_initialized():
        raise ClusterError(
            "TensorFlow has been used before npu.open(): its devices exist, and the collective runtime must be set "
            "up before that.\n"
            "What to do: call `npu.open().as_default()` right after the imports, before the first tensor, variable, "
            "model, data set or "
            "tf.config.list_logical_devices() of the script."
        )


def start(cluster: Cluster) -> Runtime:
    """Start TensorFlow's runtime for this rank and wait until all ranks have done the same.

    Args:
        cluster: what the rendezvous agreed on.

    Raises:
        ClusterError: TensorFlow was used before, its port is taken, or a rank didn't come up in time.
    """
    global _runtime
    require_uninitialized()
    resources.divide_cores(cluster)
    resources.choose_gpu(cluster)
    context = _compat.eager_context()
    timeout = environment.HCCL_CONNECT_TIMEOUT.get()
    port = int(cluster.addresses[cluster.rank].rpartition(":")[2])
    context.configure_collective_ops(
        collective_leader=_LEADER,
        use_nccl_communication=bool(tf.config.get_visible_devices("GPU")),
        # A rank never places operations on another rank's devices.
        device_filters=(f"/job:{_JOB}/task:{cluster.rank}",),
    )
    context.configure_coordination_service(
        "standalone",
        service_leader=_LEADER,
        cluster_register_timeout_in_ms=int(timeout * 1000),
        heartbeat_timeout_in_ms=int(environment.NPU_DEVICE_HEARTBEAT_TIMEOUT.get() * 1000),
        coordinated_jobs=[_compat.coordinated_job(_JOB, cluster.world_size)],
    )
    context.enable_collective_ops(
        _compat.server_def({_JOB: list(cluster.addresses)}, _JOB, cluster.rank, port, context.config)
    )
    try:
        context.ensure_initialized()
    except tf.errors.OpError as error:
        raise ClusterError(
            f"rank {cluster.rank} on host {cluster.host} could not start TensorFlow's server at "
            f"{cluster.addresses[cluster.rank]}: "
            f"{error.message}\nLikely cause: another program took the port in the meantime, or another rank did not "
            "come up within "
            f"{timeout:g} s (HCCL_CONNECT_TIMEOUT).\nWhat to do: look at the other ranks' output, and start the job "
            "again."
        ) from error
    runtime = Runtime(cluster)
    runtime.store.barrier("started", timeout)
    _runtime = runtime
    atexit.register(close)
    _log.info("rank %d of %d on host %s is ready", cluster.rank, cluster.world_size, cluster.host)
    return runtime


def close() -> None:
    """Leave the job in an orderly way; also runs at exit. Rank 0 waits for the others. Without a runtime nothing
    happens.
    """
    global _runtime, _closed
    runtime, _runtime = _runtime, None
    if runtime is None:
        return
    _closed = True
    atexit.unregister(close)
    runtime.health.leave()
