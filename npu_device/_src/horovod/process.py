"""Horovod's calls about the process and its job, and its variables: ``init``, ``rank``, ``HOROVOD_TIMELINE``."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.horovod import modules
from npu_device._src.horovod.shared_arguments import described
from npu_device._src.report.timeline import ask_for_timeline
from npu_device._src.training.distribute import ranks
from npu_device._src.training.opening import device

_log = logging.getLogger("npu_device")

_is_initialized = False


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job that the environment describes, as ``npu.open()`` does. Without a launcher, there is one rank.

    Args:
        comm: an MPI communicator of all ranks, or the list of all ranks.
        process_sets: not supported.

    Raises:
        NotImplementedError: process sets, or a part of the ranks.
        RuntimeError: the job can't be joined, as in ``npu.open``.
    """
    global _is_initialized
    if process_sets:
        raise NotImplementedError(
            "process sets aren't supported.\nWhat to do: make groups with hccl.manage.api."
        )
    if device.handle() is None:
        ask_for_timeline()
        _let_memory_grow()
    device.open()
    # A communicator of mpi4py has this method; other callers give a list of ranks.
    if hasattr(comm, "Get_size"):
        wanted = comm.Get_size()
    else:
        wanted = len(comm or ()) or ranks.size()
    if wanted != ranks.size():
        raise NotImplementedError(
            f"rank {ranks.rank()}: hvd.init was given {wanted} of the {ranks.size()} ranks of this job.\n"
            "What to do: call hvd.init() without comm, and start as many ranks as are to train."
        )
    if ranks.rank() == 0 and not _is_initialized:
        _log_differences()
    _is_initialized = True


def _let_memory_grow() -> None:
    # Horovod's examples do this right after ``init``, when TensorFlow here may have its devices already. It then takes
    # only what is set as it was.
    for gpu in tf.config.list_physical_devices("GPU"):
        # What a script has set before stays: TensorFlow's context, or virtual devices.
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.experimental.set_memory_growth(gpu, True)


def _log_differences() -> None:
    installed = modules.other_horovod()
    ignored = environment.horovod_variables_without_effect()
    if installed is not None:
        _log.warning(
            "import horovod gives npu_device's modules in this job, not the installed Horovod %s",
            installed,
        )
    if ignored:
        _log.warning("%s: no effect with npu_device (%s)", ", ".join(ignored), modules.PAGE)


def shutdown() -> None:
    """Leave the job; also happens at exit. The process can't join it again."""
    global _is_initialized
    _is_initialized = False
    device.close()


def is_initialized() -> bool:
    """Return True between ``init`` and ``shutdown``."""
    return _is_initialized


def _after_init(call: Callable[[], int]) -> Callable[[], int]:
    """Return a call that raises ValueError before ``init``, as in Horovod."""

    @functools.wraps(call)
    def checked() -> int:
        if not _is_initialized:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return call()

    return checked


rank, size, local_rank, local_size = map(
    _after_init, (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size)
)


@described
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank of this process as a tensor: int32, shape []."""
    return tf.constant(rank(), tf.int32)


@described
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank among those of this host as a tensor: int32, shape []."""
    return tf.constant(local_rank(), tf.int32)


@described
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks as a tensor: int32, shape []."""
    if process_set_id != 0:
        raise NotImplementedError(
            "process sets aren't supported.\nWhat to do: make groups with hccl.manage.api."
        )
    return tf.constant(size(), tf.int32)


@described
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host as a tensor: int32, shape []."""
    return tf.constant(local_size(), tf.int32)


def gloo_built() -> bool:
    """Return True: ranks work together without MPI."""
    return True


def mpi_built() -> bool:
    """Return False: MPI, and what else Horovod may be built with, isn't needed."""
    return False


gloo_enabled = gloo_built
nccl_built = compat.has_nccl
mpi_enabled = mpi_threads_supported = ccl_built = ddl_built = mpi_built
cuda_built = tf.test.is_built_with_cuda
rocm_built = tf.test.is_built_with_rocm
