"""Horovod's operations on tensors: every rank gets the result, and results have the dtype of what was given.

Gradients are Horovod's, too, which averages where this package adds up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import ops
from npu_device._src.collectives.call import MismatchError
from npu_device._src.collectives.graph import differentiable
from npu_device._src.gradients.reduction import ReductionOptions
from npu_device._src.horovod.shared_arguments import described, with_effect
from npu_device._src.training.distribute import ascend_collectives
from npu_device._src.training.distribute.reduce_values import watch_reduction
from npu_device._src.training.opening.current_world import world

Average, Sum, Adasum, Min, Max, Product = range(6)
_KINDS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "prod"}
_LINEAR, _MEAN = ("mean", "sum"), ReductionOptions("mean")


class NoneCompressor:
    """Sends tensors as they are. Scripts may pass a class of their own with the same methods to ``allreduce``."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compressor(NoneCompressor):
    """Sends floating-point tensors in 16 bits. In sums and means they are added up in their own dtype."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype


class Compression:
    """The compressions that ``compression=`` takes."""

    none, fp16 = NoneCompressor, FP16Compressor


def kind_of(op: int | None, average: bool | None = None) -> str:
    """Return a reduction in this package's spelling; ``average`` is Horovod's older one."""
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    op = (Average if average in (None, True) else Sum) if op is None else op
    if op == Adasum:
        raise NotImplementedError(
            "Adasum isn't supported.\nWhat to do: pass op=hvd.Average, and multiply the learning rate by hvd.size()."
        )
    if op not in _KINDS:
        raise ValueError(f"op is {op!r}; expected one of hvd.Average, Sum, Min, Max and Product")
    return _KINDS[op]


def operation(call: Any) -> Any:
    """Let an operation take arguments without effect, and raise what Horovod raises when the ranks' calls differ."""

    @tf.autograph.experimental.do_not_convert
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
    tensors: Sequence[Any],
    average: bool | None = None,
    *,
    op: int | None = None,
    compression: Any = None,
    **factors: Any,
) -> list[Any]:
    """Return tensors that were reduced together. The rows of ``tf.IndexedSlices`` are gathered."""
    kind, ranks = kind_of(op, average), world()
    by_wire = "fp16" if compression is Compression.fp16 and kind in _LINEAR else None

    def reduced(sent: list[Any]) -> list[Any]:
        if ranks is None or not sent:
            return sent
        # A single tensor isn't cut by a split strategy, which is made for a model's gradients.
        options = ReductionOptions(kind, fusion=int(len(sent) > 1), compression=by_wire)
        found = ranks.reduce(sent, options)
        watch_reduction(ranks, list(tensors), sent, found, options)
        return found

    return _exchanged(tensors, kind, reduced, None if by_wire else compression, **factors)


