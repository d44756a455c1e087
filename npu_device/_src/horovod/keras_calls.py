"""The calls of ``horovod.keras`` and ``horovod.tensorflow.keras``: on values, also while a session's graph is built."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.horovod import sent_state, tensor_ops
from npu_device._src.horovod.distributed import DistributedOptimizer


def _now(operation: Any) -> Any:
    """Return an operation that runs at once, also while graphs are built, when its result is an array."""

    @functools.wraps(operation)
    def run(value: Any, *arguments: Any, **options: Any) -> Any:
        if tf.executing_eagerly():
            return operation(value, *arguments, **options)
        with compat.eager_mode():
            return operation(value, *arguments, **options).numpy()

    return run


allgather, broadcast, reducescatter = map(_now, (tensor_ops.allgather, tensor_ops.broadcast, tensor_ops.reducescatter))


def allreduce(value: Any, name: str | None = None, average: bool | None = None, **arguments: Any) -> Any:
    """Reduce a value over all ranks; see ``horovod.tensorflow.allreduce``.

    Args:
        value: a tensor, array or number.
        name: ignored.
        average, arguments: as there.

    Returns:
        A tensor; an array while the graph of a session is built.

    Raises:
        tf.errors.FailedPreconditionError: as there.
    """
    return _now(tensor_ops.allreduce)(value, average, **arguments)


def broadcast_global_variables(root_rank: int) -> Any:
    """Overwrite the variables of the Keras session with those of the root.

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
    """Return a model of ``tf.keras`` from a file, whose optimizer is a ``DistributedOptimizer``.

    Args:
        filepath: file of the model.
        custom_optimizers: optimizer classes that the file names.
        custom_objects: other classes and functions, by name.
        compression: what travels.
        **_: ignored.

    Raises:
        TypeError: a compressor that the script defines.
    """
    known = {**{kind.__name__: kind for kind in custom_optimizers or ()}, **(custom_objects or {})}
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
