"""The engine of one call: it moves the data of a collective, and its first transfer carries what the ranks compare.

The ranks compare a fingerprint of the call: in shared memory with the first data, between hosts in a message before it,
with which small data travel. A list of gradients takes one comparison; the one in a message depends on no gradient and
ends long before backward produces the first one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Callable, Optional

import tensorflow as tf

from npu_device._src.collectives.call import AGREED, Terms
from npu_device._src.collectives.dtypes import TensorList, Tensors, TensorsOrSpecs, Wire, wire_dtype
from npu_device._src.collectives.engines.engines import Engine, Engines, TwoLevelEngine
from npu_device._src.collectives.engines.host.host_engine import HostEngine
from npu_device._src.collectives.engines.host.sockets import fits
from npu_device._src.collectives.engines.tensorflow.engine import rounded
from npu_device._src.collectives.graph import after_all, differentiable
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job


class Route(enum.Enum):
    """How the ranks compare a call, the same on every rank."""

    WITH_DATA = enum.auto()  # with the first data; not at all, if the ranks have agreed before
    IN_MESSAGE = enum.auto()  # in the message in which the data travel, since they are small
    BEFORE_DATA = enum.auto()  # in a message before the data move


class AgreedEngine:
    """The engine of one call, as the body of a collective uses it.

    Attributes:
        terms: what the next transfer has to compare; after the first one only what tells the call from others.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        terms: Terms = AGREED,
        route: Route | tf.Tensor = Route.WITH_DATA,
    ) -> None:
        self.job = job
        self.group = group
        self.terms = terms
        self._route = route

    def all_reduce(
        self, segments: Sequence[Tensors], reduction: str, wire: Wire = None
    ) -> list[TensorList]:
        """Reduce segments, each of one dtype, as soon as its own tensors are ready. Return the results in the same
        lists, as ``ops.all_reduce`` gives them, and differentiable like those. float32 and float64 may be sent in the
        dtype ``wire``.
        """
        gradient_engine = self._for_gradients()

        def backward(*upstream: tf.Tensor) -> TensorList:
            require_differentiable("all_reduce", reduction)
            # The gradient goes through the same method, so that second derivatives work.
            return gradient_engine.all_reduce([upstream], reduction, wire)[0]

        results: list[TensorList] = [[]] * len(segments)
        for sent_dtype, positions, lists in self._by_engine_call(segments, wire):
            engine = self._engine(lists[0][0].dtype)
            terms = self._next_terms()
            reduced = engine.all_reduce(lists, reduction, self.group, sent_dtype, terms)
            for position, tensors in zip(positions, reduced):
                results[position] = tensors
                # Each segment gets its gradient by itself: its results can be used while others are still in progress.
                if segments[position][0].dtype.is_floating:
                    results[position] = differentiable(tensors, backward, segments[position])
        return results

    def reduce_to_owners(
        self,
        segments: Sequence[Tensors],
        owners: Sequence[Sequence[int]],
        reduction: str,
        wire: Wire = None,
    ) -> list[list[Optional[tf.Tensor]]]:
        """Reduce segments as ``all_reduce`` does, and return the results in the same lists: what this rank owns,
        and None for the others. The results have no gradient. ``owners`` are ranks of the group; see ``has_owners``.
        """
        results = []
        for segment in segments:
            results.append([None] * len(segment))
        for sent_dtype, positions, lists in self._by_engine_call(segments, wire):
            owners_there = [owners[position] for position in positions]
            engine = self._engine(lists[0][0].dtype)
            assert isinstance(engine, (HostEngine, TwoLevelEngine)), "the caller asks has_owners"
            terms = self._next_terms()
            reduced = engine.reduce_to_owners(
                lists, owners_there, reduction, self.group, sent_dtype, terms
            )
            for position, owned in zip(positions, reduced):
                # The engine returns only what this rank owns, in the order of the tensors.
                remaining = iter(owned)
                for index, owner in enumerate(owners[position]):
                    if owner == self.group.rank:
                        results[position][index] = next(remaining)
        return results

    def _by_engine_call(
        self, segments: Sequence[Tensors], wire: Wire
    ) -> Iterator[tuple[Wire, list[int], list[Tensors]]]:
        """Generate what travels in one call of an engine: the dtype in which it is sent, None for its own, and the
        positions of the segments, and those.
        """
        by_call: dict[tuple[Wire, bool], list[int]] = {}
        for position, segment in enumerate(segments):
            dtype = segment[0].dtype
            sent_dtype = None
            if wire_dtype(dtype, wire) == wire:
                sent_dtype = wire
            by_call.setdefault((sent_dtype, self.job.hosts.uses_nccl(dtype)), []).append(position)
        for (sent_dtype, _), positions in by_call.items():
            yield sent_dtype, positions, [segments[position] for position in positions]

    def reduce(self, tensor: tf.Tensor, reduction: str, root: int) -> tf.Tensor:
        """Reduce a tensor to one rank; the other ranks get any values of the result's shape and dtype."""
        engine = self._engine(tensor.dtype)
        terms = self._next_terms()
        return engine.all_reduce([[tensor]], reduction, self.group, None, terms, root)[0][0]

    def broadcast(self, tensors: TensorsOrSpecs, owners: Sequence[int]) -> TensorList:
        """Return all tensors, of any dtypes, on every rank, each from the rank of the group that owns it. Of what
        others own, the spec will do if it has all dimensions.
        """
        # Tensors of all dtypes travel as bytes, by the engine for integers, since NCCL takes no bytes.
        return self._engine(tf.int32).broadcast(tensors, owners, self.group, self._next_terms())

    def gather(self, row: tf.Tensor) -> tf.Tensor:
        """Return all ranks' rows on every rank: [1, n] in, [group.size, n] out; n is the same on all ranks."""
        engine = self._engine_of_rows(row.dtype)
        gathered = engine.all_gather(row[0], self.group, self._next_terms())
        gradient_engine = self._for_gradients()

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            # Each rank's row has gone to all ranks, so its gradient is the sum of theirs.
            return tf.reduce_sum(gradient_engine.exchange(upstream), axis=0, keepdims=True)

        return differentiable_move(gathered, backward, row)

    def exchange(self, rows: tf.Tensor) -> tf.Tensor:
        """Send row i to rank i, and return the row from rank i as row i: [group.size, n] in and out; n is the same on
        all ranks.
        """
        engine = self._engine_of_rows(rows.dtype)
        received = engine.all_to_all(rows, self.group, self._next_terms())
        return differentiable_move(received, self._for_gradients().exchange, rows)

    def send(self, tensor: tf.Tensor) -> tf.Tensor:
        """Send to the other rank of a pair; return a tensor that is ready once the other rank has received."""
        return self.job.engines.pairs.send(tensor, self.group, self._next_terms())

    def receive(self, spec: tf.TensorSpec) -> tf.Tensor:
        """Return the tensor that the other rank of a pair sends."""
        return self.job.engines.pairs.receive(spec, self.group, self._next_terms())

    def row_length(self, dtype: tf.DType, longest: tf.Tensor) -> tf.Tensor:
        """Return to how many elements rows of different lengths are padded, given the longest; the same on every rank.

        TensorFlow's engine remembers each length forever, so it gets few.
        """
        engines = self.job.engines
        if engines.engine_for_rows(self.group, dtype) is engines.tensorflow:
            return rounded(longest)
        # Other engines keep nothing by length, and would only send more padding.
        return longest

    def compare(self) -> Sequence[tf.Tensor]:
        """Compare the terms by themselves; return tensors that are ready once all ranks agree."""
        engines = self.job.engines
        comparing = engines.messages
        if self.job.hosts.number_of(self.group.ranks) == 1:
            comparing = engines.shared_memory
        return comparing.exchange_terms(self.group, self._next_terms())

    def _engine(self, dtype: tf.DType) -> Any:
        return self._on_route(self.job.engines.engine_for_tensors(self.group, dtype))

    def _engine_of_rows(self, dtype: tf.DType) -> Any:
        return self._on_route(self.job.engines.engine_for_rows(self.group, dtype))

    def _on_route(self, engine: Engine) -> Any:
        """Return what moves the data of the call, which is an engine, or has the methods of one."""
        engines = self.job.engines
        if isinstance(self._route, tf.Tensor):
            return _EngineBySize(self._route, engines, engine)
        if self._route is Route.IN_MESSAGE:
            return engines.messages
        return engine

    def _for_gradients(self) -> AgreedEngine:
        """Return the engine for gradients of the call, on which the ranks agree with the call itself. It doesn't hold
        the terms, which refer to the graph.
        """
        return AgreedEngine(self.job, self.group)

    def _next_terms(self) -> Terms:
        terms = self.terms
        self.terms = terms.of_later_transfers()
        return terms


