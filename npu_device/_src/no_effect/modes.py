"""Switches of the NPU, which are checked, and change nothing on CPU and GPU; and scopes that tag operations for the
compiler of the NPU: a block runs as it would without.

Source of the scopes: Ascend TF Adapter 2.x, ``npu_device.utils.scope`` and ``npu.keep_dtype_scope``,
``npu.npu_recompute_scope``.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from contextlib import contextmanager

from npu_device._src.environment import NPU_LOOP_SIZE

_log = logging.getLogger("npu_device")

_loop_size: int | None = None
_schedule_early = False


def set_npu_loop_size(loop_size: int) -> None:
    """Set how many steps of a ``tf.range`` loop an NPU runs per launch.

    Args:
        loop_size: number of steps, from 1. Anything smaller is logged as an error and changes nothing, as on Ascend.

    Raises:
        TypeError: ``loop_size`` is not an integer.

    TensorFlow runs such loops in one go anyway: the number is recorded, and neither results nor speed depend on it.

    Source: Ascend TF Adapter 2.x, ``npu.set_npu_loop_size``.
    """
    global _loop_size
    # ``index`` also takes a number of numpy.
    size = operator.index(loop_size)
    if size <= 0:
        _log.error(
            "set_npu_loop_size: the loop size must be 1 or more; found %d; it stays %d",
            size,
            get_npu_loop_size(),
        )
        return
    _loop_size = size


def forget_loop_size() -> None:
    """Return to ``NPU_LOOP_SIZE``, as for a script that begins in this process."""
    global _loop_size
    _loop_size = None


def get_npu_loop_size() -> int:
    """Return the loop size: as set, else ``NPU_LOOP_SIZE``, else 1; malformed it counts as 1, as on Ascend."""
    if _loop_size is not None:
        return _loop_size
    try:
        return NPU_LOOP_SIZE.get()
    except ValueError as error:
        _log.warning("the loop size is 1: %s", error)
        return 1


def set_device_sat_mode(mode: int) -> None:
    """Set what an NPU does with numbers that overflow.

    Args:
        mode: 0 clamps them, 1 makes them infinite, 2 leaves it to the back end. Anything else is logged as an error, as
            on Ascend.

    CPUs and GPUs always make them infinite: mode 0 logs a warning and has no effect.

    Source: Ascend TF Adapter 2.x, ``npu.set_device_sat_mode``.
    """
    if mode not in (0, 1, 2):
        _log.error(
            "set_device_sat_mode: the mode must be 0, 1 or 2; found %r; nothing changes", mode
        )
    elif mode == 0:
        _log.warning(
            "set_device_sat_mode(0) has no effect: on CPU and GPU numbers that overflow become infinite"
        )


def set_schedule_aicore_task_early(enable: bool) -> None:
    """Record whether an NPU would schedule the tasks of its AI cores early.

    Args:
        enable: True or False.

    Source: Ascend TF Adapter 9.2, ``npu.set_schedule_aicore_task_early``.
    """
    global _schedule_early
    _schedule_early = bool(enable)


def get_schedule_aicore_task_early() -> bool:
    """Return the value of ``set_schedule_aicore_task_early``; False if it wasn't called.

    Source: Ascend TF Adapter 9.2, ``npu.get_schedule_aicore_task_early``.
    """
    return _schedule_early


def is_inf_nan_enabled() -> bool:
    """Return True: on CPU and GPU, numbers that overflow become infinite, whatever ``set_device_sat_mode`` set.

    Source: Ascend TF Adapter 2.x, ``npu.is_inf_nan_enabled``.
    """
    return True


@contextmanager
def keep_dtype_scope() -> Iterator[None]:
    """Keep the dtype of operations in the block under mixed precision on an NPU. Without effect here."""
    yield


@contextmanager
def npu_recompute_scope() -> Iterator[None]:
    """Recompute activations of the block in backward on an NPU, as ``tf.recompute_grad`` does. Without effect here."""
    yield


@contextmanager
def npu_optimizer_scope() -> Iterator[None]:
    """Mark the block as the part of the graph that belongs to the optimizer on an NPU. Without effect here."""
    yield


@contextmanager
def npu_gradients_scope() -> Iterator[None]:
    """Mark the block as the backward part of the graph on an NPU. Without effect here."""
    yield


@contextmanager
def without_npu_compile_scope() -> Iterator[None]:
    """Run the operations of the block on the host on an NPU. Without effect here."""
    yield


@contextmanager
def npu_variable_scope(placement: object = None) -> Iterator[None]:
    """Choose the engine for the variables of the block, an ``NpuExecutePlacement``, on an NPU. Without effect here.

    Args:
        placement: ignored.
    """
    yield


@contextmanager
def npu_stage_scope(stage: int) -> Iterator[None]:
    """Set the number of the pipeline stage that the block belongs to on an NPU. Without effect here.

    Args:
        stage: ignored.
    """
    yield


@contextmanager
def npu_mem_type_scope() -> Iterator[None]:
    """Put the variables of the block into another kind of memory on an NPU. Without effect here."""
    yield


@contextmanager
def npu_weight_prefetch_scope(
    buffer_pool_id: int = 0, buffer_pool_size: int = 536870912
) -> Iterator[None]:
    """Prefetch the weights of the block into a pool of so many bytes on an NPU. Without effect here.

    Args:
        buffer_pool_id, buffer_pool_size: ignored.
    """
    yield


@contextmanager
def op_specified_engine_scope(engine_name: str, kernel_lib_name: str) -> Iterator[None]:
    """Choose the engine and the kernel library for the block on an NPU. Without effect here.

    Args:
        engine_name, kernel_lib_name: ignored.
    """
    yield


@contextmanager
def npu_qos_label_scope(label: object) -> Iterator[None]:
    """Set the quality of service for the block on an NPU. Without effect here.

    Args:
        label: ignored.
    """
    yield


@contextmanager
def subgraph_multi_dims_scope(index: int) -> Iterator[None]:
    """Make the block a subgraph with shapes of its own on an NPU. Without effect here.

    Args:
        index: ignored.
    """
    yield


@contextmanager
def npu_graph_slice_scope(slice_num: int | None = None) -> Iterator[None]:
    """Cut the block into slices to save memory on an NPU. Without effect here.

    Args:
        slice_num: ignored.
    """
    yield


@contextmanager
def disable_autofuse() -> Iterator[None]:
    """Keep the operations of the block from being fused on an NPU. Without effect here."""
    yield


@contextmanager
def limit_core_num_scope(*arguments: object, **keywords: object) -> Iterator[None]:
    """Limit how many cores the block uses on an NPU. Without effect here.

    Args:
        arguments, keywords: ignored.
    """
    yield
