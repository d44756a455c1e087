"""The running trace of this process, and how it marks an iteration: around the reduction of its gradients, and around
their use by an optimizer. Both are context managers that add nothing while no trace runs.

In a graph, a point in time is a ``Timestamp`` behind control dependencies, which takes well under a microsecond. It is
marked as independent of other stateful operations, which ``tf.function`` runs one after the other. A step in a
``tf.function`` puts its points into a TensorFlow queue, which runs no Python in the step; a thread takes them out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.collectives.dtypes import wire_dtype
from npu_device._src.collectives.engine_text import engine_name
from npu_device._src.collectives.engines.host.host_engine import end_of
from npu_device._src.collectives.graph import fetchable_call, origin
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job, current
from npu_device._src.trace.records import FILE, GradientRecord, PointSchema, RankTrace, Recorder, Settings

_WAITING = 10_000  # iterations that the queue holds; a step would wait when it is full

_log = logging.getLogger("npu_device")


class Tracer:
    """Takes the points of the iterations of this rank."""

    def __init__(self, job: Job, settings: Settings) -> None:
        cluster = job.cluster
        head = RankTrace(cluster.rank, cluster.world_size, cluster.host, os.getpid(), *measure_clock(job))
        self.rank = cluster.rank
        self.settings = settings
        self._recorder = Recorder(settings.output, head, settings.schedule, settings.storage_limit)
        for path in settings.output.glob(f"rank*/{FILE}") if cluster.rank == 0 else ():
            number = path.parent.name[4:]
            if number.isdecimal() and int(number) >= cluster.world_size:  # an earlier job had more ranks
                path.unlink(missing_ok=True)
        self._schemas: list[PointSchema] = []
        with compat.eager_mode():
            self._queue = tf.queue.FIFOQueue(_WAITING, [tf.int32, tf.float64])
        self._thread = threading.Thread(target=self._take, name="npu_device-trace", daemon=True)
        self._thread.start()

    def hand_over(self, schema: PointSchema, points: Sequence[Any]) -> tf.Operation | None:
        """Record an iteration: now, or whenever the graph runs. In a session, return the operation for it."""
        if tf.executing_eagerly():
            self._recorder.add(schema, points)
            return None
        together = tf.stack(points)
        fetched = fetchable_call(lambda values: self._recorder.add(schema, values.tolist()), together)
        if fetched is None:
            self._schemas.append(schema)
            components = [tf.constant(len(self._schemas) - 1), together]
            compat.run_independently(tf.raw_ops.QueueEnqueueV2(handle=self._queue.queue_ref, components=components))
        return fetched

    def close(self) -> None:
        """Record what has been handed over, and end. Functions that TensorFlow has traced meanwhile fail later."""
        with compat.eager_mode():
            self._queue.close()
        self._thread.join()
        self._recorder.close()

    def _take(self) -> None:
        with compat.eager_mode():
            while True:
                try:
                    number, points = self._queue.dequeue()
                except tf.errors.OpError:
                    return  # closed
                try:
                    self._recorder.add(self._schemas[int(number)], points.numpy().tolist())
                except Exception:  # training must not wait for a queue that nobody empties
                    _log.exception("rank %d: tracing ends here", self.rank)
                    self._recorder.close()


def running() -> Tracer | None:
    job = current()
    return None if job is None else job.part(Tracer)


def start(job: Job, settings: Settings) -> None:
    """Start a trace, which ends with the job. Every rank calls this; see ``Tracer``."""
    job.add(Tracer(job, settings))


def stop() -> None:
    job = current()
    if job is not None:
        job.end(Tracer)


_ROUNDS = 20


def measure_clock(job: Job) -> tuple[float, float | None]:
    """Compare clocks; return the correction of this one, the same on all ranks of a host, and its uncertainty (None if
    unknown), in microseconds. Every rank calls this.
    """
    cluster, timeout = job.cluster, environment.HCCL_CONNECT_TIMEOUT.get()
    first = cluster.neighbours[0]
    if first == 0:
        return 0.0, 0.0
    try:
        mine = min(_ask(job, number, timeout) for number in range(_ROUNDS)) if cluster.rank == first else None
        found = job.store.gather_from(f"clock of {cluster.host}", mine, cluster.neighbours, timeout).get(first)
        if found is None:
            raise TimeoutError(f"rank {first} hasn't compared them")
    except (ClusterError, TimeoutError) as error:
        _log.warning(
            "rank %d: the clocks of the hosts could not be compared (%s); times of different hosts don't belong "
            "together in the trace. What to do: turn the trace on for all ranks.",
            cluster.rank,
            error,
        )
        return 0.0, None
    took, offset = found
    return offset * 1e6, took / 2 * 1e6


def _ask(job: Job, number: int, timeout: float) -> tuple[float, float]:
    before = time.time()
    there = job.health.ask("clock", [job.cluster.rank, number], [0], timeout).get(0)
    after = time.time()
    if there is None:
        raise TimeoutError("rank 0 doesn't answer")
    return after - before, there - (before + after) / 2


# A step's inputs from outside; forward starts when they are there.
_INPUTS = ("Placeholder", "IteratorGetNext", "IteratorGetNextAsOptional", "OptionalGetValue")


def when(values: Iterable[Any]) -> Any:
    """Return the time when values, of this graph or one around it, are there: a float eagerly, a scalar in a graph."""
    if tf.executing_eagerly():
        return time.time()
    operations = [_operation(value) for value in values]
    return _read(operations, operations[0].graph if operations else tf.compat.v1.get_default_graph())


def reduced(value: Any) -> Any:
    """Return the time when the collective that makes a value was over, perhaps before a thread has made the value."""
    ended = None if tf.executing_eagerly() else end_of(_operation(value))
    return when([value]) if ended is None else ended


def forward_start(gradients: Sequence[Any], name: str) -> Any:
    """Return the time when all inputs of a step with these gradients are there, or those of the operation with this
    name; None in eager mode.
    """
    if tf.executing_eagerly():
        return None
    targets = [_operation(gradient) for gradient in gradients]
    named = _named(targets[0].graph, name)
    if named is not None:
        return _read([tensor.op for tensor in named.inputs], targets[0].graph)
    return _read([operation for operation in leading_to(targets) if operation.type in _INPUTS], targets[0].graph)


def backward_end(gradients: Sequence[Any], name: str) -> Any:
    """Return the time when the operation with this name has ended; None without one, and in eager mode."""
    if tf.executing_eagerly():
        return None
    graph = _operation(gradients[0]).graph
    named = _named(graph, name)
    return None if named is None else _read([named], graph)


def _named(graph: tf.Graph, name: str) -> tf.Operation | None:
    if not name:
        return None
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        _log.warning("there is no operation %r in the traced step: the point is found as if no name were given", name)
        return None


def _read(operations: Sequence[tf.Operation], graph: tf.Graph) -> tf.Tensor:
    with graph.as_default():
        if getattr(graph, "building_function", False):
            # Otherwise a block of control dependencies around the caller would apply.
            with tf.control_dependencies(None), tf.control_dependencies(operations):
                point = tf.timestamp()
        else:
            with tf.control_dependencies(operations):
                point = tf.timestamp()
    compat.run_independently(point.op)
    return point


def _operation(value: Any) -> tf.Operation:
    """Return the operation that makes a value, in its own graph; not the input of a branch or loop."""
    if isinstance(value, tf.Operation):
        return value
    return origin(value.values if isinstance(value, tf.IndexedSlices) else value).op


def leading_to(targets: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
    """Yield operations of a graph and all those on which they depend."""
    seen: set[tf.Operation] = set()
    waiting = list(targets)
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += (tensor.op for tensor in operation.inputs)
            waiting += operation.control_inputs
            yield operation


class TracedReduction:
    def __init__(self, tracer: Tracer, schema: PointSchema, begun: Sequence[Any]) -> None:
        self._tracer, self._schema = tracer, schema
        self._points = [*begun]
        self._recorded: tf.Operation | None = None

    def segment(self, results: Sequence[Any]) -> None:
        """Note that a segment has been reduced to these tensors; in the order of the segments."""
        self._points.append(reduced(results[0]))

    def hand_over(self, end: Any = None) -> None:
        """Record the iteration; its end is a point of its own or the end of the last segment."""
        schema = self._schema if end is None else replace(self._schema, has_end=True)
        self._recorded = self._tracer.hand_over(schema, self._points if end is None else [*self._points, end])

    def recorded_with(self, results: Sequence[Any]) -> list[Any]:
        """Return the results, bound to the recording: a session that fetches any of them records the iteration."""
        if self._recorded is None:
            return list(results)
        with tf.control_dependencies([self._recorded]):
            return [
                None if result is None else tf.nest.map_structure(tf.identity, result, expand_composites=True)
                for result in results
            ]


@dataclass
class _OpenIteration:
    """An iteration whose end comes later than the reduction of its gradients."""

    graph: tf.Graph | None
    reduction: TracedReduction | None = None


class _Current(threading.local):
    iteration: _OpenIteration | None = None


_current = _Current()


@contextlib.contextmanager
def iteration() -> Iterator[None]:
    """Mark the block as an iteration that reduces gradients and updates the variables.

    A reduction without this block, or without eager mode, is an iteration by itself.
    """
    has_eager_mode = tf.compat.v1.executing_eagerly_outside_functions()
    if running() is None or _current.iteration is not None or not has_eager_mode:
        yield
        return
    mine = _current.iteration = _OpenIteration(_graph())
    known = 0 if mine.graph is None else len(mine.graph.get_operations())
    try:
        yield
    finally:
        _current.iteration = None
    if mine.reduction is not None:
        made = [] if mine.graph is None else mine.graph.get_operations()[known:]
        mine.reduction.hand_over(when([one for one in made if _changes_a_variable(one)]))


@contextlib.contextmanager
def traced_reduction(
    tracer: Tracer,
    values: Sequence[Any],
    segments: Sequence[Sequence[int]],
    job: Job,
    group: Group,
    waits_for_all: bool,
    wire: tf.DType | None,
) -> Iterator[TracedReduction | None]:
    """Mark the block as the reduction of an iteration; yield what is told of each segment, None if there are none."""
    used = {position for positions in segments for position in positions}
    rest = [[position] for position, value in enumerate(values) if value is not None and position not in used]
    parts = [[values[position] for position in positions] for positions in (*segments, *rest)]
    flat = [value for part in parts for value in part]
    if not flat:
        yield None
        return
    start = forward_start(flat, tracer.settings.fp_point)
    end = backward_end(flat, tracer.settings.bp_point)
    schema = PointSchema(
        gradients=tuple(_gradient(value, wire) for value in flat),
        shapes=tuple(str(value.shape) for value in flat),
        segments=tuple((end - len(part), end - 1) for end, part in zip(itertools.accumulate(map(len, parts)), parts)),
        group=group.name,
        backend=engine_name(job, group, [value.dtype for value in flat]),
        has_start=start is not None,
        has_bp_end=end is not None,
        waits_for_all=waits_for_all,
    )
    begun = [point for point in (start, end) if point is not None]
    seen = TracedReduction(tracer, schema, [*begun, *(when([value]) for value in flat)])
    yield seen
    if _current.iteration is not None and _current.iteration.graph is _graph():
        _current.iteration.reduction = seen
    else:
        seen.hand_over()


def _graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _changes_a_variable(operation: tf.Operation) -> bool:
    return (
        operation.op_def.is_stateful
        and not operation.type.startswith("Read")
        and any(tensor.dtype == tf.resource for tensor in operation.inputs)
    )


def _gradient(value: Any, wire: tf.DType | None) -> GradientRecord:
    sparse = isinstance(value, tf.IndexedSlices)
    dense = value.values if sparse else value
    # TensorFlow prefixes what a tape makes; the rest of the name is the forward operation's.
    name = "" if tf.executing_eagerly() else dense.name.removeprefix("gradient_tape/").partition(":")[0]
    count = dense.shape.num_elements() or 0
    dtype = wire_dtype(dense.dtype, wire)
    return GradientRecord(name, f"sparse {dtype.name}" if sparse else dtype.name, count * dtype.size)
