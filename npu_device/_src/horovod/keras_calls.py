"""The calls of ``horovod.keras`` and ``horovod.tensorflow.keras``: on values, also while a session's graph is built."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.horovod import sent_state, tensor_ops
from npu_device._src.horovod.distributed import DistributedOptimizer


def _now(operation: Any, *arguments: Any, **options: Any) -> Any:
    """Return an operation's result: a tensor, or an array if graphs are built."""
    if tf.executing_eagerly():
        return operation(*arguments, **options)
    with compat.eager_mode():
        return operation(*arguments, **options).numpy()


def allreduce(value: Any, name: str | None = None, average: bool | None = None, **arguments: Any) -> Any:
    """Reduce a value over all ranks; see ``horovod.tensorflow.allreduce``.

    Args:
        value: a tensor, array or number.
        name: ignored.
        average: older spelling of ``op``.
        **arguments: those of ``horovod.tensorflow.allreduce``.

    Returns:
        A tensor; an array while a session's graph is built.

    Raises:
        tf.errors.FailedPreconditionError: as in ``horovod.tensorflow.allreduce``.
    """
    return _now(tensor_ops.allreduce, value, average, **arguments)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return all ranks' values one after the other along the first dimension.

    Args:
        value: a tensor, array or number.
        name: ignored.

    Raises:
        tf.errors.FailedPreconditionError: as in ``horovod.tensorflow.allgather``.
    """
    return _now(tensor_ops.allgather, value)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root's value.

    Args:
        value: a tensor, array or number.
        root_rank: the rank that sends.
        name: ignored.

    Raises:
        tf.errors.FailedPreconditionError: as in ``horovod.tensorflow.broadcast``.
    """
    return _now(tensor_ops.broadcast, value, root_rank)


def reducescatter(value: Any, name: str | None = None, op: int = tensor_ops.Average) -> Any:
    """Reduce a value over all ranks, and return this rank's part; see ``horovod.tensorflow.reducescatter``.

    Args:
        value: a tensor or array.
        name: ignored.
        op: ``Average`` (default) or ``Sum``.

    Returns:
        The rows of this rank.

    Raises:
        ValueError: as in ``horovod.tensorflow.reducescatter``.
    """
    return _now(tensor_ops.reducescatter, value, op=op)


def broadcast_global_variables(root_rank: int) -> Any:
    """Overwrite the variables of the Keras session with those of the root; raise RuntimeError in eager mode.

    Args:
        root_rank: the rank that sends.

    Returns:
        None.

    Raises:
        RuntimeError: eager mode.
    """
    return compat.session_backend().get_session().run(sent_state.broadcast_global_variables(root_rank))


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = None, **_: Any
) -> Any:
    """Load a model of ``tf.keras``, and make its optimizer, perhaps of a custom class, a ``DistributedOptimizer``.

    Args:
        filepath: file of the model.
        custom_optimizers: optimizer classes that the file names.
        custom_objects: other classes and functions, by name.
        compression: what travels.
        **_: ignored.

    Returns:
        The model.

    Raises:
        TypeError: a compressor that the script defines.
    """
    known = {**{kind.__name__: kind for kind in custom_optimizers or ()}, **(custom_objects or {})}
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
