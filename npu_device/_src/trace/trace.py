"""The running trace of this process, and how it marks an iteration: around the reduction of its gradients, and around
their use by an optimizer. Both are context managers that add nothing while no trace runs.

In a graph, a point in time is a ``Timestamp`` behind control dependencies, which takes well under a microsecond. It is
marked as independent of other stateful operations, which ``tf.function`` runs one after the other. A step in a
``tf.function`` puts its points into a TensorFlow queue, which runs no Python in the step; a thread takes them out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.dtypes import wire_dtype
from npu_device._src.collectives.engine_text import engine_name
from npu_device._src.collectives.engines.host.host_engine import end_of
from npu_device._src.collectives.graph import fetchable_call, origin
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job, current, current_component
from npu_device._src.threads import start_thread
from npu_device._src.trace.records import (
    FILE,
    UNKNOWN,
    GradientRecord,
    PointSchema,
    RankTrace,
    Settings,
    TraceFile,
    model_of,
)

_WAITING = 10_000  # iterations that the queue holds; a step would wait when it is full

_log = logging.getLogger("npu_device")


class Tracer:
    """Collects the times of this rank's iterations, and writes them to its trace file."""

    def __init__(self, job: Job, settings: Settings) -> None:
        cluster = job.cluster
        self.rank = cluster.rank
        self.settings = settings
        # Without a model; each reduction says which it has.
        self.head = RankTrace(
            self.rank, cluster.world_size, cluster.host, os.getpid(), *measure_clock(job)
        )
        self._file = TraceFile(self.rank, settings)
        if cluster.rank == 0:
            _remove_surplus_traces(settings.output, cluster.world_size)
        self._schemas: list[PointSchema] = []
        self._queue: tf.queue.FIFOQueue | None = None
        self._lock = threading.Lock()  # functions may be traced in several threads

    def hand_over(self, schema: PointSchema, points: Sequence) -> tf.Operation | None:
        """Record an iteration: now, or whenever the graph runs. In a session, return the operation for it."""
        if tf.executing_eagerly():
            self._file.add(schema, points)
            return None
        times = tf.stack(points)
        fetched = fetchable_call(lambda array: self._file.add(schema, array.tolist()), times)
        # There is nothing to fetch outside of a session.
        if fetched is None:
            # A queue takes tensors only, so that the number stands for the schema.
            with self._lock:
                schema_index = len(self._schemas)
                self._schemas.append(schema)
                queue = self._queue or self._start_queue()
            components = [tf.constant(schema_index), times]
            compat.run_independently(
                tf.raw_ops.QueueEnqueueV2(handle=queue.queue_ref, components=components)
            )
        return fetched

    def _start_queue(self) -> tf.queue.FIFOQueue:
        """Start to take points from a queue, which is made as late as this: TensorFlow takes no settings after it."""
        # Made eagerly, so that the queue outlives the graph that is being built.
        with compat.eager_mode():
            self._queue = tf.queue.FIFOQueue(_WAITING, [tf.int32, tf.float64])
        self._thread = start_thread("npu_device-trace", self._record_queued)
        return self._queue

    def close(self) -> None:
        """Record what has been handed over, and end. Functions that TensorFlow has traced meanwhile fail later."""
        if self._queue is not None:
            with compat.eager_mode():
                self._queue.close()
            self._thread.join()
        self._file.close()

    def _record_queued(self) -> None:
        with compat.eager_mode():
            while True:
                try:
                    assert self._queue is not None
                    schema_index, points = self._queue.dequeue()
                except tf.errors.OpError:
                    # The queue has been closed.
                    return
                try:
                    self._file.add(self._schemas[int(schema_index)], points.numpy().tolist())
                except Exception:
                    # Any error is caught, since training must not wait for a queue that nobody empties.
                    _log.exception("rank %d: tracing ends here", self.rank)
                    self._file.close()


def _remove_surplus_traces(output: Path, world_size: int) -> None:
    """Remove the traces of ranks that only an earlier, larger job had."""
    for path in output.glob(f"rank*/{FILE}"):
        rank = path.parent.name[len("rank") :]
        if rank.isdecimal() and int(rank) >= world_size:
            path.unlink(missing_ok=True)


