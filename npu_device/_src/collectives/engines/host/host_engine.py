"""The transfers that Python moves: rounds on arrays, behind two TensorFlow operations.

In a tf.function each segment of a list is a start, which passes the memory of its tensors and never waits for other
ranks, and a finish, which waits; a single transfer is one operation, but for send and receive. Starts run in the order
of the program, also in loops, and so do finishes. Every rank starts in the same order, so any number of threads
suffices: the first transfer that some rank hasn't started yet can't be blocked by a finish, nor by a single transfer,
which all ranks have begun. A list of segments is started as backward produces it, and finished when all of it has
started.

In eager mode both happen at once, without a TensorFlow operation.
"""

from __future__ import annotations

import itertools
import math
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, Protocol

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.call import AGREED, Terms, wrapped
from npu_device._src.collectives.dtypes import (
    ArrayList,
    TensorList,
    Tensors,
    TensorsOrSpecs,
    Wire,
    reduced_dtype,
)
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.engines.host import transfer_rounds
from npu_device._src.collectives.engines.host.buffers import BufferPool
from npu_device._src.collectives.engines.host.channel import Stream
from npu_device._src.collectives.engines.host.queue import ArrayTransfer, Finished, Prepared
from npu_device._src.collectives.graph import Order, step_data
from npu_device._src.collectives.group import Group, GroupTable


class GroupQueue(Protocol):
    """The transfers of a group on this rank, which have been started and not finished."""

    in_order: bool  # each begins when the one before it has ended

    def start(
        self, transfer: ArrayTransfer, terms: Terms, arrays: ArrayList, *, computes_meanwhile: bool
    ) -> Any:
        """Start a transfer without waiting for others; return what ``finish`` takes."""

    def finish(self, started: Any) -> Finished:
        """Wait for a transfer, and return its results; to be called once."""

    def close(self) -> None: ...


class ArrayEngine:
    """Transfers of groups, in eager mode and in graphs; ``queue_of`` makes the queue of a group at its first one."""

    def __init__(self, graph_orders: GraphOrders, queue_of: Callable[[Group], GroupQueue]) -> None:
        self._graph_orders = graph_orders
        self._queue_of = queue_of
        self.queues = GroupTable[GroupQueue]()

    def run(
        self,
        group: Group,
        transfers: Sequence[ArrayTransfer],
        inputs: Sequence[Tensors],
        terms: Terms,
    ) -> list[TensorList]:
        """Run transfers, each on its inputs, and return their results; the first one carries the terms."""
        queue = self.queues.of(group, self._queue_of)
        if not tf.executing_eagerly():
            return self._graph_orders.run(queue, transfers, inputs, terms)
        results = []
        for transfer, tensors in zip(transfers, inputs):
            arrays = list(map(compat.to_array, tensors))
            started = queue.start(transfer, terms, arrays, computes_meanwhile=False)
            _, received = queue.finish(started)
            results.append(list(map(_tensor, received)))
            terms = terms.of_later_transfers()
        return results

    def forget(self, name: str) -> None:
        """Close the queues of a group that is destroyed, and of the groups made for its calls."""
        # They leave the table before they are closed, which waits for transfers in progress.
        for queue in self.queues.forget(name).values():
            queue.close()


