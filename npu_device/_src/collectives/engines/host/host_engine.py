"""The operations on arrays that Python moves: programs behind two TensorFlow operations.

In a tf.function each collective is a start, which passes the tensors' memory and never waits for other ranks, and a
finish, which waits. Starts run in the order of the program, also in loops, and so do finishes. Every rank starts in the
same order, so any number of threads suffices: the first operation that some rank hasn't started yet can't
be blocked by a finish. A list of segments is started as backward produces it and finished when all of it is started.

In eager mode both happen at once, without a TensorFlow operation.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, Protocol, Union

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.call import Agreement, Shapes, Terms
from npu_device._src.collectives.dtypes import reduced_dtype
from npu_device._src.collectives.engines.host import programs
from npu_device._src.collectives.engines.host.queue import Channel, HostQueue, PendingOperation, head_of
from npu_device._src.collectives.engines.host.stream import BufferPool, Stream
from npu_device._src.collectives.graph import Order, step_data
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

_LARGE = 1 << 30

Action = tuple[Callable[..., Any], list[np.ndarray]]
"""The action of an operation, and the arrays that it fills: in a group it makes a program, ``act(channel, head=...)``;
between two ranks a transfer.
"""


class OnArrays(NamedTuple):
    """One program, or one transfer, on arrays. It references no part of the graph in which it was made: what a graph
    calls lives as long as the graph.

    Attributes:
        outputs: what it returns.
        size: approximate bytes that each rank passes, as far as known.
        prepare: returns the action for the inputs as arrays, with memory for the results.
    """

    outputs: Sequence[tf.TensorSpec]
    size: int
    prepare: Callable[[list[np.ndarray], BufferPool], Action]


Finish = Callable[[], tuple[int, list[np.ndarray]]]
"""Waits for an operation; returns when it ended, in ns since the epoch, and its results. To be called once."""


class HostEngine:
    """An engine whose programs Python runs; see ``contract.Backend``.

    Args:
        connect: makes the channel of a group's members.
        background_from: the size in bytes from which an operation goes to the background thread if TensorFlow computes
            between its start and its finish.
    """

    def __init__(self, connect: Callable[[Job, Group], Channel], background_from: Callable[[Job], int]) -> None:
        self._connect, self._background_from = connect, background_from

    def all_reduce(
        self,
        agreement: Agreement,
        segments: Sequence[Sequence[tf.Tensor]],
        reduction: str,
        group: Group,
        wire: tf.DType | None,
    ) -> list[list[tf.Tensor]]:
        """Reduce segments to all ranks."""
        everybody = range(group.size)
        return self._run(
            agreement, group, [(_reduction(each, reduction, wire, everybody, group.rank), each) for each in segments]
        )

    def reduce(
        self, agreement: Agreement, tensors: Sequence[tf.Tensor], reduction: str, root: int, group: Group
    ) -> list[tf.Tensor]:
        """Reduce tensors of one dtype to the root."""
        operation = _reduction(tensors, reduction, None, [root], group.rank)
        [results] = self._run(agreement, group, [(operation, tensors)])
        return results or [tf.cast(tensor, reduced_dtype(tensor.dtype, reduction)) for tensor in tensors]

    def broadcast(self, agreement: Agreement, tensors: Sequence[tf.Tensor], root: int, group: Group) -> list[tf.Tensor]:
        """Return the root's tensors on every rank."""
        sends = group.rank == root
        known = all(tensor.shape.is_fully_defined() for tensor in tensors)
        inputs = tensors if sends or not known else []  # unknown shapes are those of the rank's own tensors
        [received] = self._run(agreement, group, [(_broadcast(tensors, root, sends), inputs)])
        return [tf.identity(tensor) for tensor in tensors] if sends else received

    def all_gather(self, agreement: Agreement, row: tf.Tensor, group: Group) -> tf.Tensor:
        """Return all ranks' rows on every rank: [n] in, [group.size, n] out."""
        return self._rows(agreement, programs.all_gather, row, group)

    def all_to_all(self, agreement: Agreement, rows: tf.Tensor, group: Group) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out."""
        return self._rows(agreement, programs.all_to_all, rows, group)

    def _rows(self, agreement: Agreement, program: Callable[..., Any], tensor: tf.Tensor, group: Group) -> tf.Tensor:
        def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
            [mine] = arrays
            result = buffers.array((size, mine.shape[-1]), mine.dtype)
            return partial(program, rows=mine, result=result), [result]

        size = group.size
        operation = OnArrays([tf.TensorSpec([size, tensor.shape[-1]], tensor.dtype)], bytes_of([tensor]), prepare)
        [[found]] = self._run(agreement, group, [(operation, [tensor])])
        return found

    def exchange_terms(self, agreement: Agreement, group: Group) -> list[tf.Tensor]:
        """Compare only the terms; return a tensor that is ready once all ranks agree."""
        action = programs.meet, [np.array(True)]
        operation = OnArrays([tf.TensorSpec([], tf.bool)], 0, lambda arrays, buffers: action)
        return self._run(agreement, group, [(operation, [])])[0]

    def _run(
        self, agreement: Agreement, group: Group, operations: Sequence[tuple[OnArrays, Sequence[tf.Tensor]]]
    ) -> list[list[tf.Tensor]]:
        job = agreement.job
        with job.making:
            calls = job.calls.get((self, group))
            if calls is None:
                connect = partial(self._connect, job, group)
                calls = job.calls[self, group] = GroupCalls(job, group, connect, self._background_from(job))
        return run(calls, agreement, operations)


# The operations: inputs, outputs, and how arrays become a program


def _reduction(
    tensors: Sequence[tf.Tensor], reduction: str, wire: tf.DType | None, readers: Sequence[int], rank: int
) -> OnArrays:
    dtype, gets = reduced_dtype(tensors[0].dtype, reduction), rank in readers
    travels, given = (np.dtype(kind.as_numpy_dtype) for kind in (wire or tensors[0].dtype, dtype))

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        stream = Stream([array.shape for array in arrays], travels, [array.reshape(-1) for array in arrays])
        flat, results = stream.results(buffers, given) if gets else (None, [])
        program = partial(
            programs.reduce, stream=stream, result=flat, dtype=given, reduction=reduction, readers=readers
        )
        return program, results

    outputs = [tf.TensorSpec(tensor.shape, dtype) for tensor in tensors] if gets else []
    return OnArrays(outputs, bytes_of(tensors), prepare)


def _broadcast(tensors: Sequence[tf.Tensor], root: int, sends: bool) -> OnArrays:
    """Pack all dtypes into one stream of bytes."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    dtypes = [np.dtype(spec.dtype.as_numpy_dtype) for spec in specs]

    def prepare(arrays: list[np.ndarray], buffers: BufferPool) -> Action:
        shapes = [array.shape for array in arrays] if arrays else [tuple(spec.shape.as_list()) for spec in specs]
        sizes = [(math.prod(shape) * dtype.itemsize,) for shape, dtype in zip(shapes, dtypes)]
        flats = [array.reshape(-1).view(np.uint8) for array in arrays] if sends else []
        stream = Stream(sizes, np.dtype(np.uint8), flats)
        flat, parts = (None, []) if sends else stream.results(buffers, stream.dtype)
        results = [part.view(dtype).reshape(shape) for part, dtype, shape in zip(parts, dtypes, shapes)]
        return partial(programs.broadcast, stream=stream, result=flat, root=root), results

    return OnArrays([] if sends else specs, bytes_of(specs), prepare)