def running() -> Tracer | None:
    return current_component(Tracer)


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
    cluster = job.cluster
    timeout = environment.HCCL_CONNECT_TIMEOUT.get()
    measurer = cluster.neighbours[0]  # one rank of each host asks, since all have the same clock
    if measurer == 0:
        return 0.0, 0.0
    try:
        measurement = None
        if cluster.rank == measurer:
            # The fastest answer is the most exact: the comparison is wrong by half of the round trip at most.
            measurement = min(_ask(job, attempt, timeout) for attempt in range(_ROUNDS))
        measurements = job.control.gather_from(
            f"clock of {cluster.host}", measurement, cluster.neighbours, timeout
        )
        if measurements.get(measurer) is None:
            raise TimeoutError(f"rank {measurer} hasn't compared them")
    except (ClusterError, TimeoutError) as error:
        _log.warning(
            "rank %d: the clocks of the hosts could not be compared (%s); times of different hosts don't belong "
            "together in the trace. What to do: turn the trace on for all ranks.",
            cluster.rank,
            error,
        )
        return 0.0, None
    round_trip, offset = measurements[measurer]
    return offset * 1e6, round_trip / 2 * 1e6


def _ask(job: Job, attempt: int, timeout: float) -> tuple[float, float]:
    """Return how long rank 0 took to answer, and by how much its clock is ahead, in seconds."""
    asked = time.time()
    clock = job.health.ask("clock", [job.cluster.rank, attempt], [0], timeout).get(0)
    answered = time.time()
    if clock is None:
        raise TimeoutError("rank 0 doesn't answer")
    # The offset supposes that rank 0 has read its clock in the middle of the round trip.
    return answered - asked, clock - (asked + answered) / 2


# A step's inputs from outside; forward starts when they are there.
_INPUTS = ("Placeholder", "IteratorGetNext", "IteratorGetNextAsOptional", "OptionalGetValue")


def when(sources: Iterable) -> Any:
    """Return the time when tensors or operations, of this graph or one around it, are done: a float eagerly, a scalar
    in a graph.
    """
    if tf.executing_eagerly():
        return time.time()
    operations = [_operation(source) for source in sources]
    graph = tf.compat.v1.get_default_graph()
    # The operations may be in a graph around the one that is being built.
    if operations:
        graph = operations[0].graph
    return _read(operations, graph)


def reduced(gradient: Any) -> Any:
    """Return the time when the collective that makes a gradient was over, perhaps before a thread has made it."""
    end = None
    if not tf.executing_eagerly():
        end = end_of(_operation(gradient))
    if end is None:
        return when([gradient])
    return end


def forward_start(gradients: Sequence, name: str) -> Any:
    """Return the time when all inputs of a step with these gradients are there, or those of the operation with this
    name; ``UNKNOWN`` in eager mode.
    """
    # In eager mode, forward has run before anything was known of it.
    if tf.executing_eagerly():
        return UNKNOWN
    targets = [_operation(gradient) for gradient in gradients]
    graph = targets[0].graph
    named = _operation_named(graph, name)
    if named is not None:
        return _read([tensor.op for tensor in named.inputs], graph)
    leading = compat.walk(targets, compat.producers)
    inputs = [operation for operation in leading if operation.type in _INPUTS]
    return _read(inputs, graph)


def backward_end(gradients: Sequence, name: str) -> Any:
    """Return the time when the operation with this name has ended; ``UNKNOWN`` without one, and in eager mode."""
    if tf.executing_eagerly():
        return UNKNOWN
    named = _operation_named(_operation(gradients[0]).graph, name)
    if named is None:
        return UNKNOWN
    return when([named])


def _operation_named(graph: tf.Graph, name: str) -> tf.Operation | None:
    if not name:
        return None
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        _log.warning(
            "there is no operation %r in the traced step: the point is found as if no name were given",
            name,
        )
        return None


def _read(operations: Sequence[tf.Operation], graph: tf.Graph) -> tf.Tensor:
    with graph.as_default(), contextlib.ExitStack() as blocks:
        if getattr(graph, "building_function", False):
            # A block of control dependencies around the caller must not apply here.
            blocks.enter_context(tf.control_dependencies(None))
        blocks.enter_context(tf.control_dependencies(operations))
        point = tf.timestamp()
    compat.run_independently(point.op)
    return point


def _operation(source: Any) -> tf.Operation:
    """Return the operation that makes a tensor, in its own graph; not the input of a branch or loop."""
    if isinstance(source, tf.Operation):
        return source
    if isinstance(source, tf.IndexedSlices):
        source = source.values
    return origin(source).op


