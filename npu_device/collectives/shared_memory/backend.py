"""The calls of a backend on tensors: numpy programs behind two operations of TensorFlow's graph.

In a tf.function each collective is a start, which hands the tensors' memory over and never waits for other ranks, and a
finish, which waits. Starts run in the order of the program, also in loops, and so do finishes; every rank starts in the
same order, and therefore no number of threads is too small: the first operation that some rank hasn't started yet can't
be held up by a finish. A list of segments is started as backward produces it and finished when all of it is started.

In eager mode both happen at once, without an operation of TensorFlow's.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Union

import numpy as np
import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.dtypes import mean_dtype
from npu_device.collectives.group import Group
from npu_device.collectives.shared_memory import programs
from npu_device.collectives.shared_memory.buffers import BufferPool
from npu_device.collectives.shared_memory.channel import HEAD_WORDS, Waiting
from npu_device.collectives.shared_memory.connection import connect
from npu_device.collectives.shared_memory.engine import Engine, Job
from npu_device.collectives.shared_memory.stream import Stream
from npu_device.collectives.stall import local_watch_of

_LARGEST = (1 << 63) - 1

# From how many bytes on one of several jobs is handed to the background thread, so that it proceeds while TensorFlow
# computes.
_BACKGROUND_FROM_BYTES = 256 << 10


@dataclass(frozen=True)
class Terms:
    """What the ranks have to agree on before they read each other's data.

    Attributes:
        head: three 32-bit numbers that are the same on all ranks; the last one perhaps known at run time only.
        call: the call as the watch for stalls shows it.
        refuse: the error for ranks whose heads differ; it is given the position of the call in the group's sequence.
    """

    head: tuple[int, int, Union[int, tf.Tensor]]
    call: dict[str, Any]
    refuse: Callable[[int], Exception]


class _Pending(threading.local):
    terms: Terms | None = None


_pending = _Pending()


@contextmanager
def agreed(runtime: Runtime, group: Group, terms: Terms) -> Iterator[None]:
    """The first collective in the block carries the terms; if there is none, the ranks meet for them alone."""
    _pending.terms = terms
    try:
        yield
        if _pending.terms is not None:
            _run(runtime, group, _Operation([], [], 0, lambda _: _Plan(programs.meet, [])))
    finally:
        _pending.terms = None


def start_all_reduce(
    runtime: Runtime, segments: Sequence[Sequence[tf.Tensor]], reduction: str, group: Group, wire: tf.DType | None
) -> list[Callable[[], list[tf.Tensor]]]:
    """As ``collectives.backend.start_all_reduce``."""
    return _begin(runtime, group, [_reduction(segment, reduction, group, wire, None) for segment in segments])


def reduce(runtime: Runtime, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group) -> list[tf.Tensor]:
    """As ``collectives.backend.reduce``, of tensors of one dtype."""
    results = _run(runtime, group, _reduction(tensors, reduction, group, None, root))
    return results or [tf.cast(tensor, _result_dtype(tensor.dtype, reduction)) for tensor in tensors]


def broadcast(runtime: Runtime, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
    """As ``collectives.backend.broadcast``."""
    received = _run(runtime, group, _broadcast(tensors, tensors, root, group))
    return received if group.rank != root else [tf.identity(tensor) for tensor in tensors]


def receive(runtime: Runtime, like: tf.TensorSpec, root: int, group: Group) -> tf.Tensor:
    """As ``collectives.backend.receive``."""
    [received] = _run(runtime, group, _broadcast([], [like], root, group))
    return received


def all_gather(runtime: Runtime, row: tf.Tensor, group: Group) -> tf.Tensor:
    """As ``collectives.backend.all_gather``."""

    def plan(arrays: list[np.ndarray]) -> _Plan:
        result = _array((group.size, len(arrays[0])), arrays[0].dtype)
        return _Plan(partial(programs.all_gather, row=arrays[0], result=result), [result])

    shape = [group.size, *row.shape]
    [gathered] = _run(runtime, group, _Operation([row], [tf.TensorSpec(shape, row.dtype)], _bytes([row]), plan))
    return gathered


def all_to_all(runtime: Runtime, rows: tf.Tensor, group: Group) -> tf.Tensor:
    """As ``collectives.backend.all_to_all``."""

    def plan(arrays: list[np.ndarray]) -> _Plan:
        result = _array(arrays[0].shape, arrays[0].dtype)
        return _Plan(partial(programs.all_to_all, rows=arrays[0], result=result), [result])

    output = tf.TensorSpec(rows.shape, rows.dtype)
    [exchanged] = _run(runtime, group, _Operation([rows], [output], _bytes([rows]), plan))
    return exchanged


# What the calls are made of: inputs, outputs, and how arrays become a program.


@dataclass(frozen=True)
class _Plan:
    """A program, ``program(channel, head=...)``, and the arrays that it fills."""

    program: Callable[..., Waiting]
    results: list[np.ndarray]


@dataclass(frozen=True)
class _Operation:
    """One program on tensors.

    Attributes:
        inputs: the tensors whose memory it reads.
        outputs: what it makes.
        size: about how many bytes each rank hands over, as far as it is known.
        plan: given the inputs as arrays, the program (``program(channel, head=...)``) and the arrays of its results.
    """

    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.TensorSpec]
    size: int
    plan: Callable[[list[np.ndarray]], _Plan]


def _reduction(
    tensors: Sequence[tf.Tensor], reduction: str, group: Group, wire: tf.DType | None, root: int | None
) -> _Operation:
    dtype = _result_dtype(tensors[0].dtype, reduction)
    travels = np.dtype((wire or tensors[0].dtype).as_numpy_dtype)
    gets = root is None or group.rank == root

    def plan(arrays: list[np.ndarray]) -> _Plan:
        stream = Stream([array.shape for array in arrays], travels)
        flat, results = stream.results(_pool, np.dtype(dtype.as_numpy_dtype)) if gets else (None, [])
        program: Any = programs.all_reduce if root is None else programs.reduce
        flats = [array.reshape(-1) for array in arrays]
        return _Plan(partial(program, stream=stream, arrays=flats, result=flat, reduction=reduction), results)

    outputs = [tf.TensorSpec(tensor.shape, dtype) for tensor in tensors] if gets else []
    return _Operation(tensors, outputs, _bytes(tensors), plan)


def _broadcast(
    tensors: Sequence[tf.Tensor], likes: Sequence[Union[tf.Tensor, tf.TensorSpec]], root: int, group: Group
) -> _Operation:
    """All dtypes in one stream of bytes. Shapes that aren't known before are those of the rank's own tensors."""
    sends = group.rank == root
    specs = [tf.TensorSpec(like.shape, like.dtype) for like in likes]
    known = all(spec.shape.is_fully_defined() for spec in specs)
    dtypes = [np.dtype(spec.dtype.as_numpy_dtype) for spec in specs]

    def plan(arrays: list[np.ndarray]) -> _Plan:
        shapes = [array.shape for array in arrays] if arrays else [tuple(spec.shape.as_list()) for spec in specs]
        sizes = [(math.prod(shape) * dtype.itemsize,) for shape, dtype in zip(shapes, dtypes)]
        stream = Stream(sizes, np.dtype(np.uint8))
        flats = [array.reshape(-1).view(np.uint8) for array in arrays] if sends else []
        flat, parts = (None, []) if sends else stream.results(_pool, stream.dtype)
        results = [part.view(dtype).reshape(shape) for part, dtype, shape in zip(parts, dtypes, shapes)]
        return _Plan(partial(programs.broadcast, stream=stream, arrays=flats, result=flat, root=root), results)

    inputs = tensors if sends or not known else []
    return _Operation(inputs, [] if sends else specs, _bytes(specs), plan)


def _result_dtype(dtype: tf.DType, reduction: str) -> tf.DType:
    return mean_dtype(dtype) if reduction == "mean" else dtype


def _bytes(tensors: Sequence[Union[tf.Tensor, tf.TensorSpec]]) -> int:
    """Bytes of the tensors; one of unknown size may be a large one."""
    sizes = (tensor.shape.num_elements() for tensor in tensors)
    return sum(
        _BACKGROUND_FROM_BYTES if size is None else size * tensor.dtype.size for size, tensor in zip(sizes, tensors)
    )


_pool = BufferPool()


def _array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return _pool.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


# How they are run.


_tickets = itertools.count()


class _Line:
    """The jobs of one group on this rank."""

    def __init__(self, runtime: Runtime, group: Group) -> None:
        self._engine = Engine(lambda: connect(runtime, group))
        self._watch = local_watch_of(runtime, group)
        self._jobs: dict[int, Job] = {}

    def start(
        self, operation: _Operation, terms: Terms | None, arrays: list[np.ndarray], number: int, in_background: bool
    ) -> Job:
        """Begin an operation. ``number`` is the last one of the head."""
        plan = operation.plan(arrays)
        position = self._watch.begin(terms.call if terms else None)
        head = (*terms.head[:2], number, HEAD_WORDS) if terms else (0,) * HEAD_WORDS

        def refuse() -> Exception:
            return (terms or _NO_TERMS).refuse(position)

        job = Job(lambda channel: plan.program(channel, head=head), plan.results, refuse)
        self._engine.start(job, in_background)
        return job

    def finish(self, job: Job) -> list[np.ndarray]:
        """Wait for it."""
        try:
            results: list[np.ndarray] = self._engine.finish(job)
            return results
        finally:
            self._watch.end()

    def keep(self, job: Job) -> int:
        """A number by which a graph carries a job from its start to its finish."""
        ticket = next(_tickets)
        self._jobs[ticket] = job
        return ticket

    def kept(self, ticket: int) -> Job:
        """The job again."""
        return self._jobs.pop(ticket)


_NO_TERMS = Terms((0, 0, 0), {}, lambda _: RuntimeError("the ranks of a group called different collectives"))


_ends: weakref.WeakKeyDictionary[tf.Operation, tf.Tensor] = weakref.WeakKeyDictionary()


def end_of(operation: tf.Operation) -> tf.Tensor | None:
    """When a collective that an operation of a graph waits for was over, which may be long before somebody asked for
    its results: seconds since the epoch, float64, shape []. None for operations that aren't this backend's.
    """
    return _ends.get(operation)


class _Order:
    """Two variables that TensorFlow orders starts and finishes by."""

    def __init__(self, runtime: Runtime) -> None:
        with tf.init_scope(), tf.device(runtime.device("CPU")):
            self.starts, self.finishes = (_compat.plain_variable(tf.constant(0, tf.int64)) for _ in range(2))


_lines: weakref.WeakKeyDictionary[Runtime, dict[Group, _Line]] = weakref.WeakKeyDictionary()
_orders: weakref.WeakKeyDictionary[Runtime, _Order] = weakref.WeakKeyDictionary()


def _run(runtime: Runtime, group: Group, operation: _Operation) -> list[tf.Tensor]:
    """Run one operation of a group; its results."""
    [finish] = _begin(runtime, group, [operation])
    return finish()


def _begin(runtime: Runtime, group: Group, operations: Sequence[_Operation]) -> list[Callable[[], list[tf.Tensor]]]:
    """Start operations of a group; for each a function that finishes it and gives the results."""
    terms, _pending.terms = _pending.terms, None
    lines = _lines.setdefault(runtime, {})
    if group not in lines:
        lines[group] = _Line(runtime, group)
    line = lines[group]
    all_terms = [terms] + [None] * (len(operations) - 1)
    if tf.executing_eagerly():
        return [partial(_run_now, line, *both) for both in zip(operations, all_terms)]
    if runtime not in _orders:
        _orders[runtime] = _Order(runtime)
    order, device = _orders[runtime], runtime.device("CPU")
    with tf.device(device):
        # One operation is asked for its result at once; handing it to the background thread would cost time.
        several = len(operations) > 1
        tickets = [
            _start(line, order, operation, terms, several and operation.size > _BACKGROUND_FROM_BYTES)
            for operation, terms in zip(operations, all_terms)
        ]

    def finish(operation: _Operation, ticket: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(device), tf.control_dependencies(tickets):
            return _finish(line, order, operation, ticket)

    return [partial(finish, *both) for both in zip(operations, tickets)]


def _run_now(line: _Line, operation: _Operation, terms: Terms | None) -> list[tf.Tensor]:
    arrays = [np.asarray(tensor) for tensor in operation.inputs]
    job = line.start(operation, terms, arrays, int(terms.head[2]) if terms else 0, in_background=False)
    return [_tensor(result) for result in line.finish(job)]


def _tensor(array: np.ndarray) -> tf.Tensor:
    """An aligned array as a tensor, without a copy; numpy's own dtypes only."""
    if array.dtype.kind in "Vb" or array.size == 0:  # TensorFlow 2.15 takes no bool that way
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _start(line: _Line, order: _Order, operation: _Operation, terms: Terms | None, in_background: bool) -> tf.Tensor:
    """The operation that starts; its result, int64, shape []."""
    last = terms.head[2] if terms else 0

    @tf.autograph.experimental.do_not_convert
    def start(_: Any, last: Any, *arrays: np.ndarray) -> np.int64:
        return np.int64(line.keep(line.start(operation, terms, list(arrays), int(last), in_background)))

    return _in_turn(order.starts, start, [tf.convert_to_tensor(last), *operation.inputs], [tf.int64])[0]


