"""Starting and stopping in TensorFlow 1 style, and this process's rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.tf1.config import npu_config_proto
from npu_device._src.training import device, groups


def enable_v1() -> None:
    """Make TensorFlow behave as TensorFlow 1 does: graphs and sessions instead of eager mode.

    Before or after ``npu.open()``, and before anything of TensorFlow is used.

    Every rank calls it for itself.

    Source: Ascend TF Adapter 2.x, ``npu.compat.enable_v1``.
    """
    tf.compat.v1.disable_v2_behavior()


def initialize_system(name: str | None = None) -> Any:
    """Join the job that the environment describes.

    Args:
        name: name of the operation.

    Returns:
        An operation to run in a session, as on Ascend. The job is joined when it is made, since TensorFlow must not
        have been used much before that; running it does nothing.

    Raises:
        RuntimeError: eager mode; whatever ``npu.open`` raises.

    Source: Ascend TF Adapter 1.15, ``npu_ops.initialize_system``.
    """
    _require_graph("initialize_system")
    device.open()
    return tf.no_op(name=name)


def shutdown_system(name: str | None = None) -> Any:
    """Undo ``initialize_system``.

    Args:
        name: name of the operation.

    Returns:
        An operation to run in a session, as on Ascend. It does nothing: scripts run it and go on training, and a
        process can join a job only once. Ranks leave when their process ends, or by ``npu.close()``.

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
    """Join the job and make a session.

    Args:
        config: a ``ConfigProto`` or None.

    Returns:
        The session and the operation for ``shutdown_resource``. ``get_npu_rank_id`` and similar calls work from now on.

    Source: Ascend TF Adapter 1.15, ``init_resource``.
    """
    with tf.compat.v1.get_default_graph().as_default():  # which is eager mode no more
        session = tf.compat.v1.Session(config=npu_config_proto(config))
        session.run(initialize_system())
        return session, shutdown_system()


def shutdown_resource(sess: Any, npu_shutdown: Any) -> None:
    """Run the operation that ``init_resource`` gave. Source: Ascend TF Adapter 1.15, ``shutdown_resource``."""
    sess.run(npu_shutdown)


def close_session(sess: Any) -> None:
    """Close a session. Source: Ascend TF Adapter 1.15, ``close_session``."""
    sess.close()


# Source: Ascend TF Adapter 1.15, the functions of these names.
get_npu_rank_id = groups.get_rank_id
get_npu_local_rank_id = groups.get_local_rank_id
get_npu_rank_size = groups.get_rank_size
get_npu_local_rank_size = groups.get_local_rank_size
