"""``npu.distribute.all_reduce`` and ``all_gather``, for gradients and other tensors of scripts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.dtypes import mean_dtype
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.gradients.reduction import (
    ReductionOptions,
    keys_of,
    reduce_list,
    weighted,
    with_values,
)
from npu_device._src.training.distribute.synchronized_layers import note_reduced
from npu_device._src.training.opening.current_world import current_world
from npu_device._src.training.watching.applied_gradients import AppliedGradients
from npu_device._src.training.watching.replica_audit import audit_loop
from npu_device._src.training.watching.same_samples import Pair, pair_of
from npu_device._src.training.watching.same_variables import make_equal_behind
from npu_device._src.training.watching.session_steps import reduce_compared
from npu_device._src.world.current_step import CurrentStep, current_step
from npu_device._src.world.world import World


@compat.do_not_convert
def all_reduce(
    values: Any,
    reduction: str = "mean",
    fusion: int = 1,
    fusion_id: int = -1,
    group: str = WORLD_GROUP,
    compression: str | None = None,
) -> Any:
    """Reduce values over all ranks; every rank gets the result.

    Args:
        values: a tensor, numpy array or number, or a nested structure of them (lists, tuples, dictionaries; see
            ``tf.nest``), which may contain ``None`` and ``tf.IndexedSlices``. float16, bfloat16, float32, float64, int8
            to int64, uint8 to uint64; the same number, shapes and dtypes on every rank.
        reduction: ``"mean"`` (default), ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
        fusion: 0 sends each tensor alone; 1 (default) cuts the list by the split strategy of the group
            (``hccl.split.api``) into segments that are reduced while backward still produces the others; 2 sends those
            of a dtype together.
        fusion_id: -1 unless ``fusion`` is 2.
        group: name of the group; the mean divides by its size.
        compression: ``"fp16"`` or ``"bf16"`` sends float32 and float64 in 16 bits (default: as they are). They are
            added up in their own dtype, so that sums beyond ±65504 are finite with ``"fp16"`` too; values beyond it are
            not. Each value is rounded by at most 2**-11 (``"bf16"``: 2**-8) of itself, and so is the result unless the
            ranks share memory.

    Returns:
        On several ranks tensors in the same structure, ``None`` where ``None`` was. The mean of integers is
        floating-point. ``tf.IndexedSlices`` have the rows of all ranks, one for each occurrence of an index, as in one
        process. On a single device ``values`` itself, the very same object.

    Raises:
        ValueError: unknown reduction, group or compression; a combination of fusion and fusion_id that doesn't exist;
            a split strategy that doesn't fit the number of gradients.
        TypeError: a dtype or a kind of value that can't be reduced.
        RuntimeError: another rank has failed or left, or called something else (in tf.function, TensorFlow makes this a
            ``tf.errors.UnknownError`` with the same text); the environment names several ranks but the job can't be
            joined any more.

    In the step of a replicated model (``replicate``) a rank counts by its samples: the mean is that of all samples. The
    optimizer doesn't reduce once more what a traced step makes of a sum or mean; in an eager step it passes through
    only the results themselves. To reduce equal values once more changes nothing but rounding.

    Every rank has to make the call; it works eagerly, in tf.function, in loops and in graphs for sessions. Sum and mean
    are differentiable.

    >>> import npu_device as npu
    >>> npu.distribute.all_reduce(3.0)  # a single device
    3.0

    Source: Ascend TF Adapter 2.x, ``npu.distribute.all_reduce``.
    """
    options = ReductionOptions(reduction, fusion, fusion_id, compression=compression)
    world = current_world(group)
    if world is None:
        return values
    options = replace(options, keys=keys_of(values))
    leaves = tf.nest.flatten(values)
    tensors = list(map(_to_tensor, leaves))
    adds_up = reduction in ("mean", "sum")
    step = current_step()
    # The shares of a batch are for all ranks: within another group, they don't matter.
    if step is not None and group == WORLD_GROUP:
        if adds_up:
            reduced = _reduce_weighted(step, tensors, options)
        else:
            reduced = step.world.reduce(tensors, options)
    # A single tensor is a loss or a count; gradients come as a list.
    elif adds_up and tf.nest.is_nested(values):
        reduced = reduce_by_hand(world, leaves, tensors, options)
    else:
        reduced = reduce_list(world.job, tensors, options, world.group)
        watch_reduction(world, leaves, tensors, reduced, options)
    return tf.nest.pack_sequence_as(values, reduced)


def reduce_by_hand(
    world: World,
    values: list,
    tensors: list,
    options: ReductionOptions,
    level: int = logging.WARNING,
) -> list:
    """Reduce what may be gradients: ``values`` of the script, as ``tensors``.

    In a function or the graph of a session, the ranks compare their variables before.
    """
    variables = make_equal_behind(world, tensors, level)
    reduced = reduce_compared(world, tensors, lambda: world.reduce(tensors, options))
    pair = watch_reduction(world, values, tensors, reduced, options)
    if variables is not None:
        audit_loop(world, variables, pair)
    return reduced


def _reduce_weighted(step: CurrentStep, tensors: list, options: ReductionOptions) -> list:
    factor = step.sum_factor
    if options.reduction == "mean":
        # Integers become floating-point numbers before they are multiplied by a fraction.
        tensors = [with_values(tensor, floating) for tensor in tensors]
        factor = step.fraction
    terms = [weighted(step.to_exchange(tensor), factor) for tensor in tensors]
    # A mean is the sum of terms that are multiplied by each rank's fraction.
    sums = step.world.reduce(terms, replace(options, reduction="sum"))
    reduced = list(map(step.exchanged, sums))
    # The results are noted, so that the optimizer doesn't reduce them once more.
    step.reduced += reduced
    return reduced


def floating(values: tf.Tensor) -> tf.Tensor:
    """Return values as their mean: integers become floating-point numbers."""
    if values.dtype.is_integer:
        return tf.cast(values, mean_dtype(values.dtype))
    return values


def watch_reduction(
    world: World, values: list, own_tensors: list, reduced: list, options: ReductionOptions
) -> Callable[[], Pair | None] | None:
    """Note a reduction by hand; return what finds one of the gradients before and after it, if ranks can compare it. It
    sends no tensors, but may post checksums to the hub.
    """
    pair = None
    if world.group.name == WORLD_GROUP:
        pair = functools.partial(pair_of, own_tensors, reduced, options.reduction, world.size)
    note_reduced(world, values)
    watching = world.job.component(AppliedGradients)
    if watching is not None:
        watching.note_reduced(values, pair)
    return pair


def _to_tensor(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        shape = value.dense_shape
        if shape is not None:
            shape = tf.convert_to_tensor(shape)
        rows = tf.convert_to_tensor(value.values)
        return tf.IndexedSlices(rows, tf.convert_to_tensor(value.indices), shape)
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(
            f"all_reduce can't reduce a {type(value).__name__}; expected tensors, numbers or tf.IndexedSlices.\n"
            "What to do: pass tf.sparse.to_dense of it, or flat_values of a ragged tensor."
        )
    return compat.to_tensor(value)


@compat.do_not_convert
def all_gather(tensor: Any) -> Any:
    """Put the tensors of all ranks one after the other along the first axis; every rank gets the result.

    Args:
        tensor: a tensor or array of shape [n, …], where n is the number of samples of the rank and may be 0. The rest
            of the shape and the dtype are the same on every rank; numbers and bool.

    Returns:
        A tensor of shape [sum of n, …], in the order of the ranks and the same on every rank. In a step of a replicated
        model this is the order of the whole batch. On a single device ``tensor`` itself, the very same object.

    Raises:
        ValueError: a scalar.
        TypeError: a dtype that can't be sent, such as strings; a dictionary, a sparse or a ragged tensor.
        RuntimeError: another rank has failed or left, or called something else (in tf.function, TensorFlow makes this a
            ``tf.errors.UnknownError`` with the same text); the environment names several ranks but the job can't be
            joined any more.

    It is differentiable, and scaled so that a loss over the gathered samples, which every rank computes, has the
    gradient that one process has for the whole batch: in the step of a replicated model, where a rank counts by its
    samples, and elsewhere with gradients that are averaged over the ranks (``all_reduce``, a wrapped optimizer). So has
    a loss that compares the samples of the rank with those of all ranks. Every rank has to make the call, eagerly or in
    a tf.function.

    >>> import npu_device as npu
    >>> npu.distribute.all_gather([1.0, 2.0])  # a single device
    [1.0, 2.0]
    """
    world = current_world()
    if world is None:
        return tensor
    if isinstance(tensor, (Mapping, tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
        raise TypeError(
            f"rank {world.rank}: all_gather was given a {type(tensor).__name__}; expected one dense tensor.\n"
            "What to do: gather its tensors one by one."
        )
    tensor = tf.convert_to_tensor(tensor)
    step = current_step()
    if tensor.shape.rank == 0:
        raise ValueError(
            f"rank {world.rank}: all_gather was given a scalar; expected a tensor whose first axis counts samples.\n"
            "What to do: give it an axis, tensor[tf.newaxis]."
        )
    if step is None:
        return world.gather(tensor)
    # Without the row of a rank that has no samples, which another rank counts.
    samples = step.to_exchange(step.share.counted(tensor))
    return step.exchanged(step.world.gather(samples))
