"""The operations on arrays that Python moves: programs behind two TensorFlow operations.

In a tf.function each segment of a list is a start, which passes the memory of its tensors and never waits for other
ranks, and a finish, which waits; a collective of one is a single call. Starts run in the order of the program, also in
loops, and so do finishes. Every rank starts in the same order, so any number of threads suffices: the first operation
that some rank hasn't started yet can't be blocked by a finish. A list of segments is started as backward produces it
and finished when all of it is started.

In eager mode both happen at once, without a TensorFlow operation.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Union

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.call import Agreement, Terms
from npu_device._src.collectives.dtypes import Tensors, Wire, reduced_dtype
from npu_device._src.collectives.engines.host import programs
from npu_device._src.collectives.engines.host.programs import Stream
from npu_device._src.collectives.engines.host.queue import BufferPool, Channel, Finish, HostQueue
from npu_device._src.collectives.graph import Order, step_data
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

if TYPE_CHECKING:
    from npu_device._src.collectives.engines.host.transfers import PairCalls

Action = tuple[Callable[..., Any], list[np.ndarray]]
"""The action of an operation, and the arrays that it fills: in a group it makes a program, ``act(channel, head=...)``;
between two ranks a transfer.
"""


class OnArrays(NamedTuple):
    """One program, or one transfer, on arrays: what it returns, and how it is made of the inputs. It references no part
    of the graph in which it was made: what a graph calls lives as long as the graph.
    """

    outputs: Sequence[tf.TensorSpec]
    prepare: Callable[[list[np.ndarray], BufferPool], Action]


Calls = Union[HostQueue, "PairCalls"]
"""The operations of a group on this rank."""


class ArrayEngine:
    """Operations of groups, in eager mode and in graphs; ``make`` makes the calls of a group at its first operation."""

    def __init__(self, make: Callable[[Job, Group], Calls]) -> None:
        self._make = make

    def run(
        self, agreement: Agreement, group: Group, operations: Sequence[OnArrays], inputs: Sequence[Tensors]
    ) -> list[list[tf.Tensor]]:
        """Run operations, each on its inputs, and return their results; the first one carries the agreement's terms."""
        job = agreement.job
        with job.making:
            calls = job.calls.get((self, group))
            if calls is None:
                calls = job.calls[self, group] = self._make(job, group)
        terms = agreement.take()
        if not tf.executing_eagerly():
            with job.making:
                orders = job.orders = job.orders or Orders(job.device("CPU"))
            return orders.run(calls, operations, inputs, terms)
        found = []
        for operation, tensors in zip(operations, inputs):
            finish = calls.start(operation, terms, list(map(compat.to_array, tensors)), False)
            found.append(list(map(_tensor, finish()[1])))
            terms = None
        return found


