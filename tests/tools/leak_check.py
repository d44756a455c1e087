"""What the ranks of a pool do around a body: collect warnings, and see what it leaves."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import allowed_warnings

from npu_device._src.testing import leaks


class Checked(NamedTuple):
    """The end of a body on one rank."""

    value: Any
    warnings: list[str]  # those that are not allowed
    left: list[str]  # what the process holds more than before
    seconds: float  # of CPU time


def call(body: Callable[..., Any], arguments: tuple[Any, ...]) -> Checked:
    before, began = leaks.held(), time.process_time()
    with allowed_warnings.collected() as warnings:
        value = body(*arguments)
    _forget_graphs()
    return Checked(
        value,
        warnings,
        leaks.added(before, _idle_connections()),
        time.process_time() - began,
    )


def _forget_graphs() -> None:
    """Let go of the graphs of custom gradients, such as those of the optimizers of Keras 3, which TensorFlow keeps for
    good with all of their functions: each new function would take the longer to start the more of them there are.
    """
    from tensorflow.python.framework import ops

    registered = ops.gradient_registry._registry
    for name in [name for name in registered if name.startswith("CustomGradient-")]:
        del registered[name]
    gc.collect()


def _idle_connections() -> set[str]:
    """Return the descriptors of the few connections that sends and receives keep, each for its last tags."""
    from npu_device._src.collectives.job import current

    job = current()
    pairs = list(job.engines.pairs.queues.values()) if job is not None else []
    return {
        f"descriptor {connection.fileno()}" for calls in pairs for connection in calls.idle.values()
    }


def prepare() -> None:
    """Make what a rank makes once, when it first needs it: connections, shared memory, the background thread. A body
    that made it would seem to leave it, and run again.
    """
    import tensorflow as tf

    import npu_device as npu
    from npu_device._src.collectives.job import current
    from npu_device.distribute import hccl_ops

    gc.set_threshold(
        100_000, 50, 100
    )  # `call` collects after each body; in between it would be 4 % of the time
    if (
        os.environ.get("NCCL_HOSTID") == "own"
    ):  # NCCL refuses two ranks of one host on one GPU (tests/gpu)
        os.environ["NCCL_HOSTID"] = os.environ["RANK_ID"]
    rank, size, engine = (
        npu.distribute.rank(),
        npu.distribute.size(),
        os.environ.get("NPU_DEVICE_BACKEND"),
    )
    if os.environ.get("NPU_DEVICE_SHARED_MEMORY") == "off" and (
        engine != "tensorflow" or size == 2
    ):
        current().most_message_bytes = 0  # the engine moves all data, however small
    values = [tf.ones([4]), tf.ones([300_000])]
    in_graph = tf.function(npu.distribute.all_reduce)
    in_graph(values)
    for is_late in (rank == 0, rank != 0):
        npu.distribute.all_reduce(values)
        time.sleep(0.1 if is_late else 0)  # the others wait in the background
        in_graph(values)
    for sender, receiver in itertools.permutations(range(size), 2):
        if rank == sender:
            hccl_ops.send(values[0], 0, receiver)
        elif rank == receiver:
            hccl_ops.receive([4], tf.float32, 0, sender)