def bytes_of(tensors: Sequence[Union[tf.Tensor, tf.TensorSpec]]) -> int:
    """Return the bytes of the tensors; one of unknown size counts as large."""
    sizes = (tensor.shape.num_elements() for tensor in tensors)
    return sum(_LARGE if size is None else size * tensor.dtype.size for size, tensor in zip(sizes, tensors))


# Their calls, eager and in graphs


class Calls(Protocol):
    """The operations of a group on this rank; see ``GroupCalls``.

    Attributes:
        in_order: each operation begins when the one before it has ended.
    """

    in_order: bool

    def start(
        self, operation: OnArrays, terms: Terms | None, shapes: int, arrays: list[np.ndarray], overlaps: bool
    ) -> Finish:
        """Start an operation without waiting for others, and return the function that finishes it."""

    def close(self) -> None:
        """Free its resources; later operations fail."""


class GroupCalls:
    """The operations of a group in which all members take part; see ``HostEngine`` for the arguments."""

    in_order = True

    def __init__(self, job: Job, group: Group, connect: Callable[[], Channel], background_from: int) -> None:
        self._queue = HostQueue(connect)
        self._watch = job.stall_watch.calls_of(group)
        self._buffers = job.buffers
        self._background_from = background_from

    def start(
        self, operation: OnArrays, terms: Terms | None, shapes: int, arrays: list[np.ndarray], overlaps: bool
    ) -> Finish:
        """Start an operation, and return the function that finishes it.

        Args:
            operation: the operation.
            terms: what the ranks have to compare with its first data, if anything.
            shapes: belongs to the terms.
            arrays: its inputs.
            overlaps: TensorFlow computes until it is finished.
        """
        act, results = operation.prepare(arrays, self._buffers)
        position = self._watch.begin(terms.row if terms else None)
        make = partial(act, head=head_of(terms, shapes))
        pending = PendingOperation(make, results, partial(refusal, terms, position))
        self._queue.start(pending, overlaps and operation.size > self._background_from)
        return partial(self._finish, pending)

    def _finish(self, pending: PendingOperation) -> tuple[int, list[np.ndarray]]:
        try:
            results: list[np.ndarray] = self._queue.finish(pending)
            return pending.ended_at, results
        finally:
            self._watch.end()

    def close(self) -> None:
        """Free its resources; later operations fail."""
        self._queue.close()


