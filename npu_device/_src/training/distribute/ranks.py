"""The rank of this process, and exchanges between the ranks: for custom training loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.gradients.reduction import ReductionOptions, keys_of, reduce_list, with_values
from npu_device._src.training.distribute.groups import process
from npu_device._src.training.distribute.reduce_values import floating
from npu_device._src.training.distribute.synchronized_layers import note_reduced
from npu_device._src.training.opening.current_world import current_world, world_unless_child
from npu_device._src.training.watching import partial_sums


@compat.do_not_convert
def rank() -> int:
    """Return the rank of this process, from 0; 0 on a single device. A child process gets the rank of its parent.

    Raises:
        RuntimeError: the environment names several ranks, but the job can't be joined any more; so does each call here.

    >>> import npu_device as npu
    >>> npu.distribute.rank(), npu.distribute.size(), npu.distribute.is_main()  # a single device
    (0, 1, True)
    """
    return process().rank


@compat.do_not_convert
def size() -> int:
    """Return the number of ranks in the job, also in a child process of a rank; 1 on a single device.

    Raises:
        RuntimeError: the environment names several ranks, but the job can't be joined any more.
    """
    return process().world_size


@compat.do_not_convert
def local_rank() -> int:
    """Return the number of this process among the ranks of its host, from 0; 0 on a single device. A child process of a
    rank gets the number of its parent.

    Raises:
        RuntimeError: the environment names several ranks, but the job can't be joined any more.
    """
    return process().local_rank


@compat.do_not_convert
def local_size() -> int:
    """Return the number of ranks on this host, also in a child process of a rank; 1 on a single device.

    Raises:
        RuntimeError: the environment names several ranks, but the job can't be joined any more.
    """
    return process().local_size


@compat.do_not_convert
def is_main() -> bool:
    """Return True on rank 0, which writes and prints.

    Raises:
        RuntimeError: the environment names several ranks, but the job can't be joined any more.
    """
    return rank() == 0


def barrier() -> None:
    """Wait until every rank has made this call. On a single device and in a child of a rank, return at once.

    Raises:
        RuntimeError: another rank has failed, left or makes a different call, or the job can't be joined any more.
    """
    world = world_unless_child()
    if world is not None:
        world.wait()


def broadcast_object(value: Any, root_rank: int = 0) -> Any:
    """Return the Python object of the root on every rank.

    Args:
        value: anything that can be pickled; only that of the root is used. If the job has no secret and other hosts can
            reach its ports, only numbers, strings, bytes, arrays, tensors, and lists, tuples, dictionaries and sets of
            them.
        root_rank: the rank whose object is sent (default 0).

    Returns:
        The object of the root; ``value`` itself on the root and on a single device.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: the object can't be sent in a job without a secret (``NPU_DEVICE_SECRET``); on all ranks.

    Every rank has to make the call, eagerly.

    >>> import npu_device as npu
    >>> npu.distribute.broadcast_object({"epoch": 3})  # a single device
    {'epoch': 3}
    """
    world = current_world()
    if world is None:
        return value
    if not 0 <= root_rank < world.size:
        raise ValueError(
            f"rank {world.rank}: broadcast_object has no root_rank {root_rank!r}; expected 0 to {world.size - 1}"
        )
    return world.object_from_root(value, root_rank)


def gather_object(value: Any) -> list:
    """Return the Python objects of all ranks, in order, on every rank.

    Args:
        value: the object of this rank; anything that ``broadcast_object`` can send.

    Returns:
        One object for each rank; ``[value]`` on a single device.

    Raises:
        MismatchError: the ranks make different calls.

    Every rank has to make the call, eagerly.

    >>> import npu_device as npu
    >>> npu.distribute.gather_object({"samples": 12})  # a single device
    [{'samples': 12}]
    """
    world = current_world()
    if world is None:
        return [value]
    return world.objects(value, "gather_object")


@contextlib.contextmanager
def rank_zero_first() -> Iterator[bool]:
    """Run the block on rank 0 first, then on the others: to download, prepare or write files that all read.

    Yields:
        True on rank 0.

    Raises:
        RuntimeError: on the other ranks, if rank 0 fails in the block.

    Every rank has to enter. The others wait while rank 0 is inside, and raise instead of entering if it fails there;
    the wait is limited like that of other collectives (``NPU_DEVICE_STALL_TIMEOUT``). A child process of a rank, which
    has passed this block, enters at once.

    >>> import npu_device as npu
    >>> with npu.distribute.rank_zero_first() as main:
    ...     main
    True
    """
    world = world_unless_child()
    if world is None:
        yield is_main()
        return
    if world.is_main:
        problem = ""
        try:
            yield True
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            # Sent after an error, too, or the other ranks would wait. The text is empty if all went well.
            world.object_from_root(problem)
        return
    problem = world.object_from_root("")
    if problem:
        raise RuntimeError(
            f"rank {world.rank}: rank 0 failed in `with npu.distribute.rank_zero_first()`, for which the other ranks "
            f"waited: {problem}\nWhat to do: fix the error on rank 0."
        )
    yield False


@compat.do_not_convert
def weighted_mean(values: Any, weight: Any) -> Any:
    """Average values over the ranks, weighted for instance by the number of samples of each rank.

    Args:
        values: a tensor, number or nested structure of them, which may contain ``None`` and ``tf.IndexedSlices``,
            such as a loss and gradients; the same shapes on every rank. They travel like those of ``all_reduce``, and
            integers become floating-point numbers as in its means.
        weight: the weight of this rank: a number or scalar tensor, 0 or more.

    Returns:
        The sum of ``weight * value`` divided by the sum of the weights, as tensors in the same structure; 0 if all
        weights are 0. On a single device ``values`` themselves.

    Raises:
        ValueError: the weight isn't a scalar, or is negative. The latter is unchecked if the weight is only known when
            a tf.function runs.

    Every rank has to make the call, eagerly or in a tf.function: a rank without samples passes weight 0 and values of
    the same shapes, which don't count, NaN neither.

    >>> import npu_device as npu
    >>> npu.distribute.weighted_mean(3.0, 8)  # a single device
    3.0
    """
    world = current_world()
    if world is None:
        return values
    own_weight = tf.cast(weight, tf.float64)
    known_weight = tf.get_static_value(own_weight)
    wrong = ""
    if own_weight.shape.rank not in (0, None):
        wrong = f"a weight of shape {own_weight.shape}; expected a scalar"
    elif known_weight is not None and known_weight < 0:
        wrong = f"the weight {known_weight:g}; expected 0 or more"
    if wrong:
        where = f"rank {world.job.cluster.rank}: weighted_mean was given "
        raise ValueError(f"{where}{wrong}, such as the number of samples of this rank")
    note_reduced(world, values, by_samples=True)
    # If all weights are 0, so is the mean.
    fraction = tf.math.divide_no_nan(own_weight, world.sum_over_ranks(own_weight))

    def term(tensor: tf.Tensor) -> tf.Tensor:
        tensor = floating(tensor)
        return tf.math.multiply_no_nan(tensor, tf.cast(fraction, tensor.dtype))

    terms = [with_values(value, term) for value in tf.nest.flatten(values)]
    options = ReductionOptions("sum", keys=keys_of(values))
    means = reduce_list(world.job, terms, options, world.group)
    return tf.nest.pack_sequence_as(values, means)


def metric_results(metrics: Any) -> dict[str, Any]:
    """Return the results of Keras metrics over all ranks: their states are added up, not their results averaged.

    Args:
        metrics: Keras metrics whose state counts and adds up, as in all metrics of Keras; the same on every rank, each
            updated with the samples of that rank.

    Returns:
        Names and results, as numpy values. The metrics keep the state of this rank.

    Raises:
        ValueError: two of the metrics have the same name.

    Every rank has to make the call, eagerly.
    """
    world = current_world()
    metrics = list(metrics)
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise ValueError(
            f"metric_results was given several metrics of one name ({', '.join(names)}), and returns results by name.\n"
            "What to do: give each metric a name of its own."
        )
    to_array = lambda number: tf.convert_to_tensor(number).numpy()  # noqa: E731
    results = {}
    for metric in metrics:
        variables = list(metric.variables)
        states = list(map(tf.convert_to_tensor, variables))
        if world is not None:
            states = list(map(world.sum_over_ranks, states))
        # The rank's own state is kept: later batches add to it.
        with partial_sums.with_values(variables, states):
            # Read before the state is put back, since a result may be a variable of it.
            results[metric.name] = tf.nest.map_structure(to_array, metric.result())
    return results
