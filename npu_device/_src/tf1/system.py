"""Starting and stopping in TensorFlow 1 style, the rank of this process, and what scripts set before the NPU compiler
runs a graph. There is no such compiler here: those calls check what they can, and change nothing.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from npu_device._src.tf1.config import config_of_session
from npu_device._src.training.distribute import groups
from npu_device._src.training.opening import device
from npu_device._src.training.watching.session_ends import compare_at_end


def enable_v1() -> None:
    """Make TensorFlow behave as TensorFlow 1 does: graphs and sessions instead of eager mode.

    Every rank calls it, before or after ``npu.open()``, and before anything of TensorFlow is used.

    Source: Ascend TF Adapter 2.x, ``npu.compat.enable_v1``.
    """
    tf.compat.v1.disable_v2_behavior()


def initialize_system(name: str | None = None) -> Any:
    """Return an operation to run in a session, as on Ascend, and join the job that the environment describes.

    Args:
        name: name of the operation. Running it does nothing: TensorFlow must not have been used much before the job is
            joined.

    Raises:
        RuntimeError: eager mode; whatever ``npu.open`` raises.

    Source: Ascend TF Adapter 1.15, ``npu_ops.initialize_system``.
    """
    _require_graph("initialize_system")
    device.open()
    # The job is joined when the graph is built: running an operation comes too late for the devices.
    return tf.no_op(name=name)


def shutdown_system(name: str | None = None) -> Any:
    """Return an operation to run in a session, as on Ascend, which does nothing.

    Scripts run it and go on training, and a process can join a job only once. Ranks leave when their process ends, or
    by ``npu.close()``.

    Args:
        name: name of the operation.

    Raises:
        RuntimeError: eager mode.

    Source: Ascend TF Adapter 1.15, ``npu_ops.shutdown_system``.
    """
    _require_graph("shutdown_system")
    return tf.no_op(name=name)


def _require_graph(operation: str) -> None:
    if tf.executing_eagerly():
        raise RuntimeError(
            f"{operation} makes an operation for a session, and this is eager mode.\nWhat to do: call npu.open() "
            "instead, or tf.compat.v1.disable_eager_execution() at the beginning of the script."
        )


def init_resource(config: Any = None) -> tuple[Any, Any]:
    """Return a session and the operation for ``shutdown_resource``, once the job is joined.

    Args:
        config: a ``ConfigProto`` or None.

    Raises:
        RuntimeError: the job can't be joined, as in ``npu.open``.

    Source: Ascend TF Adapter 1.15, ``init_resource``.
    """
    # The block leaves eager mode.
    with tf.compat.v1.get_default_graph().as_default():
        session = tf.compat.v1.Session(config=config_of_session(config))
        session.run(initialize_system())
        return session, shutdown_system()


def shutdown_resource(sess: Any, npu_shutdown: Any) -> None:
    """Run the operation that ``init_resource`` gave.

    Args:
        sess, npu_shutdown: what ``init_resource`` returned.

    Source: Ascend TF Adapter 1.15, ``shutdown_resource``.
    """
    sess.run(npu_shutdown)


def close_session(sess: Any) -> None:
    """Close a session, and warn if the ranks have different variables in it.

    Args:
        sess: the session.

    Source: Ascend TF Adapter 1.15, ``close_session``.
    """
    compare_at_end(sess)
    sess.close()


# Source: Ascend TF Adapter 1.15, the functions of these names.
get_npu_rank_id = groups.get_rank_id
get_npu_local_rank_id = groups.get_local_rank_id
get_npu_rank_size = groups.get_rank_size
get_npu_local_rank_size = groups.get_local_rank_size


def set_graph_exec_config(
    fetch: Any,
    dynamic_input: bool = False,
    dynamic_graph_execute_mode: str = "dynamic_execute",
    dynamic_inputs_shape_range: str | None = None,
    **settings: Any,
) -> Any:
    """Return the fetch. On an NPU, it would be compiled for varying shapes.

    Args:
        fetch: the fetch.
        dynamic_input, dynamic_graph_execute_mode, dynamic_inputs_shape_range, **settings: ignored.

    Source: Ascend TF Adapter 1.x, ``util.set_graph_exec_config``.
    """
    return fetch


def keep_tensors_dtypes(graph: Any, input_tensors: Any) -> None:
    """Do nothing: tensors keep the dtypes of the script, under mixed precision, too.

    Args:
        graph, input_tensors: ignored.

    Source: Ascend TF Adapter 1.x, ``util.keep_tensors_dtypes``.
    """


def npu_compile(sess: Any, *fetches: Any) -> None:
    """Do nothing: fetches aren't compiled ahead of the first run.

    Args:
        sess, *fetches: ignored.

    Source: Ascend TF Adapter 1.x, ``util.npu_compile``.
    """


def check_aoe_mode(aoe_mode: str) -> None:
    """Check a mode of the tuner.

    Args:
        aoe_mode: the mode.

    Raises:
        ValueError: it isn't "1", "2" or "4".

    Source: Ascend TF Adapter 1.x, ``util.check_aoe_mode``.
    """
    if aoe_mode not in ("1", "2", "4"):
        raise ValueError(f"aoe_mode must be '1', '2' or '4'; found {aoe_mode!r}")


def npu_resource_init(graph_run_mode: int = 1, **settings: Any) -> None:
    """Start the device by ``npu.open()``. The settings have no effect.

    Args:
        graph_run_mode, **settings: ignored.

    Raises:
        RuntimeError: the job can't be joined, as in ``npu.open``.

    Source: Ascend TF Adapter 1.x, ``npu_plugin.npu_resource_init``.
    """
    device.open()


def npu_resource_shutdown() -> None:
    """Stop the device by ``npu.close()``. Source: Ascend TF Adapter 1.x, ``npu_plugin.npu_resource_shutdown``."""
    device.close()


class NPUStrategy(tf.compat.v1.distribute.OneDeviceStrategy):
    """``tf.distribute.OneDeviceStrategy`` with a default device. Communication with other ranks is not affected.

    Args:
        device: where variables and computation go.

    Source: Ascend TF Adapter 1.x, ``npu_strategy.NPUStrategy``.
    """

    def __init__(self, device: str = "/cpu:0") -> None:
        super().__init__(device)


class Profiler:
    """Profiles a block with TensorFlow's profiler; TensorBoard shows the result.

    Args:
        level, aic_metrics: without effect; they concern the counters of the NPU.
        output_path: directory for the profile; with several ranks, its folder ``rank0``, ``rank1`` and so on.

    Raises:
        RuntimeError: on entry, when another profile is being taken.

    Source: Ascend TF Adapter 1.x, ``profiler.Profiler``.
    """

    def __init__(
        self, level: str = "L1", aic_metrics: str = "PipeUtilization", output_path: str = "./"
    ) -> None:
        self._output_path = output_path

    def __enter__(self) -> Profiler:
        path = self._output_path
        cluster = device.cluster_or_parent()
        if cluster is not None and cluster.world_size > 1:
            # TensorFlow names the file after the host and the second, in which all ranks of a host may write one.
            path = os.path.join(path, f"rank{cluster.rank}")
        try:
            tf.profiler.experimental.start(path)
        except tf.errors.AlreadyExistsError:
            # TensorFlow takes one profile at a time.
            raise RuntimeError(
                "Profiler: another profile is being taken in this process, by another Profiler or by tf.profiler.\n"
                "What to do: leave that block, or call tf.profiler.experimental.stop(), first."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        tf.profiler.experimental.stop()
