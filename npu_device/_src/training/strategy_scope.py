"""Strategies of ``tf.distribute`` inside one rank.

``npu_broadcast_scope_wrapper`` makes variables of a strategy's scope start with the same values on all ranks. A model
of such a scope can't be replicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.variables import broadcast


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