def _exchanged(
    tensors: Sequence[Any],
    kind: str,
    exchange: Callable[[list[Any]], list[Any]],
    compression: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return what an exchange makes of tensors, which are scaled, and compressed unless sparse, in their dtypes."""
    compressor, sent, contexts = (
        compression or Compression.none,
        list(tensors),
        [None] * len(tensors),
    )
    dense = [place for place, each in enumerate(tensors) if not isinstance(each, tf.IndexedSlices)]
    if len(dense) < len(tensors) and not (
        kind in _LINEAR and prescale_factor == postscale_factor == 1.0
    ):
        raise NotImplementedError(
            "tf.IndexedSlices: only Sum and Average, without prescale and postscale factors"
        )
    for place in dense:
        sent[place], contexts[place] = compressor.compress(
            _times(compat.to_tensor(sent[place]), prescale_factor)
        )
    found = list(exchange(sent))
    for place in dense:  # whose mean of integers is an integer in Horovod
        same = tf.cast(found[place], sent[place].dtype)
        found[place] = _times(compressor.decompress(same, contexts[place]), postscale_factor)
    return found


def _times(value: tf.Tensor, factor: float) -> tf.Tensor:
    wide = (
        tf.float64
        if value.dtype.is_integer
        else tf.float32
        if value.dtype.size < 4
        else value.dtype
    )
    return (
        value
        if factor == 1.0
        else tf.cast(tf.cast(value, wide) * tf.cast(factor, wide), value.dtype)
    )


def _with_gradient(
    result: tf.Tensor, backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor
) -> tf.Tensor:
    """Return a result with Horovod's gradient for the tensor that it was made of, also in the graph of a session."""
    if not tensor.dtype.is_floating:
        return result
    # Scripts give a float32 gradient for float64, too.
    return differentiable(
        [result], lambda upstream: [backward(tf.cast(upstream, tensor.dtype))], [tensor]
    )[0]


@operation
def allgather(tensor: Any, name: str | None = None) -> Any:
    """Return all ranks' tensors one after the other along the first dimension."""
    ranks, tensor = world(), compat.to_tensor(tensor)
    if ranks is None:
        return tensor

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(tensor)[:1]
        first = tf.reduce_sum(allgather(rows)[: ranks.rank])
        return ranks.reduce([upstream], _MEAN)[0][first : first + rows[0]]

    return _with_gradient(ranks.gather(tensor), backward, tensor)


@operation
def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the tensor of the root."""
    ranks, tensor = world(), compat.to_tensor(tensor)
    if ranks is None:
        return tensor

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        return ranks.reduce([upstream], _MEAN)[0] * tf.cast(ranks.rank == root_rank, upstream.dtype)

    return _with_gradient(ranks.from_root([tensor], root_rank)[0], backward, tensor)


@operation
def alltoall(tensor: Any, splits: Any = None, name: str | None = None) -> Any:
    """Return the rows that all ranks send to this one, by rank; with ``splits`` also how many came from each."""
    ranks, tensor = world(), _with_rows("alltoall", tensor)
    count, problem = 1 if ranks is None else ranks.size, ""
    if splits is None:
        mine = tf.fill([count], tf.shape(tensor)[0] // count)
        if tensor.shape[0] is not None and tensor.shape[0] % count:
            problem = f"{tensor.shape[0]} rows can't be divided among {count} ranks; pass splits"
    else:
        mine = tf.cast(compat.to_tensor(splits), tf.int32)
        if mine.shape.rank != 1 or mine.shape[0] not in (count, None):
            problem = f"splits has shape {mine.shape}; expected one entry for each of {count} ranks"
    if problem:
        raise tf.errors.InvalidArgumentError(None, None, f"alltoall: {problem}")
    if ranks is None:
        return tensor if splits is None else (tensor, mine)
    # In a graph, nothing else compares the shapes of the rows.
    matrix = tf.reshape(
        ranks.gather(mine, f"alltoall of rows with shape {tensor.shape[1:]}"), [count, count]
    )
    row = tf.reduce_prod(tf.shape(tensor)[1:])
    flat = ascend_collectives.all_to_all_v_c(tf.reshape(tensor, [-1]), matrix * row, ranks.rank)
    received = matrix[:, ranks.rank]
    moved = tf.reshape(flat, tf.concat([[tf.reduce_sum(received)], tf.shape(tensor)[1:]], 0))
    result = _with_gradient(moved, lambda upstream: alltoall(upstream, received)[0], tensor)
    return result if splits is None else (result, received)


@operation
def reducescatter(tensor: Any, *, op: int = Average, **arguments: Any) -> Any:
    """Return the part of this rank in the first dimension of a reduced tensor; the first ranks may get a row more."""
    kind = kind_of(op)
    if kind not in _LINEAR:
        raise NotImplementedError("reducescatter knows Sum and Average")
    ranks, tensor = world(), _with_rows("reducescatter", tensor)

    def scattered(given: list[tf.Tensor]) -> list[tf.Tensor]:
        if ranks is None:
            return given
        [sent] = given
        rows = tf.shape(sent)[0] if sent.shape[0] is None else sent.shape[0]
        if isinstance(rows, int) and rows % ranks.size == 0:
            part = ops.reduce_scatter(ranks.job, sent, kind, ranks.group)
        else:
            each, more = rows // ranks.size, rows % ranks.size
            first = each * ranks.rank + tf.minimum(more, ranks.rank)
            whole = ops.all_reduce(ranks.job, sent, kind, ranks.group)
            part = whole[first : first + each + tf.cast(ranks.rank < more, tf.int32)]
        # The mean of the ranks' gradients, as if each rank had the whole result: not the gradient of the sum.
        factor = ranks.size if kind == "sum" else 1
        return [_with_gradient(part, lambda upstream: allgather(upstream * factor), sent)]

    return _exchanged([tensor], kind, scattered, **arguments)[0]


def _with_rows(operation: str, value: Any) -> tf.Tensor:
    tensor = compat.to_tensor(value)
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{operation} was given a scalar; expected a tensor whose first dimension is divided"
        )
    return tensor


def _of_each(call: Any) -> Callable[..., list[Any]]:
    def grouped(tensors: Sequence[Any], *rest: Any, **arguments: Any) -> list[Any]:
        """Return the result of the call without ``grouped_`` for each tensor."""
        return [call(each, *rest, **arguments) for each in tensors]

    grouped.__name__ = f"grouped_{call.__name__}"
    return described(grouped)


grouped_allgather, grouped_reducescatter = map(_of_each, (allgather, reducescatter))
