"""Do the ranks of a TensorFlow 1 session begin with the same variables? They are compared in the first run that reduces
gradients, before its updates.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.collectives.graph import runs_if_fetched
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.sessions import call_python
from npu_device._src.training.digests import checksum, differences, variable_name
from npu_device._src.training.world import World, value_of

_log = logging.getLogger("npu_device")

_GRAPHS = 100  # whose variables are compared

_ADVICE = (
    "Likely cause: no broadcast, or another seed on each rank.\nWhat to do: pass "
    "npu_bridge.npu_init.NPUBroadcastGlobalVariablesHook(0) to the session's hooks; or run the operation "
    "npu_bridge.estimator.npu.npu_hook.broadcast_global_variables(0) once, after the variables have got their values."
)


class SessionStarts:
    """Counts the graphs that compare their variables; a part of the job."""

    def __init__(self) -> None:
        self.graphs = 0


@contextlib.contextmanager
def compared(world: World, gradients: Sequence[Any]) -> Iterator[None]:
    """In a session's graph, compare variables in each session's first run; operations of the block come after that.

    Args:
        world: the ranks.
        gradients: those that the block reduces. The trainable variables of their shapes are compared, if there are as
            many of them.
    """
    mode = environment.NPU_DEVICE_UNEQUAL_START.get()
    variables = _variables_of(gradients) if runs_if_fetched() and mode != "ignore" else []
    starts = world.job.made(SessionStarts)
    if not variables or starts.graphs >= _GRAPHS or world.size < world.job.cluster.world_size:
        yield
        return
    starts.graphs += 1
    name, names, runs = f"session {starts.graphs}", list(map(variable_name, variables)), itertools.count(1)

    def compare(*arrays: np.ndarray) -> list[Any]:
        text = _compare(world.job, f"{name}, start {next(runs)}", names, list(map(checksum, arrays)))
        if text is not None and mode == "error":
            raise RuntimeError(f"rank {world.job.cluster.rank}: {text}")
        if text is not None:
            _log.warning("%s", text)
        return [np.int32(0)]

    with tf.control_dependencies([_once(f"npu_device {name}", variables, compare)]):
        yield


def _once(name: str, variables: Sequence[Any], compare: Any) -> Any:
    """Return an operation that calls a function with values in the first run of a session only."""
    done = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)

    def call() -> tf.Tensor:
        [result] = call_python(compare, [value_of(one) for one in variables], [tf.TensorSpec([], tf.int32)])
        with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=done, value=result)]):
            return tf.identity(result)

    return tf.cond(tf.raw_ops.VarIsInitializedOp(resource=done), lambda: tf.constant(0), call)


def _compare(job: Job, name: str, names: list[str], mine: list[int]) -> str | None:
    """Return a text about the variables that differ, on the last rank to come; nobody waits."""
    try:
        everybody = job.store.post(name, mine)
    except ClusterError:
        return None  # the next collective tells
    checksums = [everybody[rank] for rank in sorted(everybody)]
    if len(checksums) < job.cluster.world_size or any(len(one) != len(names) for one in checksums):
        return None
    found = differences(job.cluster, range(job.cluster.world_size), names, checksums)
    return None if found is None else f"the ranks begin training with different values of {found[1]}\n{_ADVICE}"


def _variables_of(gradients: Sequence[Any]) -> list[Any]:
    """Return the graph's trainable variables of the gradients' shapes and dtypes, if there are as many."""
    trainable = tf.compat.v1.trainable_variables()
    wanted = Counter(_kind(one) for one in gradients if one is not None)
    there = Counter(_kind(one) for one in trainable)
    return [one for one in trainable if wanted[_kind(one)] == there[_kind(one)]]


def _kind(value: Any) -> tuple[str, tf.DType]:
    return str(value.shape), value.dtype.base_dtype
