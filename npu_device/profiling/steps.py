"""Where an iteration is seen: around the reduction of its gradients, and around their use by an optimizer.

Both are context managers that add nothing while no trace runs (``trace``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from npu_device import _compat
from npu_device.profiling import points, trace
from npu_device.profiling.plan import Plan
from npu_device.profiling.records import Gradient


class Reduction:
    """The reduction of one iteration's gradients; without a trace, or inside another one, nothing."""

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = tracer
        self._recorded: tf.Operation | None = None
        self.begun: list[Any] = []
        self.ends: list[Any] = []
        self.plan: Plan | None = None

    def segment(self, results: Sequence[Any]) -> None:
        """Say that a segment has been reduced, to these tensors; in the order of the segments."""
        if self._tracer is not None:
            self.ends.append(points.reduced(results[0]))

    def hand_over(self, end: Any = None) -> None:
        """Record the iteration, whose end is a point of its own or that of the last segment."""
        assert self._tracer is not None and self.plan is not None
        plan = self.plan if end is None else replace(self.plan, has_end=True)
        found = [*self.begun, *self.ends, *([] if end is None else [end])]
        self._recorded = self._tracer.hand_over(plan, found)

    def recorded_with(self, results: Sequence[Any]) -> list[Any]:
        """The results, of which a session can't fetch any without recording the iteration."""
        if self._recorded is None:
            return list(results)
        with tf.control_dependencies([self._recorded]):
            return [None if result is None else _identity(result) for result in results]


class _Iteration:
    """An iteration whose end comes later than the reduction of its gradients."""

    def __init__(self) -> None:
        self.graph = _graph()
        self.reduction: Reduction | None = None


class _Here(threading.local):
    """What goes on in this thread."""

    def __init__(self) -> None:
        self.untraced = False
        self.iteration: _Iteration | None = None


_here = _Here()


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Reductions in the block are part of something that is seen as a whole."""
    before, _here.untraced = _here.untraced, True
    try:
        yield
    finally:
        _here.untraced = before


@contextlib.contextmanager
def iteration() -> Iterator[None]:
    """The block reduces gradients and updates the variables; its end is the end of the iteration.

    A reduction without this block around it, or in a session's graph, is an iteration by itself and ends it.
    """
    if trace.running() is None or _here.iteration is not None or _in_session_graph():
        yield
        return
    mine = _here.iteration = _Iteration()
    known = 0 if mine.graph is None else len(mine.graph.get_operations())
    try:
        yield
    finally:
        _here.iteration = None
    if mine.reduction is not None:
        made = [] if mine.graph is None else mine.graph.get_operations()[known:]
        mine.reduction.hand_over(points.when([one for one in made if _changes_a_variable(one)]))


@contextlib.contextmanager
def traced_reduction(
    values: Sequence[Any], segments: Sequence[Sequence[int]], kind: str, group: str, backend: str, overlap: bool
) -> Iterator[Reduction]:
    """The block reduces the gradients of an iteration.

    Args:
        values: the gradients.
        segments: positions of each segment's gradients among them; those that are in none, and not None, are reduced
            one by one after them.
        kind: how; nobody reduces gradients but by ``"sum"`` and ``"mean"``, and others don't count.
        group: name of the group.
        backend: what reduces them.
        overlap: segments start before all gradients are there.

    Yields:
        What is to be told when a segment has been reduced.
    """
    tracer = trace.running()
    flat: list[Any] = []
    if tracer is not None and not _here.untraced and kind in ("sum", "mean") and not _compat.compiled_by_xla():
        used = {position for positions in segments for position in positions}
        rest = [[position] for position, value in enumerate(values) if value is not None and position not in used]
        parts = [[values[position] for position in positions] for positions in (*segments, *rest)]
        flat = [value for part in parts for value in part]
    if tracer is None or not flat:
        yield Reduction()
        return
    start = points.forward_start(flat, tracer.settings.fp_point)
    end = points.backward_end(flat, tracer.settings.bp_point)
    seen = Reduction(tracer)
    seen.begun = [*([start] if start is not None else []), *([end] if end is not None else [])]
    seen.begun += [points.when([value]) for value in flat]
    seen.plan = Plan(
        gradients=tuple(map(_gradient, flat)),
        shapes=tuple(str(value.shape) for value in flat),
        segments=_ranges(parts),
        group=group,
        backend=backend,
        has_start=start is not None,
        has_bp_end=end is not None,
        waits_for_all=not overlap,
    )
    yield seen
    if _here.iteration is not None and _here.iteration.graph is _graph():
        _here.iteration.reduction = seen
    else:
        seen.hand_over()


def _graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _in_session_graph() -> bool:
    return not tf.compat.v1.executing_eagerly_outside_functions()


def _changes_a_variable(operation: tf.Operation) -> bool:
    return (
        operation.op_def.is_stateful
        and not operation.type.startswith("Read")
        and any(tensor.dtype == tf.resource for tensor in operation.inputs)
    )


def _ranges(parts: Sequence[Sequence[Any]]) -> tuple[tuple[int, int], ...]:
    found, first = [], 0
    for part in parts:
        found.append((first, first + len(part) - 1))
        first += len(part)
    return tuple(found)


def _gradient(value: Any) -> Gradient:
    sparse = isinstance(value, tf.IndexedSlices)
    dense = value.values if sparse else value
    # TensorFlow prefixes what a tape makes; the rest of the name is the forward operation's.
    name = "" if tf.executing_eagerly() else dense.name.removeprefix("gradient_tape/").partition(":")[0]
    count = dense.shape.num_elements() or 0
    return Gradient(name, f"sparse {dense.dtype.name}" if sparse else dense.dtype.name, count * dense.dtype.size)


def _identity(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(value.values), tf.identity(value.indices), value.dense_shape)
    return tf.identity(value)
