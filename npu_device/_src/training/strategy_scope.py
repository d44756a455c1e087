"""``npu_broadcast_scope_wrapper``: variables made in a strategy's scope start with the same values on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src.training.variables import broadcast


def npu_broadcast_scope_wrapper(strategy: Any) -> Any:
    """Make a ``tf.distribute`` strategy broadcast the trainable variables that are made in its scope.

    Args:
        strategy: the strategy; its ``scope`` is replaced on this object.

    Returns:
        The same object. At the end of the first ``with strategy.scope():`` in which trainable variables are made they
        are overwritten with those of rank 0; later ones are not sent. On a single device nothing is sent.

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
