"""Updates by sparse gradients that have the same bits on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.sparse_rows import add_up_duplicates

_ASSIGNING = ("assign_add", "assign_sub")


@contextlib.contextmanager
def rows_in_order(optimizer: Any, gradients: Sequence) -> Iterator[None]:
    """Let an optimizer of Keras 3 add up rows of one index before they change a variable, while this is entered.

    Keras 3 passes each row to TensorFlow, whose threads add 1,024 rows and more in any order: the bits of the ranks
    would drift apart. tf-keras adds the rows up itself.
    """
    is_sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    if not is_sparse or not compat.of_keras_3(optimizer):
        yield
        return
    for name in _ASSIGNING:
        # On the optimizer itself, whatever its class does.
        vars(optimizer)[name] = _adding_up(getattr(optimizer, name))
    try:
        yield
    finally:
        for name in _ASSIGNING:
            vars(optimizer).pop(name, None)


def _adding_up(assign: Callable) -> Callable:
    """Return a method that adds up the rows of one index before it assigns them."""

    @compat.do_not_convert
    def assign_rows(variable: Any, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            rows, indices = add_up_duplicates(value.values, value.indices)
            value = tf.IndexedSlices(rows, indices, value.dense_shape)
        return assign(variable, value)

    return assign_rows
