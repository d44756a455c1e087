"""Run a group's operations: the queue behind them, and the functions that a graph calls.

An operation says which arrays go in, which come out, and what to do with them once they are ready. It references no
part of the graph in which it was made: what a graph calls lives as long as the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.call import Agreement, Shapes, Terms
from npu_device._src.collectives.engines.host.queue import Channel, HostQueue, PendingOperation, head_of
from npu_device._src.collectives.graph import Order, step_data
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job

Action = tuple[Callable[..., Any], list[np.ndarray]]
"""The action of an operation, and the arrays that it fills: in a group it makes a program, ``act(channel, head=...)``;
between two ranks a transfer.
"""


class Operation(NamedTuple):
    """One program, or one transfer, on tensors.

    Attributes:
        outputs: what it returns.
        size: approximate bytes that each rank passes, as far as known.
        prepare: returns the action for the inputs as arrays.
    """

    outputs: Sequence[tf.TensorSpec]
    size: int
    prepare: Callable[[list[np.ndarray]], Action]


OnTensors = tuple[Operation, Sequence[tf.Tensor]]
"""An operation and its inputs."""

Finish = Callable[[], tuple[int, list[np.ndarray]]]
"""Waits for an operation; returns when it ended, in ns since the epoch, and its results. To be called once."""


class GroupCalls:
    """The operations of a group in which all members take part.

    Args:
        job: the job.
        group: the group.
        connect: makes the members' channel.
        background_from: the size in bytes from which an operation goes to the background thread if TensorFlow computes
            between its start and its finish.

    Attributes:
        in_order: each operation begins when the one before it has ended.
    """

    in_order = True

    def __init__(self, job: Job, group: Group, connect: Callable[[], Channel], background_from: int) -> None:
        self._engine = HostQueue(connect)
        self._watch = job.stall_watch.calls_of(group)
        self._background_from = background_from

    def start(
        self, operation: Operation, terms: Terms | None, shapes: int, arrays: list[np.ndarray], overlaps: bool
    ) -> Finish:
        """Start an operation without waiting for others, and return the function that finishes it; a long one
        continues in the background.

        Args:
            operation: the operation.
            terms: what the ranks compare with it, if they haven't agreed yet.
            shapes: belongs to the terms.
            arrays: the inputs.
            overlaps: TensorFlow computes between start and finish.
        """
        act, results = operation.prepare(arrays)
        position = self._watch.begin(terms.row if terms else None)
        head = head_of(terms, shapes)
        pending = PendingOperation(lambda channel: act(channel, head=head), results, partial(refusal, terms, position))
        self._engine.start(pending, overlaps and operation.size > self._background_from)
        return partial(self._finish, pending)

    def _finish(self, pending: PendingOperation) -> tuple[int, list[np.ndarray]]:
        try:
            results: list[np.ndarray] = self._engine.finish(pending)
            return pending.ended_at, results
        finally:
            self._watch.end()

    def close(self) -> None:
        """Free its resources; later operations fail."""
        self._engine.close()


class Calls(Protocol):
    """The operations of a group on this rank; see ``GroupCalls``.

    Attributes:
        in_order: each operation begins when the one before it has ended.
    """

    in_order: bool

    def start(
        self, operation: Operation, terms: Terms | None, shapes: int, arrays: list[np.ndarray], overlaps: bool
    ) -> Finish:
        """Start an operation without waiting for others, and return the function that finishes it."""

    def close(self) -> None:
        """Free its resources; later operations fail."""


def refusal(terms: Terms | None, position: int) -> Exception:
    """Return the error for members whose calls differ."""
    if terms is None:
        return RuntimeError("the ranks of a group called different collectives")
    return terms.refuse(position)


class AllCalls:
    """The calls of all groups on one engine.

    Args:
        make: makes the calls of a group, at its first operation.
    """

    def __init__(self, make: Callable[[Job, Group], Calls]) -> None:
        self._make = make

    def run(self, agreement: Agreement, group: Group, operations: Sequence[OnTensors]) -> list[list[tf.Tensor]]:
        """Run operations of a group, and return the results of each; the first one carries the agreement's terms."""
        job = agreement.job
        calls, (terms, shapes) = self._of(job, group), agreement.take()
        all_terms = [terms] + [None] * (len(operations) - 1)
        if tf.executing_eagerly():
            found = []
            for (operation, inputs), terms in zip(operations, all_terms):
                finish = calls.start(operation, terms, int(shapes), list(map(compat.to_array, inputs)), False)
                found.append(list(map(_tensor, finish()[1])))
            return found
        orders, device = _orders_of(job), job.device("CPU")
        with tf.device(device), tf.control_dependencies(step_data()):
            if len(operations) == 1 and calls.in_order:
                return [_call(calls, orders, *operations[0], terms, shapes)]
            tickets = [
                _start(calls, orders, operation, inputs, terms, shapes)
                for (operation, inputs), terms in zip(operations, all_terms)
            ]
        with tf.device(device), tf.control_dependencies(tickets):
            return [_finish(orders, operation, ticket) for (operation, _), ticket in zip(operations, tickets)]

    def _of(self, job: Job, group: Group) -> Calls:
        """Return the calls of a group, made at its first use."""
        with job.making:
            if (self, group) not in job.calls:
                job.calls[self, group] = self._make(job, group)
            return job.calls[self, group]


