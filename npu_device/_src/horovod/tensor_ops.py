"""Horovod's operations on tensors: every rank gets the result, and results have the dtype of what was given.

Gradients are Horovod's, too, which averages where this package adds up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import moves, ops
from npu_device._src.collectives.call import MismatchError
from npu_device._src.collectives.dtypes import sum_dtype
from npu_device._src.collectives.graph import differentiable
from npu_device._src.gradients.reduction import ReductionOptions
from npu_device._src.horovod.shared_arguments import described, with_effect
from npu_device._src.training.distribute.reduce_values import watch_reduction
from npu_device._src.training.opening.current_world import current_world

# Horovod's numbers, which scripts may pass instead of the names.
Average, Sum, Adasum, Min, Max, Product = range(6)
_REDUCTIONS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "prod"}
_LINEAR = ("mean", "sum")
_MEAN = ReductionOptions("mean")


class NoneCompressor:
    """Sends tensors as they are. Scripts may pass a class of their own with the same methods to ``allreduce``."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        if context is None:
            return tensor
        return tf.cast(tensor, context)


class FP16Compressor(NoneCompressor):
    """Sends floating-point tensors in 16 bits. In sums and means they are added up in their own dtype."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        dtype = tensor.dtype
        if dtype.is_floating:
            tensor = tf.cast(tensor, tf.float16)
        return tensor, dtype


class Compression:
    """The compressions that ``compression=`` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor


def reduction_of_op(op: int | None, average: bool | None = None) -> str:
    """Return a reduction in this package's spelling; ``average`` is Horovod's older one."""
    if average is not None and op is not None:
        # Horovod's own text, which scripts may look for.
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is None:
        op = Average
        if average not in (None, True):
            op = Sum
    if op == Adasum:
        raise NotImplementedError(
            "Adasum isn't supported.\nWhat to do: pass op=hvd.Average, and multiply the learning rate by hvd.size()."
        )
    if op not in _REDUCTIONS:
        raise ValueError(f"op is {op!r}; expected one of hvd.Average, Sum, Min, Max and Product")
    return _REDUCTIONS[op]


def operation(call: Any) -> Any:
    """Let an operation take arguments without effect, and raise what Horovod raises when the ranks' calls differ."""

    @compat.do_not_convert
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **with_effect(kwargs))
        except MismatchError as error:
            raise tf.errors.FailedPreconditionError(None, None, str(error)) from error

    return described(run)


@described
def allreduce(tensor: Any, average: bool | None = None, **arguments: Any) -> Any:
    """Return a tensor reduced over all ranks, in its own dtype."""
    return grouped_allreduce([tensor], average, **arguments)[0]


@operation
def grouped_allreduce(
    tensors: Sequence,
    average: bool | None = None,
    *,
    op: int | None = None,
    compression: Any = None,
    **factors: Any,
) -> list:
    """Return tensors that were reduced together. The rows of ``tf.IndexedSlices`` are gathered."""
    reduction = reduction_of_op(op, average)
    world = current_world()
    # For a linear reduction, values are only sent in 16 bits, and added up in their own dtype.
    by_wire = None
    if compression is Compression.fp16 and reduction in _LINEAR:
        by_wire = "fp16"
        # The compressor has nothing left to do: values are rounded when they are sent, and the sum isn't.
        compression = None

    def reduced(sent: list) -> list:
        if world is None or not sent:
            return sent
        # A single tensor isn't cut by a split strategy, which is made for a model's gradients.
        options = ReductionOptions(reduction, fusion=int(len(sent) > 1), compression=by_wire)
        sums = world.reduce(sent, options)
        watch_reduction(world, list(tensors), sent, sums, options)
        return sums

    return _exchanged(tensors, reduction, reduced, compression, **factors)


def _exchanged(
    tensors: Sequence,
    reduction: str,
    exchange: Callable[[list], list],
    compression: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list:
    """Return what an exchange makes of tensors, which are scaled, and compressed unless sparse, in their dtypes."""
    compressor = compression or Compression.none
    sent = list(tensors)
    contexts = [None] * len(sent)
    dense = []
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, tf.IndexedSlices):
            dense.append(position)
    is_plain = reduction in _LINEAR and prescale_factor == postscale_factor == 1.0
    # Rows are gathered and added up only where they are used, so that no factor or other reduction applies to them.
    if len(dense) < len(sent) and not is_plain:
        raise NotImplementedError(
            "tf.IndexedSlices: only Sum and Average, without prescale and postscale factors"
        )
    for position in dense:
        scaled = _times(compat.to_tensor(sent[position]), prescale_factor)
        sent[position], contexts[position] = compressor.compress(scaled)
    received = list(exchange(sent))
    for position in dense:
        # A compressor of the script expects the dtype that it returned. A mean of integers is an integer in Horovod.
        tensor = tf.cast(received[position], sent[position].dtype)
        tensor = compressor.decompress(tensor, contexts[position])
        received[position] = _times(tensor, postscale_factor)
    return received


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    if factor == 1.0:
        return tensor
    # A factor that is an integer, or has 16 bits, would be rounded: the product is computed in a wide dtype.
    wide = sum_dtype(tensor.dtype)
    if wide.is_integer:
        wide = tf.float64
    product = tf.cast(tensor, wide) * tf.cast(factor, wide)
    return tf.cast(product, tensor.dtype)


