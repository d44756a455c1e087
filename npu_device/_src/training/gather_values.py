"""``npu.distribute.all_gather``: the samples of all ranks, for losses that compare them with each other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src.training.fit.current import CurrentStep, current_step
from npu_device._src.training.world import world


@tf.autograph.experimental.do_not_convert
def all_gather(tensor: Any) -> Any:
    """Put the tensors of all ranks one after the other along the first axis; every rank gets the result.

    Args:
        tensor: a tensor or array of shape [n, …], where n is each rank's own number of samples and may be 0. The rest
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
    gradient that one process has for the whole batch: in a replicated model's step, where a rank counts by its samples,
    and elsewhere with gradients that are averaged over the ranks (``all_reduce``, a wrapped optimizer). So has a loss
    of the rank's own samples compared with those of all ranks. Every rank has to make the call, eagerly or in a
    tf.function.

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
    return ranks.gather(tensor) if step is None else _in_step(step, tensor)


def _in_step(step: CurrentStep, tensor: tf.Tensor) -> tf.Tensor:
    return step.exchanged(step.gather(step.to_exchange(step.share.counted(tensor))))
