"""``npu.distribute.broadcast``: every rank starts from the variables of the root; also those of a scope."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import fetchable
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.training import layer_state
from npu_device._src.training.world import world_unless_child

_log = logging.getLogger("npu_device")


@tf.autograph.experimental.do_not_convert
def broadcast(values: Any, root_rank: int = 0, fusion: int = 2, fusion_id: int = 0, group: str = WORLD_GROUP) -> Any:
    """Overwrite variables, in place, with the values of the root.

    Args:
        values: a variable, or a nested structure of variables (see ``tf.nest``): ``tf.Variable``, Keras 2 or Keras 3;
            the same number, shapes and dtypes on every rank. For an empty list, a warning says that nothing is sent.
        root_rank: the rank whose values are sent (default 0).
        fusion: 0 or 2; either way, many variables travel in few large transfers.
        fusion_id: any number, without effect.
        group: name of the group.

    Returns:
        In a graph for a session, the operation that does it; ``None`` otherwise.

    Raises:
        TypeError: something that isn't a variable (it has no ``assign``), or a dtype that can't be sent.
        ValueError: ``root_rank`` out of range, ``fusion`` neither 0 nor 2, unknown group; a layer of tf-keras among the
            values has different vocabularies on the ranks (vocabularies are compared, not sent).
        RuntimeError: another rank has failed or left; the environment names several ranks but the job can't be joined
            any more.

    Every rank has to make the call, eagerly or in a tf.function. On a single device nothing happens.

    >>> import tensorflow as tf
    >>> import npu_device as npu
    >>> weight = tf.Variable([1.0, 2.0])
    >>> npu.distribute.broadcast([weight], root_rank=0)  # a single device
    >>> weight.numpy().tolist()
    [1.0, 2.0]

    Source: Ascend TF Adapter 2.x, ``npu.distribute.broadcast``.
    """
    del fusion_id
    if fusion not in (0, 2):
        raise ValueError(f"fusion {fusion!r} is unknown to broadcast; expected 0 or 2")
    ranks = world_unless_child(group)
    if ranks is None:
        return fetchable([])
    given = tf.nest.flatten(values)
    vocabularies = [value for value in given if compat.is_vocabulary(value)]
    variables = [value for value in given if not compat.is_vocabulary(value)]
    if not given:
        _log.warning(
            "rank %d: broadcast was given an empty list, so that every rank keeps the values it has.\nLikely cause: "
            "the model isn't built yet, and has no variables before its first call.\nWhat to do: call "
            "model.build(input_shape), or the model on one batch, before broadcast; or let "
            "npu.distribute.replicate(model) see to it.",
            ranks.job.cluster.rank,
        )
    for position, variable in enumerate(given):
        if not (hasattr(variable, "assign") or compat.is_vocabulary(variable)):
            raise TypeError(
                f"rank {ranks.job.cluster.rank}: broadcast overwrites variables in place, and number {position} of "
                f"the {len(given)} values is of type {type(variable).__name__}, which can't be assigned to. Pass "
                "variables, for instance model.trainable_variables."
            )
    if vocabularies and tf.executing_eagerly():
        layers = map(compat.layer_of_vocabulary, vocabularies)
        layer_state.require_same(ranks, [layer for layer in layers if layer is not None])
    return ranks.assign_from_root(variables, int(root_rank))


def npu_broadcast_scope_wrapper(strategy: Any) -> Any:
    """Make a ``tf.distribute`` strategy broadcast the trainable variables that are made in its scope.

    Args:
        strategy: the strategy; its ``scope`` is replaced on this object.

    Returns:
        The same object. At the end of the first ``with strategy.scope():`` in which trainable variables are made they
        are overwritten with those of rank 0; later ones are not sent. On a single device nothing is sent.

    Raises:
        RuntimeError: when the scope ends: another rank has failed or left.

    Every rank has to leave the scope. Source: Ascend TF Adapter 2.x, ``npu_broadcast_scope_wrapper``.
    """
    plain_scope = strategy.scope
    sent = False

    @contextlib.contextmanager
    def scope() -> Iterator[Any]:
        nonlocal sent
        made = []

        def collect(next_creator: Any, **keywords: Any) -> Any:
            variable = next_creator(**keywords)
            if variable.trainable:
                made.append(variable)
            return variable

        with plain_scope() as entered:
            with tf.variable_creator_scope(collect):
                yield entered
            if made and not sent:
                sent = True
                broadcast(made)

    strategy.scope = scope
    return strategy


def require_no_strategy(model: Any) -> None:
    """Refuse a Keras model whose variables a strategy of ``tf.distribute`` has made for several devices.

    Raises:
        ValueError: it was made under such a strategy; one device is fine.
    """
    strategy = model.distribute_strategy
    if compat.is_default_strategy(strategy) or isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return
    raise ValueError(
        f"the model {model.name!r} was made under {type(strategy).__name__}, which copies variables to the devices of "
        "one process and divides its batches itself. npu.distribute.replicate does that over the ranks, and takes a "
        "model of one device.\nWhat to do: make and compile the model outside strategy.scope(), or with "
        "tf.distribute.get_strategy() as the strategy (in the model garden: --distribution_strategy=off)."
    )