def _finish(line: _Line, order: _Order, operation: _Operation, ticket: tf.Tensor) -> list[tf.Tensor]:
    """The operation that waits; the results."""

    @tf.autograph.experimental.do_not_convert
    def finish(_: Any, ticket: Any) -> list[np.ndarray]:
        job = line.kept(int(ticket))
        results = line.finish(job)
        return [ticket, np.float64(job.ended_at), *results]

    dtypes = [output.dtype for output in operation.outputs]
    _, ended, *results = _in_turn(order.finishes, finish, [ticket], [tf.int64, tf.float64, *dtypes])
    _ends[ended.op] = ended
    for tensor, output in zip(results, operation.outputs):
        tensor.set_shape(output.shape)
    return results


def _in_turn(
    turns: Any, function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """An operation that runs after all that were made with the same variable before, and is never left out.

    To TensorFlow it has no state, or it would be run in turn with everything else that has one. It takes its turn from
    the variable and gives it back with its first result, a number: what is connected by data can't be optimised away.
    """
    turn = tf.raw_ops.ResourceCountUpTo(resource=turns.handle, limit=_LARGEST, T=tf.int64)
    made = tf.numpy_function(function, [turn, *inputs], list(dtypes), stateful=False)
    turns.assign(made[0], read_value=False)
    return list(made)