def refusal(terms: Terms | None, position: int) -> Exception:
    """Return the error for members whose calls differ."""
    if terms is None:
        return RuntimeError("the ranks of a group called different collectives")
    return terms.refuse(position)


class Orders:
    """The orders in which the starts and the finishes of a rank's graphs run, and what is between them.

    Args:
        device: this rank's CPU.
    """

    def __init__(self, device: str) -> None:
        self.starts = Order(device)
        self.finishes = Order(device)
        self.pending: dict[int, Finish] = {}
        self.tickets = itertools.count()


def run(
    calls: Calls, agreement: Agreement, operations: Sequence[tuple[OnArrays, Sequence[tf.Tensor]]]
) -> list[list[tf.Tensor]]:
    """Run operations on tensors, and return the results of each; the first one carries the agreement's terms."""
    job = agreement.job
    terms, shapes = agreement.take()
    all_terms = [terms] + [None] * (len(operations) - 1)
    if tf.executing_eagerly():
        found = []
        for (operation, inputs), terms in zip(operations, all_terms):
            finish = calls.start(operation, terms, int(shapes), list(map(compat.to_array, inputs)), False)
            found.append(list(map(_tensor, finish()[1])))
        return found
    device = job.device("CPU")
    with job.making:
        orders = job.orders = job.orders or Orders(device)
    with tf.device(device), tf.control_dependencies(step_data()):
        if len(operations) == 1 and calls.in_order:
            return [_call(calls, orders, *operations[0], terms, shapes)]
        tickets = [
            _start(calls, orders, operation, inputs, terms, shapes)
            for (operation, inputs), terms in zip(operations, all_terms)
        ]
    with tf.device(device), tf.control_dependencies(tickets):
        return [_finish(orders, operation, ticket) for (operation, _), ticket in zip(operations, tickets)]


def _tensor(array: np.ndarray) -> tf.Tensor:
    """Return an aligned array as a tensor, without a copy; numpy's own dtypes only."""
    if array.dtype.kind in "Vb" or array.size == 0:  # no bool in TensorFlow 2.15; can go with it
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _call(
    calls: Calls, orders: Orders, operation: OnArrays, inputs: Sequence[tf.Tensor], terms: Terms | None, shapes: Shapes
) -> list[tf.Tensor]:
    """Add one operation that starts and waits: a result needed at once needs no second one.

    It runs in the order of the starts: a rank that waits in it delays nothing that the others need first.
    """

    def run(shapes: Any, *arrays: np.ndarray) -> list[Any]:
        ended_at, results = calls.start(operation, terms, int(shapes), list(arrays), False)()
        return [np.int64(ended_at), *results]

    results = orders.starts.call(run, [tf.convert_to_tensor(shapes), *inputs], _dtypes(operation))
    return _waited_for(results, operation)


def _start(
    calls: Calls, orders: Orders, operation: OnArrays, inputs: Sequence[tf.Tensor], terms: Terms | None, shapes: Shapes
) -> tf.Tensor:
    """Add the starting operation; return a number by which the graph finishes it, int64, shape []."""

    def start(shapes: Any, *arrays: np.ndarray) -> list[np.int64]:
        ticket = next(orders.tickets)
        orders.pending[ticket] = calls.start(operation, terms, int(shapes), list(arrays), True)
        return [np.int64(ticket)]

    return orders.starts.call(start, [tf.convert_to_tensor(shapes), *inputs])[0]


def _finish(orders: Orders, operation: OnArrays, ticket: tf.Tensor) -> list[tf.Tensor]:
    """Add the waiting operation; return the results."""

    def finish(ticket: Any) -> list[Any]:
        ended_at, results = orders.pending.pop(int(ticket))()
        return [np.int64(ended_at), *results]

    return _waited_for(orders.finishes.call(finish, [ticket], _dtypes(operation)), operation)


def _dtypes(operation: OnArrays) -> list[tf.DType]:
    return [output.dtype for output in operation.outputs]


_waiting: weakref.WeakSet[tf.Operation] = weakref.WeakSet()


def _waited_for(results: list[tf.Tensor], operation: OnArrays) -> list[tf.Tensor]:
    _waiting.add(results[0].op)
    for tensor, output in zip(results[1:], operation.outputs):
        tensor.set_shape(output.shape)
    return results[1:]


def end_of(operation: tf.Operation) -> tf.Tensor | None:
    """Return when the collective that an operation of a graph waits for ended, possibly long before its results
    were needed: seconds since the epoch, float64, shape []. None for operations that aren't an engine's of this kind.
    """
    return tf.cast(operation.outputs[0], tf.float64) / 1e9 if operation in _waiting else None