class HostEngine(ArrayEngine):
    """An engine whose transfers Python runs. Its methods tell what those of every engine do."""

    def all_reduce(
        self,
        segments: Sequence[Tensors],
        reduction: str,
        group: Group,
        wire: Wire,
        terms: Terms = AGREED,
        root: int | None = None,
    ) -> list[TensorList]:
        """Reduce segments, lists of tensors of one dtype; return the results of each, the same bits on every rank. With
        a root, only that rank gets them, and the others values of their shapes and dtype.

        A mean is over all ranks that the members stand for (``Group.counts``). float32 and float64 tensors are sent in
        the dtype ``wire``; sums are exact to float32 either way, and never infinite if the true sum is finite.
        """
        readers: Sequence[int] = range(group.size)
        if root is not None:
            readers = [root]
        reads = group.rank in readers
        rounds = partial(transfer_rounds.reduce, readers=readers)
        transfers = []
        for segment in segments:
            owned = range(len(segment) * reads)
            transfers.append(_reduction_transfer(segment, reduction, wire, owned, rounds))
        results = self.run(group, transfers, segments, terms)
        if reads:
            return results
        return [
            [tf.cast(tensor, reduced_dtype(tensor.dtype, reduction)) for tensor in segment]
            for segment in segments
        ]

    def reduce_to_owners(
        self,
        segments: Sequence[Tensors],
        owners: Sequence[Sequence[int]],
        reduction: str,
        group: Group,
        wire: Wire,
        terms: Terms = AGREED,
    ) -> list[TensorList]:
        """Reduce segments as ``all_reduce`` does; return those tensors of each that this member owns, in their order.
        ``owners`` has the owner of each tensor, a rank of the group.
        """
        transfers = []
        inputs = []
        for tensors, owners_there in zip(segments, owners):
            # What an owner gets is one piece of the stream.
            order = sorted(range(len(tensors)), key=owners_there.__getitem__)
            inputs.append([tensors[position] for position in order])
            ordered_owners = [owners_there[position] for position in order]
            firsts = [bisect_left(ordered_owners, member) for member in range(group.size + 1)]
            owned = range(firsts[group.rank], firsts[group.rank + 1])
            rounds = partial(transfer_rounds.reduce_to_owners, firsts=firsts)
            transfers.append(_reduction_transfer(inputs[-1], reduction, wire, owned, rounds))
        return self.run(group, transfers, inputs, terms)

    def broadcast(
        self, tensors: TensorsOrSpecs, owners: Sequence[int], group: Group, terms: Terms = AGREED
    ) -> TensorList:
        """Return all tensors on every rank, each from the member that owns it; any dtypes, the same shapes and dtypes
        everywhere. Of what other members own, a spec will do if it has all dimensions.
        """
        transfer, inputs, outputs = _broadcast_transfer(tensors, owners, group)
        [received] = self.run(group, [transfer], [[tensors[i] for i in inputs]], terms)
        results = list(tensors)
        for position, tensor in zip(outputs, received):
            results[position] = tensor
        return results

    def all_gather(self, row: tf.Tensor, group: Group, terms: Terms = AGREED) -> tf.Tensor:
        """Return all ranks' rows on every rank: [n] in, [group.size, n] out; n is the same on all ranks."""
        return self._rows(transfer_rounds.all_gather, row, group, terms)

    def all_to_all(self, rows: tf.Tensor, group: Group, terms: Terms = AGREED) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out."""
        return self._rows(transfer_rounds.all_to_all, rows, group, terms)

    def _rows(self, rounds: Callable, tensor: tf.Tensor, group: Group, terms: Terms) -> tf.Tensor:
        size = group.size

        def prepare(arrays: ArrayList, buffers: BufferPool) -> Prepared:
            # Allocated at the start: the arrays are known only then, and in a graph the shape may be dynamic.
            rows = buffers.array((size, arrays[0].shape[-1]), arrays[0].dtype)
            return partial(rounds, rows=arrays[0], result=rows), [rows]

        spec = tf.TensorSpec([size, tensor.shape[-1]], tensor.dtype)
        transfer = ArrayTransfer([spec], prepare)
        [[rows]] = self.run(group, [transfer], [[tensor]], terms)
        return rows

    def exchange_terms(self, group: Group, terms: Terms) -> TensorList:
        """Compare only the terms; return a list of one tensor, which is ready once all ranks agree."""
        meet = partial(transfer_rounds.meet, is_agreed=terms.agreed)
        prepared = (meet, [np.array(True)])
        transfer = ArrayTransfer([tf.TensorSpec([], tf.bool)], lambda arrays, buffers: prepared)
        [tensors] = self.run(group, [transfer], [[]], terms)
        return tensors


# The transfers: inputs, outputs, and how arrays become rounds


def _reduction_transfer(
    tensors: Tensors, reduction: str, wire: Wire, owned: range, rounds: Callable
) -> ArrayTransfer:
    """Return the reduction of tensors of which this member gets those that it owns, by the rounds of a reduction."""
    dtype = reduced_dtype(tensors[0].dtype, reduction)
    sent_dtype = np.dtype((wire or tensors[0].dtype).as_numpy_dtype)

    def prepare(arrays: ArrayList, buffers: BufferPool) -> Prepared:
        stream = Stream(list(map(np.shape, arrays)), sent_dtype, list(map(np.ravel, arrays)))
        flat, results = stream.results(buffers, np.dtype(dtype.as_numpy_dtype), owned)
        return partial(rounds, stream=stream, result=flat, reduction=reduction), results

    outputs = [tf.TensorSpec(tensors[position].shape, dtype) for position in owned]
    return ArrayTransfer(outputs, prepare)


def _broadcast_transfer(
    tensors: TensorsOrSpecs, owners: Sequence[int], group: Group
) -> tuple[ArrayTransfer, list[int], list[int]]:
    """Return the transfer, and the positions of its inputs and of its outputs among the tensors."""
    by_member = defaultdict[int, list[int]](list)
    for position, owner in enumerate(owners):
        by_member[owner].append(position)
    owned = by_member.pop(group.rank, [])
    outputs = [position for positions in by_member.values() for position in positions]
    # The rank's own tensors give the shapes where these are unknown. Otherwise a receiver has no inputs, so that it
    # doesn't wait for tensors that the result replaces.
    unknown = [i for i in outputs if not tensors[i].shape.is_fully_defined()]
    inputs = owned + unknown
    static_shapes = {i: tensors[i].shape.as_list() for i in outputs if i not in unknown}
    dtypes = [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in tensors]

    def prepare(arrays: ArrayList, buffers: BufferPool) -> Prepared:
        # As bytes, tensors of all dtypes of one owner are one stream.
        as_bytes = np.dtype(np.uint8)
        flats = [array.reshape(-1).view(as_bytes) for array in arrays[: len(owned)]]
        stream = Stream([flat.shape for flat in flats], as_bytes, flats)
        shapes = {**static_shapes, **dict(zip(inputs, map(np.shape, arrays)))}
        rows: ArrayList = [np.empty(0, as_bytes)] * group.size
        results = []
        for member, positions in by_member.items():
            sizes = [(math.prod(shapes[i]) * dtypes[i].itemsize,) for i in positions]
            rows[member], parts = Stream(sizes, as_bytes).results(buffers, as_bytes)
            for position, flat in zip(positions, parts):
                results.append(flat.view(dtypes[position]).reshape(shapes[position]))
        return partial(transfer_rounds.broadcast, stream=stream, results=rows), results

    specs = [tf.TensorSpec(tensors[i].shape, tensors[i].dtype) for i in outputs]
    return ArrayTransfer(specs, prepare), inputs, outputs


def _tensor(array: np.ndarray) -> tf.Tensor:
    """Return an aligned array as a tensor, without a copy; numpy's own dtypes only."""
    # DLPack takes no bfloat16 of numpy ("V"), and with TensorFlow 2.15 no bool: that can go with 2.15.
    if array.dtype.kind in "Vb" or array.size == 0:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


