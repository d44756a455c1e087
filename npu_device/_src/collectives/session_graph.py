"""Collectives in a graph that a session runs, and what else differs in such a graph. Only this module asks for one.

A session of TensorFlow 1 is local: operations in its graph can't see the other ranks. A collective is therefore an
operation that calls Python (``session_call``), which runs the collective eagerly in the order on which the ranks agree
(``session_order``). Errors that need the data, and those of the other ranks, are errors of ``session.run``. Only sums
and means of ``all_reduce`` have gradients, as on Ascend.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from npu_device._src.collectives.agreement import Call
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.session_call import call_python
from npu_device._src.collectives.session_order import order_of

if TYPE_CHECKING:
    from npu_device._src.collectives.operation import Declaration

_Part = TypeVar("_Part")


def runs_if_fetched() -> bool:
    """Return True while a graph for a session is built, also in its functions, branches and loops. Its operations run
    if a session fetches them, apart from the eager runtime; False where operations run in any case, in eager mode and
    in a ``tf.function`` that eager code calls.
    """
    return not tf.compat.v1.executing_eagerly_outside_functions()


def place(job: Job, declared: Declaration, call: Call, inputs: Sequence[tf.Tensor], eagerly: Callable[..., Any]) -> Any:
    """Add a collective to the session's graph.

    Args:
        job: the job.
        declared: the declaration of the call.
        call: what the ranks agree on.
        inputs: its tensors.
        eagerly: the collective; takes eager tensors, and returns the operation's results.

    Returns:
        The results; the operation itself if there are none.
    """
    group = declared.group.of_one_order()
    number = _next_number(group)
    order = order_of(job, group)
    structure = declared.results() if declared.results else None
    specs = tf.nest.flatten(structure, True) if declared.results else [tf.TensorSpec([], tf.int32)]

    def function(*values: tf.Tensor) -> list[tf.Tensor]:
        results = eagerly(*values)
        return tf.nest.flatten(results, True) if declared.results else [tf.constant(0)]

    def run(*arrays: Any) -> list[Any]:
        return order.run(number, call, arrays, function, declared.key)

    def gradient(*upstream: tf.Tensor) -> Sequence[tf.Tensor]:
        if declared.gradient is None:
            raise LookupError(f"{declared.operation} has no gradient in a session's graph, as on Ascend")
        return declared.gradient(job, upstream)

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        return call_python(run, tensors, specs), gradient

    results = tf.nest.flatten(differentiable(*inputs))
    return tf.nest.pack_sequence_as(structure, results, expand_composites=True) if declared.results else results[0].op


def apart(parts: Sequence[_Part], whole: _Part) -> Sequence[_Part]:
    """Return the parts that are one collective each: in a session's graph the parts, so that each can start when its
    inputs are ready; elsewhere the whole, whose parts start on their own.
    """
    return parts if runs_if_fetched() else [whole]


def after(operation: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose operations run after another one. Only a session's graph needs this."""
    return tf.control_dependencies([operation]) if runs_if_fetched() else contextlib.nullcontext()


def fetchable(operations: Sequence[Any]) -> tf.Operation | None:
    """Return one operation for a session to fetch; None if operations run without being fetched."""
    return tf.group(*operations) if runs_if_fetched() else None


def overwriting(value: Any, result: tf.Tensor) -> tf.Tensor:
    """Return a result. In a session's graph, fetching it also overwrites the variable whose new value it is, as on
    Ascend.

    Args:
        value: the value that was passed, a variable or not.
        result: its new value.
    """
    if not runs_if_fetched() or not hasattr(value, "assign"):
        return result
    with tf.control_dependencies([tf.compat.v1.assign(value, result)]):
        return tf.identity(result)


_made: weakref.WeakKeyDictionary[tf.Graph, Counter[Group]] = weakref.WeakKeyDictionary()


def _next_number(group: Group) -> int:
    """Return how many collectives of the group the graph has so far; scripts build the same graph on each rank."""
    with tf.init_scope():  # outside functions, branches and loops
        graph = tf.compat.v1.get_default_graph()
    counter = _made.setdefault(graph, Counter())
    counter[group] += 1
    return counter[group]