class Orders:
    """The orders in which the starts and the finishes of a rank's graphs run.

    Args:
        device: this rank's CPU.
    """

    def __init__(self, device: str) -> None:
        self.starts = Order(device)
        self.finishes = Order(device)


def _orders_of(job: Job) -> Orders:
    with job.making:
        if job.orders is None:
            job.orders = Orders(job.device("CPU"))
        return job.orders


def _tensor(array: np.ndarray) -> tf.Tensor:
    """Return an aligned array as a tensor, without a copy; numpy's own dtypes only."""
    if array.dtype.kind in "Vb" or array.size == 0:  # no bool in TensorFlow 2.15; can go with it
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _call(
    calls: Calls, orders: Orders, operation: Operation, inputs: Sequence[tf.Tensor], terms: Terms | None, shapes: Shapes
) -> list[tf.Tensor]:
    """Add one operation that starts and waits: a result needed at once needs no second one.

    It runs in the order of the starts: a rank that waits in it delays nothing that the others need first.
    """

    def run(shapes: Any, *arrays: np.ndarray) -> list[Any]:
        ended_at, results = calls.start(operation, terms, int(shapes), list(arrays), False)()
        return [np.int64(ended_at), *results]

    results = orders.starts.call(run, [tf.convert_to_tensor(shapes), *inputs], _dtypes(operation))
    return _waited_for(results, operation)


_tickets = itertools.count()
_pending: dict[int, Finish] = {}


def _start(
    calls: Calls, orders: Orders, operation: Operation, inputs: Sequence[tf.Tensor], terms: Terms | None, shapes: Shapes
) -> tf.Tensor:
    """Add the starting operation; return a number by which the graph finishes it, int64, shape []."""

    def start(shapes: Any, *arrays: np.ndarray) -> list[np.int64]:
        ticket = next(_tickets)
        _pending[ticket] = calls.start(operation, terms, int(shapes), list(arrays), True)
        return [np.int64(ticket)]

    return orders.starts.call(start, [tf.convert_to_tensor(shapes), *inputs])[0]


def _finish(orders: Orders, operation: Operation, ticket: tf.Tensor) -> list[tf.Tensor]:
    """Add the waiting operation; return the results."""

    def finish(ticket: Any) -> list[Any]:
        ended_at, results = _pending.pop(int(ticket))()
        return [np.int64(ended_at), *results]

    return _waited_for(orders.finishes.call(finish, [ticket], _dtypes(operation)), operation)


def _dtypes(operation: Operation) -> list[tf.DType]:
    return [output.dtype for output in operation.outputs]


_waiting: weakref.WeakSet[tf.Operation] = weakref.WeakSet()


def _waited_for(results: list[tf.Tensor], operation: Operation) -> list[tf.Tensor]:
    _waiting.add(results[0].op)
    for tensor, output in zip(results[1:], operation.outputs):
        tensor.set_shape(output.shape)
    return results[1:]


def end_of(operation: tf.Operation) -> tf.Tensor | None:
    """Return when the collective that an operation of a graph waits for ended, possibly long before its results
    were needed: seconds since the epoch, float64, shape []. None for operations that aren't this backend's.
    """
    return tf.cast(operation.outputs[0], tf.float64) / 1e9 if operation in _waiting else None