class GraphOrders:
    """The orders in which the starts and the finishes of a rank's graphs run, on its CPU, and what is between them."""

    def __init__(self, context: EngineContext) -> None:
        # Made at the first call in a graph: until then, TensorFlow's server may give this process another name.
        self._context = context
        self._device = ""
        self._starts: Order
        self._finishes: Order
        self._started: dict[int, Any] = {}
        self._tickets = itertools.count()

    def _prepare(self) -> None:
        with self._context.making:
            if not self._device:
                device = self._context.device("CPU")
                self._starts = Order(device)
                self._finishes = Order(device)
                self._device = device

    def run(
        self,
        queue: GroupQueue,
        transfers: Sequence[ArrayTransfer],
        inputs: Sequence[Tensors],
        terms: Terms,
    ) -> list[TensorList]:
        """Add transfers to the graph of a tf.function, and return their results."""
        self._prepare()
        with tf.device(self._device), tf.control_dependencies(step_data()):
            tickets: TensorList = []
            # All transfers start before the first is waited for, so that they travel together.
            for transfer, tensors in zip(transfers, inputs):
                arguments = [tf.convert_to_tensor(terms.dynamic_digest), *tensors]
                # What a graph calls must not refer to a tensor of it.
                start = partial(self._start, queue, transfer, terms._replace(dynamic_digest=0))
                if len(transfers) == 1 and queue.in_order:
                    # One operation starts and waits: only later transfers of the program wait for it.
                    start_and_finish = partial(self._start_and_finish, queue, start)
                    return [_waited_for(self._starts, start_and_finish, arguments, transfer)]
                tickets += self._starts.call(partial(self._start_only, start), arguments)
                terms = terms.of_later_transfers()
        with tf.device(self._device), tf.control_dependencies(tickets):
            return list(map(partial(self._finish, queue), transfers, tickets))

    def _start(
        self,
        queue: GroupQueue,
        transfer: ArrayTransfer,
        terms: Terms,
        computes_meanwhile: bool,
        dynamic_digest: Any,
        *arrays: np.ndarray,
    ) -> Any:
        # A rank that has stopped begins no transfer, even if the other members would come at once.
        self._context.health.require_running()
        # Both are parts of one number, which ranks that know other shapes while tracing cut in another way.
        terms = terms._replace(digest=wrapped(terms.digest + int(dynamic_digest)))
        return queue.start(transfer, terms, list(arrays), computes_meanwhile=computes_meanwhile)

    def _start_and_finish(self, queue: GroupQueue, start: Callable, *arrays: Any) -> list:
        return _of_graph(queue.finish(start(False, *arrays)))

    def _start_only(self, start: Callable, *arrays: Any) -> list[np.int64]:
        """Start a transfer, and return a number that stands for it: a graph carries only tensors."""
        ticket = next(self._tickets)
        self._started[ticket] = start(True, *arrays)
        return [np.int64(ticket)]

    def _finish(self, queue: GroupQueue, transfer: ArrayTransfer, ticket: tf.Tensor) -> TensorList:
        def finish(ticket: Any) -> list:
            # It is taken out of the table, or the results would live as long as this object.
            return _of_graph(queue.finish(self._started.pop(int(ticket))))

        return _waited_for(self._finishes, finish, [ticket], transfer)


def _of_graph(finished: Finished) -> list:
    """Return when a transfer ended, and its results, as a call of Python in a graph returns them."""
    ended_at, results = finished
    return [np.int64(ended_at), *results]


_waiting = weakref.WeakSet[tf.Operation]()


def _waited_for(
    order: Order, function: Callable[..., list], inputs: Tensors, transfer: ArrayTransfer
) -> TensorList:
    """Add a call that waits for a transfer, and returns when that ended, and its results."""
    dtypes = [output.dtype for output in transfer.outputs]
    ended_at, *results = order.call(function, inputs, dtypes)
    _waiting.add(ended_at.op)
    for tensor, output in zip(results, transfer.outputs):
        tensor.set_shape(output.shape)
    return results


def end_of(operation: tf.Operation) -> tf.Tensor | None:
    """Return when the transfer that an operation of a graph waits for ended: seconds since the epoch, float64, shape
    []. None for operations that wait for none.
    """
    if operation not in _waiting:
        return None
    return tf.cast(operation.outputs[0], tf.float64) / 1e9
