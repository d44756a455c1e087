"""The collectives that combine or spread tensors: all_reduce, reduce, reduce_scatter, broadcast, barrier.

Each function checks a call, makes its ``Collective`` (what the ranks compare, the results' specs, and the body) and
runs it; every rank of the group calls it. A body moves all its data through the engine of the call, so that the ranks
agree once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Callable

import tensorflow as tf

from npu_device._src.collectives import moves
from npu_device._src.collectives.agreed_engine import (
    AgreedEngine,
    differentiable_move,
    require_differentiable,
)
from npu_device._src.collectives.collective import Collective
from npu_device._src.collectives.dtypes import (
    REDUCED,
    TensorList,
    TensorsOrSpecs,
    fold,
    reduced_dtype,
    require_bits,
)
from npu_device._src.collectives.graph import differentiable
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.moves import require_member

REDUCTIONS = ("sum", "mean", "min", "max", "prod")


def all_reduce(job: Job, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Reduce one dense tensor (``dtypes.REDUCED``) over a group; its shape is the same on every rank.

    For ``hccl_ops`` and training code; ``npu.distribute.all_reduce`` and gradients go through ``reduce_list``.

    The mean of integers is floating-point (float32 for 8 and 16 bits, float64 otherwise), as with ``tf.divide``. 16-bit
    floats are combined in float32 and rounded once. Sum and mean of floating-point tensors are differentiable: the
    gradient is the sum, or the mean, of all ranks' incoming gradient.
    """
    require_reduction("all_reduce", tensor.dtype, reduction)

    def gradient(upstream: Sequence[tf.Tensor]) -> TensorList:
        require_differentiable("all_reduce", reduction)
        return [all_reduce(job, upstream[0], reduction, group)]

    def body(engine: AgreedEngine, tensor: tf.Tensor) -> tf.Tensor:
        return engine.all_reduce([[tensor]], reduction)[0][0]

    result_specs = _reduced_spec(tensor, reduction)
    details = {"reduction": reduction}
    collective = Collective(
        "all_reduce", group, [tensor], body, None, result_specs, details, gradient=gradient
    )
    return collective.run(job)


def reduce(job: Job, tensor: tf.Tensor, reduction: str, root_rank: int, group: Group) -> tf.Tensor:
    """Reduce one dense tensor over a group to its root; the arguments are those of ``all_reduce``.

    The root gets what ``all_reduce`` gives, the others zeros of the same shape and dtype, so that a value without
    meaning can't be mistaken for a result. Sum and mean of floating-point tensors are differentiable: every rank's
    gradient is the incoming gradient of the root, or its share.

    TensorFlow can't reduce to one rank only: its engine moves as many bytes as for ``all_reduce``.
    """
    require_reduction("reduce", tensor.dtype, reduction)
    require_member("root_rank", root_rank, group)

    def body(engine: AgreedEngine, tensor: tf.Tensor) -> tf.Tensor:
        reduced = engine.reduce(tensor, reduction, root_rank)
        if group.rank != root_rank:
            # This rank takes part although its result is zeros, which must not exist before.
            with tf.control_dependencies([reduced]):
                reduced = tf.zeros_like(reduced)

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            require_differentiable("reduce", reduction)
            [incoming] = broadcast(job, [upstream], root_rank, group)
            # A mean hands on an equal part of the gradient to each rank.
            if reduction == "mean":
                return incoming / group.size
            return incoming

        return differentiable_move(reduced, backward, tensor)

    result_specs = _reduced_spec(tensor, reduction)
    details = {"reduction": reduction, "root_rank": root_rank}
    collective = Collective(
        "reduce", group, [tensor], body, result_specs=result_specs, details=details
    )
    return collective.run(job)


