"""``npu.distribute.broadcast``: every rank starts from the root's variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device import device
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.group import WORLD_GROUP, Group, group_of
from npu_device.sessions.graph_collectives import broadcast as broadcast_tensors
from npu_device.sessions.outside import in_session_graph


@tf.autograph.experimental.do_not_convert
def broadcast(values: Any, root_rank: int = 0, fusion: int = 2, fusion_id: int = 0, group: str = WORLD_GROUP) -> Any:
    """Overwrite variables, in place, with the root's values.

    Args:
        values: a variable, or a list or tuple of variables: ``tf.Variable``, Keras 2 or Keras 3; the same number,
            shapes and dtypes on every rank. An empty list is fine.
        root_rank: the rank whose values count (default 0).
        fusion: 0 or 2; either way few large transfers are made of many variables.
        fusion_id: any number, without effect.
        group: name of the group.

    Returns:
        In a graph for a session the operation that does it; ``None`` otherwise.

    Raises:
        TypeError: something that isn't a variable (it has no ``assign``), or a dtype that can't be sent.
        ValueError: ``root_rank`` out of range, ``fusion`` neither 0 nor 2, unknown group.
        RuntimeError: another rank has failed or left; the environment names several ranks but the job can't be joined
            any more.

    Every rank has to make the call, eagerly or in a tf.function. On a single device nothing happens.

    Source: Ascend TF Adapter 2.x, ``npu.distribute.broadcast``.
    """
    del fusion_id
    if fusion not in (0, 2):
        raise ValueError(f"fusion {fusion!r} is unknown to broadcast; expected 0 or 2")
    runtime = device.cluster_runtime()
    if runtime is None:
        return tf.no_op() if in_session_graph() else None
    variables = list(values) if isinstance(values, (list, tuple)) else [values]
    for position, variable in enumerate(variables):
        if not hasattr(variable, "assign"):
            raise TypeError(
                f"rank {runtime.cluster.rank}: broadcast overwrites variables in place, and number {position} of the "
                f"{len(variables)} values is "
                f"a {type(variable).__name__}, which can't be assigned to. Pass variables, for instance "
                "model.trainable_variables."
            )
    return overwrite(runtime, variables, int(root_rank), group_of(runtime, group))


def overwrite(runtime: Runtime, variables: Sequence[Any], root_rank: int, group: Group) -> Any:
    """Give variables the values of the group's root; the operation that does it in a graph for a session, else None."""
    sent = broadcast_tensors(runtime, [_value(variable) for variable in variables], root_rank, group)
    assigned = [variable.assign(tensor) for variable, tensor in zip(variables, sent)]
    return tf.group(assigned) if in_session_graph() else None


def _value(variable: Any) -> tf.Tensor:
    # A TensorFlow 1 variable as a tensor is one read that was made with it, whatever stands before it here.
    return variable.read_value() if hasattr(variable, "read_value") else tf.convert_to_tensor(variable)
