"""Whether the updates of an optimizer are divided among the ranks, and the message about those that can't be."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.gradients.reduction import ReductionOptions, compared_with_one_process
from npu_device._src.training.sharding.divided_update import DividedUpdate
from npu_device._src.training.sharding.optimizer_methods import install_methods
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32)


def divided_update(
    world: World, optimizer: Any, options: ReductionOptions, accumulates: bool
) -> DividedUpdate | None:
    """Divide the updates of an optimizer among the ranks; return None, after a message on the first rank, if the result
    would not be the same, or no step would be faster.

    Args:
        optimizer: not a loss-scale optimizer, but the one inside.
        accumulates: it adds up the gradients of this rank over several steps, before they are reduced.
    """
    reason = _why_not(world, optimizer, options, accumulates)
    if not reason:
        # Keras changes averages in steps that only accumulate, too: then each rank does, as with the accumulators.
        update = DividedUpdate(world, optimizer, accumulates and optimizer.use_ema)
        reason = update.adopt()
        if not reason:
            install_methods(optimizer)
            return update
    tell_undivided(world, reason)
    return None


def tell_undivided(world: World, reason: str) -> None:
    """Warn on the first rank that shard_optimizer has no effect."""
    if world.rank == 0:
        _log.warning("shard_optimizer has no effect, and each rank makes all updates: %s", reason)


def tell_if_asked(world: World | None, reason: str) -> None:
    """Warn that NPU_DEVICE_SHARD_OPTIMIZER has no effect on an optimizer, if it is on."""
    if world is not None and environment.NPU_DEVICE_SHARD_OPTIMIZER.get() == "on":
        tell_undivided(world, reason)


def _why_not(world: World, optimizer: Any, options: ReductionOptions, accumulates: bool) -> str:
    if world.size == 1:
        return f"group {world.group.name!r} has one rank"
    if compared_with_one_process.is_set():
        return "npurun verify compares the gradients and updates of all variables on each rank"
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return "it trains in sessions of TensorFlow 1"
    if tf.distribute.has_strategy():
        return "a strategy of tf.distribute holds its variables"
    if hasattr(optimizer, "inner_optimizer"):
        return "the loss-scale optimizer was wrapped without it before"
    if getattr(optimizer, "gradient_accumulation_steps", None) and not accumulates:
        return "the gradients that it accumulates are reduced in each step"
    # Maxima and products are taken in another way.
    if options.reduction not in ("mean", "sum"):
        return f"the reduction is {options.reduction!r}; sum and mean can be divided"
    if environment.NPU_DEVICE_CHECK_GRADIENTS.get() == "on":
        return "NPU_DEVICE_CHECK_GRADIENTS=on checks the gradients of all variables together"
    if not world.job.engines.has_owners(world.group, _DTYPES):
        return (
            "TensorFlow's engine would send 1.5 times the bytes, and each step would take longer. Shared memory, TCP "
            "and MPI (NPU_DEVICE_BACKEND=tcp or mpi) send no more"
        )
    return compat.why_not_alone(optimizer)