def reduce_scatter(job: Job, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Reduce over a group, and give each rank its block of the first dimension: [n, …] in, [n / group.size, …] out.

    The mean of integers is floating-point, as in ``all_reduce``; on ranks that share memory it is bit by bit the block
    of ``all_reduce``. Differentiable. For arguments and errors see ``hccl_ops.reduce_scatter``.

    TensorFlow has no kernel for it on the CPU. The blocks are exchanged and each rank reduces its own, which moves half
    the bytes of an all_reduce.
    """
    require_reduction("reduce_scatter", tensor.dtype, reduction)
    moves.require_first_dimension("reduce_scatter", tensor)
    rows = moves.rows_of(tensor)
    text = (
        f"reduce_scatter: the first dimension (dim0) must be a multiple of rank_size, the {group.size} ranks of "
        f"{group.name!r}"
    )
    if rows is not None and rows % group.size:
        raise ValueError(
            f"{text}; found {rows} in shape {tuple(tensor.shape)}. Pad the tensor to a multiple of {group.size}."
        )

    def body(engine: AgreedEngine, tensor: tf.Tensor) -> tf.Tensor:
        checks = []
        if rows is None:
            length = tf.shape(tensor)[0]
            checks.append(tf.debugging.Assert(length % group.size == 0, [f"{text}; found", length]))
        with tf.control_dependencies(checks):
            blocks = engine.exchange(tf.reshape(tensor, [group.size, -1]))
        # Every rank now has all ranks' values of its block, and reduces them in the order of the ranks.
        reduced = fold(tf.unstack(blocks, num=group.size), reduction)
        return moves.with_first_dimension(reduced, tensor, lambda rows: rows // group.size)

    block = moves.spec_with_first_dimension(tensor, lambda rows: rows // group.size)
    result_specs = _reduced_spec(block, reduction)
    details = {"reduction": reduction}
    collective = Collective(
        "reduce_scatter", group, [tensor], body, result_specs=result_specs, details=details
    )
    return collective.run(job)


def reduce_scatter_v(job: Job, tensor: tf.Tensor, reduction: str, group: Group) -> tf.Tensor:
    """Do what ``reduce_scatter`` does for any first dimension, of which the first ranks get a row more if need be.

    Another rank may know more or less of the shape while tracing, so the ranks exchange the same blocks in any case,
    padded to the longest.
    """
    require_reduction("reduce_scatter", tensor.dtype, reduction)
    moves.require_first_dimension("reduce_scatter", tensor)
    known_rows = moves.rows_of(tensor)
    # Blocks of one length need no padding.
    if known_rows is not None and known_rows % group.size == 0:
        return reduce_scatter(job, tensor, reduction, group)

    def body(engine: AgreedEngine, tensor: tf.Tensor) -> tf.Tensor:
        shape = tf.shape(tensor, tf.int64)
        has_more = tf.range(group.size, dtype=tf.int64) < shape[0] % group.size
        rows = shape[0] // group.size + tf.cast(has_more, tf.int64)
        counts = rows * tf.reduce_prod(shape[1:])
        vector = tf.reshape(tensor, [-1])
        sent = moves.pad_blocks(vector, moves.packed_blocks(counts), counts[0])
        reduced = fold(tf.unstack(engine.exchange(sent), num=group.size), reduction)
        own_block = reduced[: counts[group.rank]]
        return moves.with_rows(own_block, rows[group.rank], tensor)

    block = moves.spec_with_first_dimension(tensor, lambda _: None)
    result_specs = _reduced_spec(block, reduction)
    details = {"reduction": reduction}
    collective = Collective(
        "reduce_scatter", group, [tensor], body, result_specs=result_specs, details=details
    )
    return collective.run(job)


def _reduced_spec(tensor: tf.Tensor | tf.TensorSpec, reduction: str) -> Callable[[], tf.TensorSpec]:
    return lambda: tf.TensorSpec(tensor.shape, reduced_dtype(tensor.dtype, reduction))


def broadcast_from_owners(
    job: Job, tensors: TensorsOrSpecs, owners: Sequence[int], group: Group
) -> TensorList:
    """Send tensors from the ranks that own them to all others; return them in the order of ``tensors``.

    Args:
        tensors: what this rank owns, and the specs of the others; of any dtypes and known shapes.
        owners: the owner of each tensor, a rank of the group.

    The results have no gradient.
    """
    if not tensors:
        return []
    specs = _specs_of(tensors)
    owned = [tensor for tensor, owner in zip(tensors, owners) if owner == group.rank]

    def body(engine: AgreedEngine, *inputs: tf.Tensor) -> TensorList:
        remaining = iter(inputs)
        sent = list(specs)
        for position, owner in enumerate(owners):
            if owner == group.rank:
                sent[position] = next(remaining)
        return engine.broadcast(sent, owners)

    details = {"owners": digest_of(owners)}
    name = "broadcast_from_owners"
    collective = Collective(
        name, group, specs, body, owned, lambda: specs, details, has_owners=True
    )
    return collective.run(job)


def digest_of(numbers: Sequence[int]) -> str:
    """Return a digest of numbers that all ranks have to pass alike."""
    text = repr(list(numbers))
    return f"{zlib.crc32(text.encode()):08x}"


def broadcast(job: Job, tensors: Sequence[tf.Tensor], root_rank: int, group: Group) -> TensorList:
    """Send the tensors of the root to every rank of the group; return them in the order of ``tensors``.

    Differentiable: the gradient on the root is the sum of the incoming gradients of all ranks, and zero on the others.
    For arguments and errors see ``hccl_ops.broadcast``.
    """
    if not tensors:
        return []
    require_member("root_rank", root_rank, group)
    for tensor in tensors:
        require_bits(tensor.dtype)

    def body(engine: AgreedEngine, *tensors: tf.Tensor) -> TensorList:
        floats = [tensor.dtype.is_floating for tensor in tensors]

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            gradients: list[tf.Tensor | None] = []
            for gradient, is_float in zip(upstream, floats):
                # Integers have no gradient, and their transfers none to return.
                if not is_float:
                    gradients.append(None)
                    continue
                # One after the other, also where TensorFlow orders nothing.
                with tf.control_dependencies(
                    [earlier for earlier in gradients if earlier is not None]
                ):
                    gradients.append(reduce(job, gradient, "sum", root_rank, group))
            return gradients

        received = engine.broadcast(tensors, [root_rank] * len(tensors))
        return differentiable(received, backward, tensors)

    details = {"root_rank": root_rank}
    collective = Collective(
        "broadcast", group, tensors, body, None, lambda: _specs_of(tensors), details
    )
    return collective.run(job)


def _specs_of(tensors: TensorsOrSpecs) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def barrier(job: Job, group: Group) -> tf.Tensor:
    """Wait until every rank of the group has made this call.

    Returns the number of ranks that came, int32 of shape []. In a ``tf.function`` the wait is over when this tensor
    exists, so make later operations depend on it (``tf.control_dependencies``).
    """

    def body(engine: AgreedEngine) -> tf.Tensor:
        return engine.all_reduce([[tf.constant(1)]], "sum")[0][0]

    spec = tf.TensorSpec([], tf.int32)
    collective = Collective("barrier", group, [], body, result_specs=lambda: spec)
    return collective.run(job)


def require_reduction(collective: str, dtype: tf.DType, reduction: str) -> None:
    """Raise ValueError for an unknown reduction, and TypeError for a dtype that can't be reduced."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction {reduction!r} is unknown; expected one of {', '.join(map(repr, REDUCTIONS))}"
        )
    if dtype not in REDUCED:
        raise TypeError(
            f"{collective} can't reduce dtype {dtype.name}; expected one of "
            f"{', '.join(dtype.name for dtype in REDUCED)}. Cast the tensor first."
        )