class TracedReduction:
    """The points of one iteration, while its gradients are reduced."""

    def __init__(self, tracer: Tracer, schema: PointSchema, points: Sequence) -> None:
        self._tracer = tracer
        self._schema = schema
        self._points = [*points]
        self.update_end: Any = UNKNOWN  # a point, with divided updates
        self._recording: tf.Operation | None = None  # the operation that records, in a session

    def segment(self, gradients: Sequence) -> None:
        """Note that a segment has been reduced to these tensors; in the order of the segments."""
        self._points.append(reduced(gradients[0]))

    def hand_over(self, end: Any = UNKNOWN) -> None:
        """Record the iteration; its end is a point of its own or the end of the last segment."""
        points = [*self._points, self.update_end, end]
        self._recording = self._tracer.hand_over(self._schema, points)

    def recorded_with(self, gradients: Sequence) -> list:
        """Return the gradients, bound to the recording: a session that fetches any of them records the iteration."""
        if self._recording is None:
            return list(gradients)
        with tf.control_dependencies([self._recording]):
            return [_identity(gradient) for gradient in gradients]


def _identity(gradient: Any) -> Any:
    if gradient is None:
        return None
    return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


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
    # Without a trace, and for a block within a block, there is nothing to record.
    if running() is None or _current.iteration is not None or not has_eager_mode:
        yield
        return
    open_iteration = _OpenIteration(compat.graph_being_built())
    _current.iteration = open_iteration
    earlier = len(_operations(open_iteration.graph))
    try:
        yield
    finally:
        _current.iteration = None
    if open_iteration.reduction is not None:
        # The iteration ends when all variables have been changed by what the block has added to the graph.
        added = _operations(open_iteration.graph)[earlier:]
        end = when([operation for operation in added if changes_a_variable(operation)])
        open_iteration.reduction.hand_over(end)


def mark_update_end(operations: Sequence[tf.Operation]) -> None:
    """Note that the update of this rank ends with some operations; what follows in the iteration sends new values."""
    current = _current.iteration
    if current is None or current.reduction is None:
        return
    if current.graph is compat.graph_being_built():
        current.reduction.update_end = when(operations)


def _operations(graph: tf.Graph | None) -> list[tf.Operation]:
    if graph is None:
        return []
    return list(graph.get_operations())


@contextlib.contextmanager
def traced_reduction(
    tracer: Tracer,
    gradients: Sequence,
    segments: Sequence[Sequence[int]],
    job: Job,
    group: Group,
    waits_for_all: bool,
    wire: tf.DType | None,
) -> Iterator[TracedReduction | None]:
    """Mark the block as the reduction of an iteration; yield what is told of each segment, None if there are none."""
    ordered = [gradients[position] for positions in segments for position in positions]
    if not ordered:
        yield None
        return
    records = [_gradient(gradient, wire) for gradient in ordered]
    ends = list(accumulate(map(len, segments)))
    trace = replace(
        tracer.head,
        model=model_of(records, [gradient.shape for gradient in ordered]),
        engine=engine_name(job, group, [gradient.dtype for gradient in ordered]),
        group=group.name,
        gradients=tuple(records),
        segments=tuple((low, high - 1) for low, high in zip([0, *ends], ends)),
    )
    schema = PointSchema(trace, waits_for_all)
    # In the order that PointSchema describes; the ends of segments follow.
    points = [
        forward_start(ordered, tracer.settings.fp_point),
        backward_end(ordered, tracer.settings.bp_point),
        *(when([gradient]) for gradient in ordered),
    ]
    reduction = TracedReduction(tracer, schema, points)
    yield reduction
    if _current.iteration is not None and _current.iteration.graph is compat.graph_being_built():
        # The block of ``iteration`` records the end.
        _current.iteration.reduction = reduction
    else:
        reduction.hand_over()


def changes_a_variable(operation: tf.Operation) -> bool:
    """Return whether an operation of a graph writes to a variable."""
    if not operation.op_def.is_stateful or operation.type.startswith("Read"):
        return False
    return any(tensor.dtype == tf.resource for tensor in operation.inputs)


def _gradient(gradient: Any, wire: tf.DType | None) -> GradientRecord:
    prefix = ""
    if isinstance(gradient, tf.IndexedSlices):
        prefix = "sparse "
        gradient = gradient.values
    name = ""
    if not tf.executing_eagerly():
        # TensorFlow prefixes what a tape makes; the rest of the name is the forward operation's.
        name = gradient.name.removeprefix("gradient_tape/").partition(":")[0]
    # The rows of a sparse gradient aren't known beforehand.
    count = gradient.shape.num_elements() or 0
    dtype = wire_dtype(gradient.dtype, wire)
    return GradientRecord(name, prefix + dtype.name, count * dtype.size)
