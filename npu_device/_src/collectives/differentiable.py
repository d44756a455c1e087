"""Give results a gradient of their own, in any graph and in eager mode.

``tf.custom_gradient`` does the same; in a graph it keeps the graph forever (TensorFlow 2.20: each call registers a
gradient under a name of its own, which nothing removes), so that each retracing would cost memory. Can go when
TensorFlow removes such a gradient with its graph.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.unordered import require_order

BackwardFunction = Callable[..., Sequence[Any]]

_NAME = "npu_device_gradient"
_KEPT = "_npu_device_gradients"
_numbers = itertools.count()


class _Kept:
    """The gradient function of one call in a graph, which keeps it."""

    def __init__(self, backward: BackwardFunction, results: int) -> None:
        self.backward = backward
        self.results = results

    def gradients(self, *upstream: Any) -> list[Any]:
        """Return the gradients of the results, which have none, and of the inputs."""
        return [None] * self.results + list(self.backward(*_dense(upstream[: self.results])))


def _dense(upstream: Sequence[Any]) -> list[Any]:
    """Return gradients as tensors; those of a result whose rows were picked are ``tf.IndexedSlices``."""
    require_order("the gradient of a collective was computed")
    return [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in upstream]


_by_number: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


def differentiable(
    results: Sequence[tf.Tensor], backward: BackwardFunction, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return results with a gradient of their own.

    Args:
        results: made from the tensors.
        backward: called with the gradients of the results; returns those of the tensors.
        tensors: the tensors that the results depend on, for gradients.
    """
    if not compat.may_be_differentiated():
        return list(results)
    if tf.executing_eagerly():
        after = [tf.identity(result) for result in results]
        compat.record_operation(_NAME, after, list(tensors), lambda *upstream: backward(*_dense(upstream)))
        return after
    graph = tf.compat.v1.get_default_graph()
    kept, number = _Kept(backward, len(results)), next(_numbers)
    _by_number[number] = kept
    # In an attribute, not a table: if the function refers to tensors of the graph, both go together.
    setattr(graph, _KEPT, [*getattr(graph, _KEPT, []), kept])
    before = [*results, *tensors]
    with graph.gradient_override_map({"IdentityN": _NAME}):
        after = tf.identity_n(before, name=f"{_NAME}_{number}")
    compat.record_operation(_NAME, after, before, kept.gradients)
    return list(after[: len(results)])


@tf.RegisterGradient(_NAME)
def _gradient(operation: tf.Operation, *upstream: Any) -> list[Any]:
    found = re.search(rf"{_NAME}_(\d+)", operation.name.rpartition("/")[2])
    kept = _by_number.get(int(found.group(1))) if found else None
    if kept is None:
        raise LookupError(
            f"the collective behind {operation.name!r} has no gradient any more: the function that it was traced in is "
            "gone. Trace the function again, not a saved copy of it."
        )
    return kept.gradients(*upstream)
