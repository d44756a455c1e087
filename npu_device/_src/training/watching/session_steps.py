"""Compares the variables of sessions of TensorFlow 1 while they train: before the first step, and after some others.

The ranks post checksums, and none waits for another: the last rank warns. ``session_ends`` compares at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Callable

import numpy as np
import tensorflow as tf

from npu_device._src import environment
from npu_device._src.collectives.graph import origin
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.sessions import SessionSteps
from npu_device._src.gradients.reduction import dense_tensors, with_values
from npu_device._src.training.watching.digests import (
    checksum,
    different_start,
    posted_differences,
    variable_name,
)
from npu_device._src.training.watching.same_variables import as_many_as_gradients, note_equal
from npu_device._src.training.watching.schedule import NEVER, next_look
from npu_device._src.training.watching.session_ends import CAUSES, REMEDY
from npu_device._src.world.world import World, value_of

_log = logging.getLogger("npu_device")
_HOOK = (
    "\nLikely cause: no broadcast, or a different seed on each rank.\nWhat to do: pass "
    "npu_bridge.npu_init.NPUBroadcastGlobalVariablesHook(0) to the hooks of the session; or run the operation "
    "npu_bridge.estimator.npu.npu_hook.broadcast_global_variables(0) once, after the variables have got their values."
)
_DRIFTED = (
    "the ranks have drifted apart in a session: seen after step %d (after step %d they were equal), in %s\n"
    f"Likely cause: {CAUSES}\nWhat to do: {REMEDY}"
)
_MOST_GRAPHS = 100  # graphs of sessions whose variables are compared
_MOST_SESSIONS = 16  # sessions of a graph whose last checksums are kept
# A look takes no longer than a step, which reads and sends as many bytes: at most 0.05 % of the time.
_LARGEST_INTERVAL = 2000
_READS = ("ReadVariableOp", "VariableV2", "Variable")


class _Graphs(list[str]):
    """The comparisons in graphs for sessions; a component of the job."""


def reduce_compared(world: World, gradients: Sequence, reduce: Callable[[], list]) -> list:
    """Reduce gradients; in a graph for sessions, compare the variables to which they belong before some steps."""
    mode = environment.NPU_DEVICE_UNEQUAL_START.get()
    is_watched = mode != "ignore" or environment.NPU_DEVICE_AUDIT.get() != "off"
    graphs = world.job.component_or_new(_Graphs)
    is_whole_job = world.size == world.job.cluster.world_size
    variables = []
    is_session = not tf.compat.v1.executing_eagerly_outside_functions()
    if is_session and is_watched and is_whole_job and len(graphs) < _MOST_GRAPHS:
        variables = _variables_of(gradients)
    if not variables:
        return reduce()
    if mode != "ignore":
        note_equal(world, variables)
    name = f"session {len(graphs) + 1}"
    graphs.append(name)
    compare_if_due = _comparing(world.job, name, list(map(variable_name, variables)))
    steps = SessionSteps(name)
    looked = steps.call_when_due(compare_if_due, lambda: list(map(value_of, variables)))
    with tf.control_dependencies([looked]):
        reduced = reduce()
    # One of the results, which the update needs, counts the step.
    position = next(position for position, tensor in enumerate(reduced) if tensor is not None)

    def counting(tensor: tf.Tensor) -> tf.Tensor:
        return steps.counted(looked, tensor)

    reduced[position] = with_values(reduced[position], counting)
    return reduced


def _variables_of(gradients: Sequence) -> list:
    """Return the trainable variables of the graph being built to which gradients belong, by their shapes."""
    # The mean of variables themselves, as in local SGD, is taken of values that differ.
    if any(origin(tensor).op.type in _READS for tensor in dense_tensors(gradients)):
        return []
    return as_many_as_gradients(gradients, tf.compat.v1.trainable_variables())


def _comparing(job: Job, name: str, names: Sequence[str]) -> Callable[..., int]:
    """Return a function that compares the variables of a graph, in all of its sessions."""
    # By session, the number of steps that were over in the latest look, and the checksums.
    looks: dict[int, tuple[int, list[int]]] = {}

    def compare_if_due(session: int, steps: int, *arrays: np.ndarray) -> int:
        """Compare the variables after some steps of a session; return after how many steps to compare them next."""
        checksums = list(map(checksum, arrays))
        label = f"{name}, start {session}"
        if steps == 0:
            error = different_start(job, label, names, _HOOK, checksums)
            if error:
                raise RuntimeError(error)
        elif session in looks:
            # Without the comparison before it, a drift couldn't be told from a different start.
            earlier_steps, earlier_checksums = looks[session]
            text = posted_differences(
                job,
                f"{label}, step {steps}",
                names,
                [checksums, earlier_checksums],
                # Variables that differed earlier were reported then.
                lambda equal: equal[1] & ~equal[0],
            )
            if text:
                _log.warning(_DRIFTED, steps, earlier_steps, text)
        looks[session] = steps, checksums
        if len(looks) > _MOST_SESSIONS:
            del looks[min(looks)]
        return _next_look(steps)

    return compare_if_due


def _next_look(steps: int) -> int:
    """Return the number of steps before the next look."""
    interval = environment.NPU_DEVICE_AUDIT.get()
    if interval == "off":
        return NEVER
    if interval != "auto":
        return steps + int(interval)
    # Each interval is a fifth of the steps so far: without a collective, the ranks can't agree on one by time.
    return next_look(steps, min(steps // 5, _LARGEST_INTERVAL))
