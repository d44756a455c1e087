"""``npu.distribute.all_reduce`` and ``all_gather``, for gradients and other tensors of scripts."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.dtypes import mean_dtype
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.gradients.reduction import ReductionOptions, reduce_list, weighted, with_values
from npu_device._src.training.distribute.normalization import note_reduced
from npu_device._src.training.opening.current_world import world
from npu_device._src.training.watching import same_variables
from npu_device._src.training.watching.applied_gradients import AppliedGradients
from npu_device._src.training.watching.replica_audit import audit_by_hand
from npu_device._src.training.watching.same_samples import Pair, pair_of
from npu_device._src.world.current_step import CurrentStep, current_step
from npu_device._src.world.world import World


@tf.autograph.experimental.do_not_convert
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
        RuntimeError: another rank has failed or left; the environment names several ranks but the job can't be joined
            any more.

    In the step of a replicated model (``replicate``) a rank counts by its samples: the mean is that of all samples, and
    gradients reduced here are not reduced once more by the optimizer, whatever the step makes of them.

    Every rank has to make the call; it works eagerly, in tf.function, in loops and in graphs for sessions. Sum and mean
    are differentiable.

    >>> import npu_device as npu
    >>> npu.distribute.all_reduce(3.0)  # a single device
    3.0

    Source: Ascend TF Adapter 2.x, ``npu.distribute.all_reduce``.
    """
    how = ReductionOptions(reduction, fusion, fusion_id, compression=compression)
    ranks = world(group)
    if ranks is None:
        return values
    several = tf.nest.is_nested(values)
    tensors = list(map(_to_tensor, tf.nest.flatten(values)))
    step = current_step()
    if step is not None and group == WORLD_GROUP:
        reduced = (
            step.reduce(tensors, how)
            if reduction not in ("mean", "sum")
            else _by_samples(step, tensors, how)
        )
    elif several and reduction in ("mean", "sum"):
        reduced = reduce_by_hand(ranks, tf.nest.flatten(values), tensors, how)
    else:
        reduced = reduce_list(ranks.job, tensors, how, ranks.group)
        watch_reduction(ranks, tf.nest.flatten(values), tensors, reduced, how)
    return tf.nest.pack_sequence_as(values, reduced)


def reduce_by_hand(
    ranks: World,
    values: list[Any],
    tensors: list[Any],
    how: ReductionOptions,
    level: int = logging.WARNING,
) -> list[Any]:
    """Reduce what may be gradients: ``values`` of the script, as ``tensors``; before, compare the ranks' variables."""
    behind = same_variables.make_equal_behind(ranks, tensors, level)
    with same_variables.compared_in_session(ranks, tensors):
        reduced = reduce_list(ranks.job, tensors, how, ranks.group)
    pair = watch_reduction(ranks, values, tensors, reduced, how)
    if behind is not None:
        audit_by_hand(ranks, behind, pair)
    return reduced


def _by_samples(step: CurrentStep, tensors: list[Any], how: ReductionOptions) -> list[Any]:
    # In the step of a replicated model, in which a rank counts by its samples.
    prepared = [with_values(each, floating) for each in tensors] if how.kind == "mean" else tensors
    weight = step.weight if how.kind == "mean" else step.counts
    parts = [weighted(step.to_exchange(each), weight) for each in prepared]
    reduced = [step.exchanged(each) for each in step.reduce(parts, replace(how, kind="sum"))]
    step.reduced += reduced
    return reduced


def floating(values: tf.Tensor) -> tf.Tensor:
    """Return values as their mean: integers become floating-point numbers."""
    return tf.cast(values, mean_dtype(values.dtype)) if values.dtype.is_integer else values


def watch_reduction(
    ranks: World, values: list[Any], mine: list[Any], reduced: list[Any], how: ReductionOptions
) -> Callable[[], Pair | None] | None:
    """Note a reduction by hand; return what finds one of the gradients before and after it, if ranks can compare it."""
    pair = (
        functools.partial(pair_of, mine, reduced, how.kind, ranks.size)
        if ranks.group.name == WORLD_GROUP
        else None
    )
    note_reduced(ranks, values)
    watching = ranks.job.part(AppliedGradients)
    if watching is not None:
        watching.note_reduced(values, pair)
    return pair


def _to_tensor(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        shape = None if value.dense_shape is None else tf.convert_to_tensor(value.dense_shape)
        return tf.IndexedSlices(
            tf.convert_to_tensor(value.values), tf.convert_to_tensor(value.indices), shape
        )
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(
            f"all_reduce can't reduce a {type(value).__name__}; expected tensors, numbers or tf.IndexedSlices.\n"
            "What to do: pass tf.sparse.to_dense of it, or flat_values of a ragged tensor."
        )
    return compat.to_tensor(value)


@tf.autograph.experimental.do_not_convert
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
        TypeError: a dtype that can't be sent, such as strings.
        RuntimeError: another rank has failed or left; the environment names several ranks but the job can't be joined
            any more.

    It is differentiable, and scaled so that a loss over the gathered samples, which every rank computes, has the
    gradient that one process has for the whole batch: in the step of a replicated model, where a rank counts by its
    samples, and elsewhere with gradients that are averaged over the ranks (``all_reduce``, a wrapped optimizer). So has
    a loss that compares the samples of the rank with those of all ranks. Every rank has to make the call, eagerly or in
    a tf.function.

    >>> import npu_device as npu
    >>> npu.distribute.all_gather([1.0, 2.0])  # a single device
    [1.0, 2.0]
    """
    ranks = world()
    if ranks is None:
        return tensor
    tensor, step = tf.convert_to_tensor(tensor), current_step()
    if tensor.shape.rank == 0:
        raise ValueError(
            f"rank {ranks.rank}: all_gather was given a scalar; expected a tensor whose first axis counts samples.\n"
            "What to do: give it an axis, tensor[tf.newaxis]."
        )
    if step is None:
        return ranks.gather(tensor)
    return step.exchanged(step.gather(step.to_exchange(step.share.counted(tensor))))