def _with_gradient(
    output: tf.Tensor, backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor
) -> tf.Tensor:
    """Return a result with Horovod's gradient for the tensor that it was made of, also in the graph of a session."""
    if not tensor.dtype.is_floating:
        return output

    def back(upstream: tf.Tensor) -> list[tf.Tensor]:
        # Scripts give a float32 gradient for float64, too.
        return [backward(tf.cast(upstream, tensor.dtype))]

    return differentiable([output], back, [tensor])[0]


@operation
def allgather(tensor: Any, name: str | None = None) -> Any:
    """Return all ranks' tensors one after the other along the first dimension."""
    world = current_world()
    tensor = compat.to_tensor(tensor)
    if world is None:
        return tensor

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(tensor)[:1]
        # The rows of lower ranks come before the rows of this rank, and only the lower ranks know how many there are.
        start = tf.reduce_sum(allgather(rows)[: world.rank])
        [mean] = world.reduce([upstream], _MEAN)
        return mean[start : start + rows[0]]

    return _with_gradient(world.gather(tensor), backward, tensor)


@operation
def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the tensor of the root."""
    world = current_world()
    tensor = compat.to_tensor(tensor)
    if world is None:
        return tensor

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        [mean] = world.reduce([upstream], _MEAN)
        # The tensors of the other ranks have no part in the result.
        return mean * tf.cast(world.rank == root_rank, upstream.dtype)

    [received] = world.from_root([tensor], root_rank)
    return _with_gradient(received, backward, tensor)


@operation
def alltoall(tensor: Any, splits: Any = None, name: str | None = None) -> Any:
    """Return the rows that all ranks send to this one, by rank; with ``splits`` also how many came from each."""
    world = current_world()
    tensor = _with_rows("alltoall", tensor)
    count = 1
    if world is not None:
        count = world.size
    problem = ""
    if splits is None:
        rows = tf.shape(tensor)[0]
        sent = tf.fill([count], rows // count)
        reason = f"rows can't be divided among {count} ranks; pass splits"
        known_rows = moves.rows_of(tensor)
        if known_rows is None:
            # Checked where the graph runs, before anything is sent.
            check = tf.debugging.assert_equal(rows % count, 0, f"alltoall: {reason}")
            with tf.control_dependencies([check]):
                sent = tf.identity(sent)
        elif known_rows % count:
            problem = f"{known_rows} {reason}"
    else:
        sent = tf.cast(compat.to_tensor(splits), tf.int32)
        if not sent.shape.is_compatible_with([count]):
            problem = f"splits has shape {sent.shape}; expected one entry for each of {count} ranks"
    if problem:
        raise tf.errors.InvalidArgumentError(None, None, f"alltoall: {problem}")
    if world is None:
        if splits is None:
            return tensor
        return tensor, sent
    moved, received = moves.all_to_all_rows(world.job, tensor, sent, world.group)
    rows = _with_gradient(moved, lambda upstream: alltoall(upstream, received)[0], tensor)
    if splits is None:
        return rows
    return rows, received


@operation
def reducescatter(tensor: Any, *, op: int = Average, **arguments: Any) -> Any:
    """Return the part of this rank in the first dimension of a reduced tensor; the first ranks may get a row more."""
    reduction = reduction_of_op(op)
    if reduction not in _LINEAR:
        raise NotImplementedError("reducescatter knows Sum and Average")
    world = current_world()
    tensor = _with_rows("reducescatter", tensor)

    def scattered(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if world is None:
            return tensors
        [sent] = tensors
        own_rows = ops.reduce_scatter_v(world.job, sent, reduction, world.group)
        # The mean of the ranks' gradients, as if each rank had the whole result: not the gradient of the sum.
        factor = 1
        if reduction == "sum":
            factor = world.size
        return [_with_gradient(own_rows, lambda upstream: allgather(upstream * factor), sent)]

    return _exchanged([tensor], reduction, scattered, **arguments)[0]


def _with_rows(operation: str, tensor: Any) -> tf.Tensor:
    tensor = compat.to_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{operation} was given a scalar; expected a tensor whose first dimension is divided"
        )
    return tensor


def _grouped(call: Any) -> Callable[..., list]:
    def grouped(tensors: Sequence, *rest: Any, **arguments: Any) -> list:
        """Return the result of the call without ``grouped_`` for each tensor."""
        return [call(tensor, *rest, **arguments) for tensor in tensors]

    grouped.__name__ = f"grouped_{call.__name__}"
    return described(grouped)


grouped_allgather, grouped_reducescatter = map(_grouped, (allgather, reducescatter))
