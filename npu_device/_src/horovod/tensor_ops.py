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
from npu_device._src.gradients.sparse import with_values
from npu_device._src.training import hccl_ops
from npu_device._src.training.reduce_values import watch_reduction
from npu_device._src.training.world import World, world

Average, Sum, Adasum, Min, Max, Product = range(6)
_KINDS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "prod"}
_NO_EFFECT = {
    *("name", "device", "device_dense", "device_sparse", "ignore_name_scope", "inplace", "session", "process_set"),
    # A mean doesn't depend on where it is divided, and the split strategy groups the gradients.
    *("gradient_predivide_factor", "use_locking", "num_groups", "groups", "scale_local_gradients"),
}


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


def wire_of(compression: Any) -> str | None:
    """Return a compression of gradients in this package's spelling; raise TypeError for one of the script's own."""
    if compression in (None, NoneCompressor, FP16Compressor):
        return "fp16" if compression is FP16Compressor else None
    raise TypeError(
        f"compression is {compression!r}; gradients travel with Compression.none or Compression.fp16.\n"
        "What to do: call hvd.allreduce(gradient, compression=...), which takes any compressor."
    )


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


def with_effect(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that aren't names, devices and the like; raise NotImplementedError for a process set."""
    if arguments.get("process_set") is not None:
        raise NotImplementedError(
            "process sets aren't supported.\nWhat to do: leave process_set out, or make a group with "
            "hccl.manage.api.create_group and call npu.distribute.all_reduce(..., group=...)."
        )
    return {name: value for name, value in arguments.items() if name not in _NO_EFFECT}


def operation(call: Any) -> Any:
    """Let an operation take arguments without effect, and raise what Horovod raises when the ranks' calls differ."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **with_effect(kwargs))
        except MismatchError as error:
            raise tf.errors.FailedPreconditionError(None, None, str(error)) from error

    return run


def allreduce(tensor: Any, average: bool | None = None, **arguments: Any) -> Any:
    """Reduce a tensor, variable, array, number or ``tf.IndexedSlices`` over all ranks; see ``grouped_allreduce``.

    Args:
        tensor: the tensor; on every rank the same shape and dtype.
        average, arguments: as in ``grouped_allreduce``.

    Returns:
        The result, in the dtype of the tensor.

    Raises:
        tf.errors.FailedPreconditionError: the calls of the ranks don't fit each other.
        NotImplementedError: a process set, and what ``grouped_allreduce`` doesn't support.
        RuntimeError: another rank has failed or left, or the job can't be joined any more.
    """
    return grouped_allreduce([tensor], average, **arguments)[0]


@operation
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    *,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce several tensors together.

    Args:
        tensors: as in ``allreduce``. The rows of ``tf.IndexedSlices`` are gathered.
        average: older spelling of ``op``.
        compression: what travels.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: multiply the tensors before, and the results.

    Returns:
        The results, in the dtypes of the tensors.

    Raises:
        NotImplementedError: Adasum; factors, or others than sum and mean, with ``tf.IndexedSlices``.
    """
    kind = kind_of(op, average)
    is_linear, are_sparse = kind in ("mean", "sum"), [isinstance(each, tf.IndexedSlices) for each in tensors]
    if any(are_sparse) and not (is_linear and prescale_factor == postscale_factor == 1.0):
        raise NotImplementedError("tf.IndexedSlices: only Sum and Average, without prescale and postscale factors")
    ranks = world()
    by_wire = "fp16" if compression is Compression.fp16 and is_linear else None
    compressor: Any = Compression.none if by_wire else compression
    sent, contexts = list(tensors), [None] * len(tensors)
    for place, each in enumerate(tensors):
        if not are_sparse[place]:
            sent[place], contexts[place] = compressor.compress(_times(compat.to_tensor(each), prescale_factor))
    if ranks is not None and sent:
        # A single tensor isn't cut by a split strategy, which is made for a model's gradients.
        options = ReductionOptions(kind, fusion=int(len(sent) > 1), compression=by_wire, adds_rows=False)
        reduced = ranks.reduce(sent, options)
        watch_reduction(ranks, list(tensors), sent, reduced, options)
        sent = list(map(_in_dtype_of, sent, reduced))
    for place, each in enumerate(sent):
        if not are_sparse[place]:
            sent[place] = _times(compressor.decompress(each, contexts[place]), postscale_factor)
    return sent


def _times(value: tf.Tensor, factor: float) -> tf.Tensor:
    wide = tf.float64 if value.dtype.is_integer else tf.float32 if value.dtype.size < 4 else value.dtype
    return value if factor == 1.0 else tf.cast(tf.cast(value, wide) * tf.cast(factor, wide), value.dtype)


def _in_dtype_of(value: Any, result: Any) -> Any:
    """Return a result in the dtype of what was given: the mean of integers is an integer in Horovod."""
    return with_values(result, lambda values: tf.cast(values, value.dtype))


def _with_gradient(result: tf.Tensor, backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """Return a result with Horovod's gradient for the tensor that it was made of, also in the graph of a session."""
    if not tensor.dtype.is_floating:
        return result
    # Scripts give a float32 gradient for float64, too.
    return differentiable([result], lambda upstream: [backward(tf.cast(upstream, tensor.dtype))], [tensor])[0]


def _mean(ranks: World, gradient: tf.Tensor) -> Any:
    return ranks.reduce([gradient], ReductionOptions("mean"))[0]


@operation
def allgather(tensor: Any, name: str | None = None) -> Any:
    """Return all ranks' tensors one after the other along the first dimension, which may differ among the ranks.

    Args:
        tensor: the same shape on every rank but for the first dimension.
        name: ignored.

    Raises:
        RuntimeError: and other errors, as in ``allreduce``.
    """
    ranks, tensor = world(), compat.to_tensor(tensor)
    if ranks is None:
        return tensor

    def backward(upstream: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(tensor)[:1]
        first = tf.reduce_sum(allgather(rows)[: ranks.rank])
        return _mean(ranks, upstream)[first : first + rows[0]]

    return _with_gradient(ranks.gather(tensor), backward, tensor)


def grouped_allgather(tensors: Sequence[Any], *arguments: Any, **options: Any) -> list[Any]:
    """Return the result of ``allgather`` for each of several tensors.

    Args:
        tensors, arguments, options: as there.
    """
    return [allgather(each, *arguments, **options) for each in tensors]


@operation
def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the tensor of the root, which has the same shape and dtype on every rank.

    Args:
        tensor: the tensor.
        root_rank: the rank that sends.
        name: ignored.

    Raises:
        RuntimeError: and other errors, as in ``allreduce``.
    """
    ranks, tensor = world(), compat.to_tensor(tensor)
    if ranks is None:
        return tensor
    return _with_gradient(
        ranks.from_root([tensor], root_rank)[0],
        lambda upstream: _mean(ranks, upstream) * tf.cast(ranks.rank == root_rank, upstream.dtype),
        tensor,
    )


@operation
def alltoall(tensor: Any, splits: Any = None, name: str | None = None) -> Any:
    """Send a part of the first dimension to each rank: as many rows as ``splits`` says, or the same number. Return the
    parts from rank 0, 1, … one after the other; with ``splits`` also how many rows came from each rank.

    Args:
        tensor: the rows to send.
        splits: number of rows for each rank; default: the same number for each.
        name: ignored.

    Returns:
        The received rows; with ``splits`` also how many came from each rank.

    Raises:
        tf.errors.InvalidArgumentError: rows that can't be divided evenly, or ``splits`` of another shape.
        ValueError: a scalar.
    """
    ranks, tensor = world(), _with_rows("alltoall", tensor)
    count = 1 if ranks is None else ranks.size
    if splits is None:
        if tensor.shape[0] is not None and tensor.shape[0] % count:
            problem = f"alltoall: {tensor.shape[0]} rows can't be divided among {count} ranks; pass splits"
            raise tf.errors.InvalidArgumentError(None, None, problem)
        mine = tf.fill([count], tf.shape(tensor)[0] // count)
    else:
        mine = tf.cast(compat.to_tensor(splits), tf.int32)
        if mine.shape.rank != 1 or mine.shape[0] not in (count, None):
            problem = f"alltoall: splits has shape {mine.shape}; expected one entry for each of {count} ranks"
            raise tf.errors.InvalidArgumentError(None, None, problem)
    if ranks is None:
        return tensor if splits is None else (tensor, mine)
    # In a graph, nothing else compares the shapes of the rows.
    matrix = tf.reshape(ranks.gather(mine, f"alltoall of rows with shape {tensor.shape[1:]}"), [count, count])
    row = tf.reduce_prod(tf.shape(tensor)[1:])
    flat = hccl_ops.all_to_all_v_c(tf.reshape(tensor, [-1]), matrix * row, ranks.rank)
    received = matrix[:, ranks.rank]
    moved = tf.reshape(flat, tf.concat([[tf.reduce_sum(received)], tf.shape(tensor)[1:]], 0))
    result = _with_gradient(moved, lambda upstream: alltoall(upstream, received)[0], tensor)
    return result if splits is None else (result, received)


@operation
def reducescatter(
    tensor: Any,
    *,
    compression: Any = Compression.none,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks, and return the part of this rank in the first dimension; the first ranks get
    a row more if it can't be divided evenly.

    Args:
        tensor: the tensor; its first dimension is divided.
        op: ``Average`` (default) or ``Sum``.
        compression, prescale_factor, postscale_factor: as in ``grouped_allreduce``.

    Returns:
        The rows of this rank.

    Raises:
        ValueError: a scalar.
        NotImplementedError: another reduction.
    """
    kind = kind_of(op)
    if kind not in ("mean", "sum"):
        raise NotImplementedError("reducescatter knows Sum and Average")
    ranks, tensor = world(), _with_rows("reducescatter", tensor)
    sent, context = compression.compress(_times(tensor, prescale_factor))
    if ranks is not None:
        given = sent
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
        sent = _with_gradient(_in_dtype_of(given, part), lambda upstream: allgather(upstream * factor), given)
    return _times(compression.decompress(sent, context), postscale_factor)


def _with_rows(operation: str, value: Any) -> tf.Tensor:
    tensor = compat.to_tensor(value)
    if tensor.shape.rank == 0:
        raise ValueError(f"{operation} was given a scalar; expected a tensor whose first dimension is divided")
    return tensor


def grouped_reducescatter(tensors: Sequence[Any], **arguments: Any) -> list[Any]:
    """Return the result of ``reducescatter`` for each of several tensors.

    Args:
        tensors, arguments: as there.

    Raises:
        ValueError, NotImplementedError: as there.
    """
    return [reducescatter(each, **arguments) for each in tensors]
