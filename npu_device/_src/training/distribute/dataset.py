"""``npu.distribute.shard_and_rebatch_dataset``: the share of each rank in the dataset, and its batch size."""

from __future__ import annotations

import itertools
import logging
import operator
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.collectives.job import Job
from npu_device._src.training.opening import device
from npu_device._src.training.watching.digests import SHOWN_RANKS
from npu_device._src.wording import INDIVISIBLE

_log = logging.getLogger("npu_device")
_SEEDS_COMPARED = 100  # most datasets whose seeds are compared
divided_batches = set[int]()
"""The global batch sizes that this process has divided, which another number of ranks has to divide too."""


def shard_and_rebatch_dataset(dataset: Any, global_bs: Any) -> tuple[Any, Any]:
    """Return the share of this rank in a dataset without batches, and its batch size.

    Args:
        dataset: a ``tf.data.Dataset`` of single elements, the same on every rank; call this after shuffle, and before
            repeat and batch.
        global_bs: elements in a batch over all ranks together; an integer of any kind (numpy's too).

    Returns:
        ``(dataset, batch_size)``: every n-th element from the rank on, and the share of this rank in the batch, a
        Python int. The caller batches: ``dataset.batch(batch_size)``. On a single device the arguments
        themselves.

    Raises:
        ValueError: ``global_bs`` is not divisible by the number of ranks, or not positive.
        TypeError: ``global_bs`` is not an integer, or ``dataset`` can't be sharded.

    When the number of elements is not a multiple of the number of ranks, the first ranks get one element more;
    ``drop_remainder=True`` or ``repeat()`` keeps the number of batches equal. If the dataset
    is shuffled without a seed, a warning tells that its order differs on each rank.

    >>> import tensorflow as tf
    >>> import npu_device as npu
    >>> dataset, batch = npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(6), 3)
    >>> [elements.tolist() for elements in dataset.batch(batch).as_numpy_iterator()]  # a single device
    [[0, 1, 2], [3, 4, 5]]

    Source: Ascend TF Adapter 2.x, ``npu.distribute.shard_and_rebatch_dataset``.
    """
    job = device.unless_child()
    process = device.cluster_or_parent()
    if process is None:
        return dataset, global_bs
    rank = process.rank
    world_size = process.world_size
    try:
        batch_size = operator.index(global_bs)
    except TypeError:
        raise TypeError(
            f"rank {rank}: the global batch size must be an integer; found {global_bs!r} of type "
            f"{type(global_bs).__name__}"
        ) from None
    if not hasattr(dataset, "shard"):
        raise TypeError(
            f"rank {rank}: expected a tf.data.Dataset to shard; found type {type(dataset).__name__}"
        )
    if batch_size <= 0 or batch_size % world_size:
        # The advice names the multiple below, or the smallest batch that gives each rank one sample.
        below = max(batch_size // world_size, 1) * world_size
        raise ValueError(
            f"rank {rank}: {INDIVISIBLE}; found {batch_size} on "
            f"{world_size} ranks.\n"
            f"What to do: use a multiple of {world_size}, for instance {below} or {below + world_size}."
        )
    divided_batches.add(batch_size)
    batch = batch_size // world_size
    if job is not None:
        count = tf.data.UNKNOWN_CARDINALITY
        # The cardinality has a value in eager mode only.
        if tf.executing_eagerly():
            count = int(dataset.cardinality())
        if rank == 0:
            _warn_if_uneven(count, world_size, batch)
        _compare_shuffles(job, dataset)
    return dataset.shard(world_size, rank), batch


def _warn_if_uneven(count: int, world_size: int, batch: int) -> None:
    """Warn if ranks get nothing, or may get one batch more than others."""
    least, remainder = divmod(max(count, 0), world_size)
    if remainder and not least:
        _log.warning(
            "shard_and_rebatch_dataset: %d elements on %d ranks: rank(s) from %d on get none.\nWhat to do: give every "
            "rank at least one element. If the elements are files, write more of them, or read them before the call.",
            *(count, world_size, count),
        )
    elif remainder and (least % batch == 0 or (least + 1) % batch == 0):
        # Without a remainder of batches, one element more doesn't make a step more.
        _log.warning(
            "shard_and_rebatch_dataset: %d elements on %d ranks leave some ranks one element more, and with batches of "
            "%d per rank one batch more. A rank that makes a step more than the others waits for them, or runs ahead "
            "by an epoch.\nWhat to do: leave the last ones out, with dataset.take(%d), or repeat the dataset.",
            *(count, world_size, batch, least * world_size),
        )


class _DivisionNumbers(itertools.count):
    """Numbers the datasets that were divided; a component of the job."""


def _compare_shuffles(job: Job, dataset: Any) -> None:
    """Warn if a dataset is shuffled in another order on each rank. No rank waits: the last one compares."""
    if not compat.has_fixed_order(dataset) and job.cluster.rank == 0:
        _log.warning("%s", _FREE_ORDER)
    seeds = compat.shuffle_seeds(dataset)
    number = next(job.component_or_new(_DivisionNumbers))
    # Without a seed, TensorFlow draws one on each rank.
    if any(set(pair) == {0} for pair in seeds):
        if job.cluster.rank == 0:
            _log.warning(_TEXT, "without a seed", "")
        return
    # Seeds that come from tensors can't be compared.
    if number >= _SEEDS_COMPARED or any(None in pair for pair in seeds):
        return
    try:
        name = f"shuffled before division {number}"
        answers = job.control.post(name, [list(pair) for pair in seeds])
    except ClusterError:
        # The next collective raises the error of a lost rank.
        return
    # Only the last rank to post gets the answers of all.
    if any(answer != answers[0] for answer in answers):
        rows = {}
        for rank, answer in enumerate(answers):
            rows[rank] = f"seed {', '.join(str(pair[1]) for pair in answer)}"
        lines = "\n".join(job.cluster.lines(rows, SHOWN_RANKS))
        _log.warning(_TEXT, "with another seed on each rank:\n", lines)


_TEXT = (
    "shard_and_rebatch_dataset was given a dataset that is shuffled in another order on each rank, %s%s\nSome samples "
    "are read by several ranks, others by none.\nWhat to do: give shuffle a seed, the same on every rank (and so "
    "sample_from_datasets), or call npu.open(seed=1)."
)
_FREE_ORDER = (
    "shard_and_rebatch_dataset was given a dataset that each rank may read in another order, since it has "
    "deterministic=False. Then some samples are read by several ranks, others by none.\nWhat to do: set "
    "deterministic=False only after the call."
)
