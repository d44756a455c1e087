"""Opening and closing: ``npu.open()`` joins the job that the environment describes, and answers who this rank is.

Without distributed environment variables nothing is started. The calls of ``npu.distribute`` come here for the running
cluster; when the script forgot ``npu.open()`` they open by themselves as long as that is still possible, and raise
otherwise: a rank that trains alone while it believes to be one of four is worse than any error.
"""

from __future__ import annotations

import atexit
import logging
from pathlib import Path
from typing import Any

import tensorflow as tf

from npu_device import _compat, environment
from npu_device.cluster import membership, rendezvous, runtime
from npu_device.cluster.errors import ClusterError
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.shared_memory.host import prove
from npu_device.collectives.stall import watch_for_stalls
from npu_device.options import global_options
from npu_device.profiling import trace
from npu_device.profiling.output import write_report
from npu_device.profiling.settings import Settings, settings
from npu_device.tuning import aoe
from npu_device.tuning.split_choice import share

_log = logging.getLogger("npu_device")


class NpuDeviceHandle:
    """What ``npu.open`` returns: this process's device, and its place among the workers.

    Attributes:
        workers_num: number of ranks in the job; 1 on a single device.
        worker_id: this process's rank, from 0.
    """

    def __init__(self, device_id: int, workers_num: int, worker_id: int) -> None:
        self._device_id = device_id
        self.workers_num = workers_num
        self.worker_id = worker_id

    def name(self) -> str:
        """The device's name in Ascend's spelling: ``/job:localhost/replica:0/task:0/device:NPU:<id>``."""
        return f"/job:localhost/replica:0/task:0/device:NPU:{self._device_id}"

    def scope(self) -> Any:
        """A context manager that places operations on this rank's device: its GPU where there is one, else its CPU."""
        kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
        running = runtime.current()
        return tf.device(running.device(kind) if running else f"/device:{kind}:0")

    def is_cluster_worker(self) -> bool:
        """True when this process is one of several workers."""
        return self.workers_num > 1 and 0 <= self.worker_id < self.workers_num

    def as_default(self) -> NpuDeviceHandle:
        """Make this the process's default device: a process has one device, so that opening it has done so already."""
        return self


_handle: NpuDeviceHandle | None = None


def open(device_id: int | None = None) -> NpuDeviceHandle:
    """Open the device of this process, and join the other workers when the environment names some.

    Args:
        device_id: number of the device on this host; default ``ASCEND_DEVICE_ID``, else ``DEVICE_ID``, else the local
            rank, else 0.

    Returns:
        The handle; the same one when the same device is opened again.

    Raises:
        ValueError: a malformed environment variable, or both ``RANK_SIZE`` and ``CM_WORKER_SIZE``.
        RuntimeError: another device is open in this process; the environment is contradictory or incomplete; the ranks
            did not find each other; TensorFlow was used before. The text begins with "Failed open npu device" when the
            ranks could not be joined.

    Every rank waits here until all have come, ``HCCL_CONNECT_TIMEOUT`` seconds at most.

    Source: Ascend TF Adapter 2.x, ``npu.open``.
    """
    global _handle
    if _handle is not None:
        if device_id is not None and device_id != _handle._device_id:
            raise RuntimeError(
                f"device {device_id} can't be opened: this process has opened {_handle.name()} already, and one "
                "process has one device.\n"
                "What to do: start one process a device, for instance with npurun."
            )
        return _handle
    mine = membership.membership_from_environment(device_id)
    if mine is None:
        _handle = NpuDeviceHandle(_single_device_id(device_id), 1, 0)
    else:
        profiling = global_options().profiling_config
        traced = settings(profiling.enable_profiling.typed, profiling.profiling_options.typed)
        try:
            if not runtime.is_closed():
                _compat.renew_context_of_graphs()
            runtime.require_uninitialized()
            cluster = rendezvous.meet(mine)
            running = runtime.start(cluster)
            watch_for_stalls(running)
            prove(running)
            share(running)
            _start_trace(running, traced)
        except ClusterError as error:
            raise type(error)(f"Failed open npu device {mine.device_id}: {error}") from error
        _handle = NpuDeviceHandle(cluster.device_id, cluster.world_size, cluster.rank)
    global_options().freeze()
    return _handle


def close() -> None:
    """Leave the job. Also runs at exit; on a single device the handle is forgotten. See ``cluster.runtime.close``.

    A trace ends here; rank 0 makes its report when the others have left.
    """
    global _handle
    _handle = None
    tracer = trace.stop()
    runtime.close()
    if tracer is not None and tracer.rank == 0:
        write_report(tracer.settings.output)


def handle() -> NpuDeviceHandle | None:
    """The open device of this process, or None (Ascend's ``global_npu_ctx``)."""
    return _handle


def cluster_runtime() -> Runtime | None:
    """The running cluster, opened now if the script hasn't done so; None on a single device.

    Raises:
        RuntimeError: the environment names several workers, but the cluster can't be joined any more.
        ValueError: a malformed environment variable.
    """
    running = runtime.current()
    if running is not None:
        return running
    if membership.world_size_from_environment() == 1:
        return None
    _log.warning(
        "npu.distribute or hccl is used before npu.open(): opening now, since the environment names several workers"
    )
    open()
    return runtime.current()


def _start_trace(running: Runtime, wanted: Settings | None) -> None:
    tuning = global_options().aoe_config
    if wanted is None and (tuning.aoe_mode.typed or environment.AOE_MODE.get()) == "4":
        wanted = aoe.begin(running, Path(tuning.work_path.typed))
    if wanted is not None:
        trace.start(running, wanted)
        atexit.register(close)  # and so before the cluster ends, which registers its end when it starts


def _single_device_id(device_id: int | None) -> int:
    if device_id is not None:
        return device_id
    for variable in (environment.ASCEND_DEVICE_ID, environment.DEVICE_ID):
        value = variable.get()
        if value is not None:
            return int(value)
    return 0