class HostEngine(ArrayEngine):
    """An engine whose programs Python runs; see ``engines.Backend``, and for ``background_from`` ``HostQueue``."""

    def __init__(self, connect: Callable[[Job, Group], Channel], background_from: Callable[[Job], int]) -> None:
        def make(job: Job, group: Group) -> HostQueue:
            count = job.stall_watch.calls_of(group)
            return HostQueue(partial(connect, job, group), count, job.buffers, background_from(job))

        super().__init__(make)

    def all_reduce(
        self, agreement: Agreement, segments: Sequence[Tensors], reduction: str, group: Group, wire: Wire
    ) -> list[list[tf.Tensor]]:
        make = partial(_reduction, reduction=reduction, wire=wire, readers=range(group.size), rank=group.rank)
        return self.run(agreement, group, list(map(make, segments)), segments)

    def reduce(
        self, agreement: Agreement, tensors: Tensors, reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        operation = _reduction(tensors, reduction, None, [root], group.rank)
        [results] = self.run(agreement, group, [operation], [tensors])
        return results or [tf.cast(tensor, reduced_dtype(tensor.dtype, reduction)) for tensor in tensors]

    def broadcast(self, agreement: Agreement, tensors: Tensors, root: int, group: Group) -> list[tf.Tensor]:
        sends = group.rank == root
        known = all(tensor.shape.is_fully_defined() for tensor in tensors)
        inputs = tensors if sends or not known else []  # unknown shapes are those of the rank's own tensors
        [received] = self.run(agreement, group, [_broadcast(tensors, root, sends)], [inputs])
        return [tf.identity(tensor) for tensor in tensors] if sends else received

    def all_gather(self, agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
        return self._rows(agreement, programs.all_gather, row, group)

    def all_to_all(self, agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
        return self._rows(agreement, programs.all_to_all, rows, group)

    def _rows(self, agreement: Agreement, program: Callable[..., Any], tensor: tf.Tensor, group: Group) -> tf.Tensor:
        size = group.size

        def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
            result = buffers.array((size, arrays[0].shape[-1]), arrays[0].dtype)
            return partial(program, rows=arrays[0], result=result), [result]

        operation = OnArrays([tf.TensorSpec([size, tensor.shape[-1]], tensor.dtype)], prepare)
        [[found]] = self.run(agreement, group, [operation], [[tensor]])
        return found

    def exchange_terms(self, agreement: Agreement, group: Group) -> list[tf.Tensor]:
        """Compare only the terms; return a list of one tensor, which is ready once all ranks agree."""
        action = programs.meet, [np.array(True)]
        operation = OnArrays([tf.TensorSpec([], tf.bool)], lambda arrays, buffers: action)
        return self.run(agreement, group, [operation], [[]])[0]


# The operations: inputs, outputs, and how arrays become a program


def _reduction(tensors: Tensors, reduction: str, wire: Wire, readers: Sequence[int], rank: int) -> OnArrays:
    dtype, gets = reduced_dtype(tensors[0].dtype, reduction), rank in readers
    travels, given = np.dtype((wire or tensors[0].dtype).as_numpy_dtype), np.dtype(dtype.as_numpy_dtype)

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        stream = Stream(list(map(np.shape, arrays)), travels, list(map(np.ravel, arrays)))
        flat, results = stream.results(buffers, given) if gets else (None, [])
        program = partial(
            programs.reduce, stream=stream, result=flat, dtype=given, reduction=reduction, readers=readers
        )
        return program, results

    outputs = [tf.TensorSpec(tensor.shape, dtype) for tensor in tensors] if gets else []
    return OnArrays(outputs, prepare)


def _broadcast(tensors: Tensors, root: int, sends: bool) -> OnArrays:
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    dtypes = [np.dtype(spec.dtype.as_numpy_dtype) for spec in specs]

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        shapes = [array.shape for array in arrays] if arrays else [tuple(spec.shape.as_list()) for spec in specs]
        sizes = [(math.prod(shape) * dtype.itemsize,) for shape, dtype in zip(shapes, dtypes)]
        flats = [array.reshape(-1).view(np.uint8) for array in arrays] if sends else []
        stream = Stream(sizes, np.dtype(np.uint8), flats)  # of all dtypes
        flat, parts = (None, []) if sends else stream.results(buffers, stream.dtype)
        results = [part.view(dtype).reshape(shape) for part, dtype, shape in zip(parts, dtypes, shapes)]
        return partial(programs.broadcast, stream=stream, result=flat, root=root), results

    return OnArrays([] if sends else specs, prepare)


def _tensor(array: np.ndarray) -> tf.Tensor:
    """Return an aligned array as a tensor, without a copy; numpy's own dtypes only."""
    if array.dtype.kind in "Vb" or array.size == 0:  # no bool in TensorFlow 2.15; can go with it
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


class Orders:
    """The orders in which the starts and the finishes of a rank's graphs run, on its CPU, and what is between them."""

    def __init__(self, device: str) -> None:
        self._device, self._starts, self._finishes = device, Order(device), Order(device)
        self._pending: dict[int, Finish] = {}
        self._tickets = itertools.count()

    def run(
        self, calls: Calls, operations: Sequence[OnArrays], inputs: Sequence[Tensors], terms: Terms | None
    ) -> list[list[tf.Tensor]]:
        """Add operations to the graph of a tf.function, and return their results."""
        with tf.device(self._device), tf.control_dependencies(step_data()):
            if len(operations) == 1 and calls.in_order:
                return [self._call(calls, operations[0], inputs[0], terms)]
            tickets = []
            for operation, tensors in zip(operations, inputs):
                tickets.append(self._start(calls, operation, tensors, terms))
                terms = None
        with tf.device(self._device), tf.control_dependencies(tickets):
            return list(map(self._finish, operations, tickets))

    def _call(self, calls: Calls, operation: OnArrays, inputs: Tensors, terms: Terms | None) -> list[tf.Tensor]:
        """Add one operation that starts and waits, in the order of the starts: it delays nothing needed earlier."""
        shapes, terms = _apart(terms)

        def run(shapes: Any, *arrays: np.ndarray) -> list[Any]:
            ended_at, results = calls.start(operation, _together(terms, shapes), list(arrays), False)()
            return [np.int64(ended_at), *results]

        return _waited_for(self._starts, run, [shapes, *inputs], operation)

    def _start(self, calls: Calls, operation: OnArrays, inputs: Tensors, terms: Terms | None) -> tf.Tensor:
        """Add the operation that starts; return a number by which the graph finishes it."""
        shapes, terms = _apart(terms)

        def start(shapes: Any, *arrays: np.ndarray) -> list[np.int64]:
            ticket = next(self._tickets)
            self._pending[ticket] = calls.start(operation, _together(terms, shapes), list(arrays), True)
            return [np.int64(ticket)]

        return self._starts.call(start, [shapes, *inputs])[0]

    def _finish(self, operation: OnArrays, ticket: tf.Tensor) -> list[tf.Tensor]:
        def finish(ticket: Any) -> list[Any]:
            ended_at, results = self._pending.pop(int(ticket))()
            return [np.int64(ended_at), *results]

        return _waited_for(self._finishes, finish, [ticket], operation)


def _apart(terms: Terms | None) -> tuple[tf.Tensor, Terms | None]:
    """Return the shapes, an input of the graph's call of Python, and terms that refer to nothing of the graph."""
    return tf.convert_to_tensor(terms.shapes if terms else 0), terms and terms._replace(shapes=0)


def _together(terms: Terms | None, shapes: Any) -> Terms | None:
    return terms and terms._replace(shapes=int(shapes))


_waiting: weakref.WeakSet[tf.Operation] = weakref.WeakSet()


def _waited_for(
    order: Order, function: Callable[..., list[Any]], inputs: Tensors, operation: OnArrays
) -> list[tf.Tensor]:
    """Add a call that waits for an operation, and returns when that ended, and its results."""
    ended_at, *results = order.call(function, inputs, [output.dtype for output in operation.outputs])
    _waiting.add(ended_at.op)
    for tensor, output in zip(results, operation.outputs):
        tensor.set_shape(output.shape)
    return results


def end_of(operation: tf.Operation) -> tf.Tensor | None:
    """Return when the collective that an operation of a graph waits for ended: seconds since the epoch, float64, shape
    []. None for operations that aren't an engine's of this kind.
    """
    return tf.cast(operation.outputs[0], tf.float64) / 1e9 if operation in _waiting else None