# The routes of calls between hosts


def route_of(
    job: Job, group: Group, tensors: Sequence, is_ragged: bool, has_owners: bool = False
) -> Route | tf.Tensor:
    """Return the route of a call. Where only the running graph knows it, a tensor: True for ``IN_MESSAGE``, False for
    ``BEFORE_DATA``.

    ``has_owners``: each rank sends data of another size, which a message can't take.
    """
    # None has no dtype: it stands for a gradient that a rank doesn't have.
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    uses_nccl = any(map(job.hosts.uses_nccl, dtypes))
    is_one_host = job.hosts.number_of(group.ranks) == 1
    # A send and its receive compare on their own connection.
    if group.tag is not None or (is_one_host and not uses_nccl):
        return Route.WITH_DATA
    is_dense = all(isinstance(tensor, (tf.Tensor, tf.TensorSpec)) for tensor in tensors)
    if uses_nccl or is_ragged or has_owners or not is_dense:
        return Route.BEFORE_DATA
    # Small data between hosts travels in the message that compares, and needs no second one.
    is_small = fits(job, group.size, tensors)
    if isinstance(is_small, tf.Tensor):
        return is_small
    if is_small:
        return Route.IN_MESSAGE
    return Route.BEFORE_DATA


class _EngineBySize:
    """Moves data in the message that compares the call, if they are small, and else after that message, by an engine.
    Only the running graph knows which.
    """

    def __init__(self, is_small: tf.Tensor, engines: Engines, engine: Engine) -> None:
        self._is_small = is_small
        self._messages = engines.messages
        self._engine = engine

    def all_reduce(
        self,
        segments: Sequence[Tensors],
        reduction: str,
        group: Group,
        wire: Wire,
        terms: Terms,
        root: int | None = None,
    ) -> Any:
        def move(engine: Any, terms: Terms) -> Any:
            return engine.all_reduce(segments, reduction, group, wire, terms, root)

        return self._move(move, group, terms)

    def broadcast(
        self, tensors: TensorsOrSpecs, owners: Sequence[int], group: Group, terms: Terms
    ) -> Any:
        def move(engine: Any, terms: Terms) -> Any:
            return engine.broadcast(tensors, owners, group, terms)

        return self._move(move, group, terms)

    def all_gather(self, row: tf.Tensor, group: Group, terms: Terms) -> Any:
        return self._move(lambda engine, terms: engine.all_gather(row, group, terms), group, terms)

    def all_to_all(self, rows: tf.Tensor, group: Group, terms: Terms) -> Any:
        return self._move(lambda engine, terms: engine.all_to_all(rows, group, terms), group, terms)

    def _move(self, move: Callable[[Any, Terms], Any], group: Group, terms: Terms) -> Any:
        def after_message() -> Any:
            comparison: TensorList = []
            # Only the first transfer compares, as where the size is known: the ranks count their messages.
            if not terms.agreed:
                comparison = self._messages.exchange_terms(group, terms)
            with tf.control_dependencies(comparison):
                return move(self._engine, terms.of_later_transfers())

        def in_message() -> Any:
            return move(self._messages, terms)

        return tf.cond(
            self._is_small, partial(after_all, in_message), partial(after_all, after_message)
        )


# Gradients


def require_differentiable(collective: str, reduction: str) -> None:
    """Raise LookupError if a reduction has no gradient."""
    if reduction not in ("sum", "mean"):
        raise LookupError(
            f"{collective} has no gradient for reduction {reduction!r}; it is differentiable for 'sum' and 'mean'"
        )


def differentiable_move(
    moved: tf.Tensor, backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor
) -> tf.Tensor:
    """Return ``moved`` with the gradient ``backward(incoming gradient)`` for ``tensor``, of which it was made. Integers
    and other discrete values have no gradient.
    """
    # Unlike reductions, moves have gradients of complex numbers, too.
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return moved
    return differentiable([moved], lambda upstream: [backward(upstream)], [tensor])[0]
