"""Hooks for ``MonitoredTrainingSession`` and estimators."""

from __future__ import annotations

import logging
import numbers
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.sessions import call_python
from npu_device._src.gradients.reduction import unreduced_among
from npu_device._src.training.distribute.variables import VARIABLES_OF_ONE_RANK, broadcast
from npu_device._src.training.opening import device
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.watching.digests import named
from npu_device._src.training.watching.session_ends import compare_at_end
from npu_device._src.world.world import value_of

_log = logging.getLogger("npu_device")
_UNREDUCED = (
    "the graph of this session applies gradients of %s that were not reduced: each of the %d ranks trains a model of "
    "its own.\nLikely cause: the optimizer isn't wrapped; the result of a reduction isn't used; or only the loss is "
    "reduced, for printing.\nWhat to do: NPUDistributedOptimizer(optimizer), or apply the result of "
    "npu.distribute.all_reduce(gradients)."
)


class NpuEmptyHook(tf.compat.v1.train.SessionRunHook):
    """Does nothing. Source: Ascend TF Adapter 1.15, ``NpuEmptyHook``."""


def broadcast_global_variables(root_rank: int = 0, index: Any = None) -> Any:
    """Return the operation that overwrites the global variables of the graph by the root's; all ranks run it.

    Args:
        root_rank: the rank whose values are sent.
        index: without effect.

    Raises:
        ValueError: there is no such rank.

    Source: Ascend TF Adapter 1.15, ``broadcast_global_variables``. There it takes only the trainable ones, so that a
    job in which only the root restores a checkpoint continues with different steps and optimizer states. State that a
    sharded optimizer keeps on one rank only stays as it is.
    """
    of_one_rank = {id(variable) for variable in tf.compat.v1.get_collection(VARIABLES_OF_ONE_RANK)}
    variables = tf.compat.v1.global_variables()
    on_all_ranks = [variable for variable in variables if id(variable) not in of_one_rank]
    numbers = [variable for variable in on_all_ranks if not _holds_strings(variable)]
    strings = list(filter(_holds_strings, on_all_ranks))
    sent = broadcast(numbers, root_rank)
    world = world_unless_child()
    if world is None or not strings:
        return sent
    of_root = world.from_root_of_any_size(list(map(value_of, strings)), root_rank)
    return tf.group(sent, *(variable.assign(text) for variable, text in zip(strings, of_root)))


def _holds_strings(variable: Any) -> bool:
    return bool(variable.dtype.base_dtype == tf.string)


class NPUBroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks the global variables of the root, with step and optimizer state, once the session is made or
    restored; warns if they differ when it ends without an error.

    Args:
        root_rank: the rank whose values are sent; default 0.
        index: without effect.

    On a single device nothing happens. Source: Ascend TF Adapter 1.15, ``NPUBroadcastGlobalVariablesHook``.
    """

    def __init__(self, root_rank: int | None = None, index: Any = None) -> None:
        self._root_rank = root_rank or 0
        self._broadcast: Any = None

    def begin(self) -> None:
        job = device.unless_child()
        if job is not None and job.cluster.world_size > 1:
            _warn_if_unreduced(job)
            # The graph takes no operations once the session has been made.
            self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._broadcast is not None:
            session.run(self._broadcast)

    def end(self, session: Any) -> None:
        if self._broadcast is not None:
            compare_at_end(session)


def _warn_if_unreduced(job: Job) -> None:
    """Warn on rank 0 if the graph trains variables by gradients none of which was reduced, and averages none either."""
    trained: dict[str, Any] = {}
    assigned = []
    for operation in tf.compat.v1.get_default_graph().get_operations():
        arguments = [argument.name for argument in operation.op_def.input_arg]
        inputs = dict(zip(arguments, operation.inputs))
        # Optimizers call their input "grad", and gradient descent calls it "delta".
        gradient = inputs.get("grad", inputs.get("delta"))
        if "var" in inputs and gradient is not None:
            trained[inputs["var"].op.name] = gradient
        elif operation.type.startswith("Assign") and "value" in inputs:
            # The assigned tensor may be a mean of the variable, as in local SGD, or a sum of gradients.
            assigned.append(inputs["value"])
    unreduced = unreduced_among([*trained.values(), *assigned])
    # If only some were reduced, the rest may be meant to be this rank's own.
    if trained and len(unreduced) == len(trained) + len(assigned) and job.cluster.rank == 0:
        _log.warning(_UNREDUCED, named(list(trained)), job.cluster.world_size)


def npu_hooks_append(hooks_list: Any = ()) -> list:
    """Return a list of hooks, to which ``NPUBroadcastGlobalVariablesHook(0)`` is added.

    Args:
        hooks_list: the list to append to, in place; anything that isn't a list gives a new one, as on Ascend.

    Source: Ascend TF Adapter 1.15, ``npu_hooks_append``.
    """
    if not isinstance(hooks_list, list):
        hooks_list = []
    hooks_list.append(NPUBroadcastGlobalVariablesHook(0))
    return hooks_list


class NPUCheckpointSaverHook(tf.compat.v1.train.CheckpointSaverHook):
    """TensorFlow's ``CheckpointSaverHook``; one that comes after several steps saves at the next occasion.

    Source: Ascend TF Adapter 1.15, ``NPUCheckpointSaverHook``.
    """


class NPUOutputTensorHook(tf.compat.v1.train.SessionRunHook):
    """Collects the values of tensors, and passes them to a function.

    Args:
        tensors: a dict of names and tensors, or a list of tensors, whose own names are used; also names of tensors or
            operations instead of tensors.
        dependencies: without effect.
        output_fn: called with a list of dicts, one per step; None (default) collects nothing.
        output_every_n_steps: number of steps between calls; 0 (default) calls it at the end only.

    Source: Ascend TF Adapter 1.15, ``NPUOutputTensorHook``.
    """

    def __init__(
        self,
        tensors: Any,
        dependencies: Any = None,
        output_fn: Callable | None = None,
        output_every_n_steps: int = 0,
    ) -> None:
        if not isinstance(tensors, dict):
            tensors = {getattr(tensor, "name", tensor): tensor for tensor in tensors or ()}
        # A copy, as the script may change its own.
        self._tensors = dict(tensors)
        for key, tensor in self._tensors.items():
            # The name of an operation alone would give None.
            if isinstance(tensor, str) and ":" not in tensor:
                self._tensors[key] = f"{tensor}:0"
        self._output_fn = output_fn
        self._output_every_n_steps = output_every_n_steps
        self._collected: list[dict[str, Any]] = []

    def before_run(self, run_context: Any) -> Any:
        if not self._output_fn:
            return None
        return tf.compat.v1.train.SessionRunArgs(self._tensors)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self._output_fn:
            self._collected.append(run_values.results)
            # The default 0 never equals the length, so that everything is handed over at the end.
            if len(self._collected) == self._output_every_n_steps:
                self._hand_over()

    def end(self, session: Any) -> None:
        if self._collected:
            self._hand_over()

    def _hand_over(self) -> None:
        # The next values go to a new list, since the function may keep the list that it is given.
        collected = self._collected
        self._collected = []
        if self._output_fn:
            self._output_fn(collected)


class TellMeStepOrLossHook(tf.compat.v1.train.SessionRunHook):
    """Writes the state of the training into the environment of the process after each step.

    Args:
        step: tensor of the current step, for ``STEP_NOW``.
        total_step: the last step, for ``TOTAL_STEP``.
        loss: tensor of the loss, for ``LOSS_NOW``.
        final_loss: the loss to reach, for ``TARGET_LOSS``.

    Raises:
        ValueError: neither ``step`` nor ``loss``.

    Source: Ascend TF Adapter 1.15, ``TellMeStepOrLossHook``.
    """

    def __init__(
        self, step: Any = None, total_step: Any = None, loss: Any = None, final_loss: Any = None
    ) -> None:
        if step is None and loss is None:
            raise ValueError("TellMeStepOrLossHook needs step or loss, and was given neither")
        variables = {
            "STEP_NOW": step,
            "TOTAL_STEP": total_step,
            "LOSS_NOW": loss,
            "TARGET_LOSS": final_loss,
        }
        self._readings = {
            name: variables[name] for name in variables if variables[name] is not None
        }

    def before_run(self, run_context: Any) -> Any:
        readings = self._readings.items()
        tensors = {name: reading for name, reading in readings if tf.is_tensor(reading)}
        return tf.compat.v1.train.SessionRunArgs(tensors)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        for name, reading in {**self._readings, **run_values.results}.items():
            os.environ[name] = str(reading)


class SetIterationsVarHook(tf.compat.v1.train.SessionRunHook):
    """Tells the operations of ``util.IterationPerLoop`` in the graph of the session how many steps to make.

    Args:
        iterations_per_loop: number of steps; default 1.

    Source: Ascend TF Adapter 1.15, ``SetIterationsVarHook``.
    """

    def __init__(self, iterations_per_loop: int | None = None) -> None:
        self._iterations_per_loop = iterations_per_loop or 1

    def after_create_session(self, session: Any, coord: Any) -> None:
        for loop in _loops.get(session.graph, ()):
            loop.load_iteration_per_loop_var(session, self._iterations_per_loop)


# What a Python function has to raise for an error of TensorFlow; for anything else it is an UnknownError. The first one
# tells scripts and ``MonitoredTrainingSession`` that the data has ended.
_RAISED_AS: dict[type[tf.errors.OpError], type[Exception]] = {
    tf.errors.OutOfRangeError: StopIteration,
    tf.errors.InvalidArgumentError: ValueError,
}


class IterationPerLoop:
    """An operation that runs another one several times; the number is set later.

    Source: Ascend TF Adapter 1.15, ``util.IterationPerLoop``.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._steps = 1
        self._failure: Exception | None = None

    def create_iteration_per_loop_var(self, train_op: Any) -> Any:
        """Return the operation for ``session.run``.

        Args:
            train_op: an operation that makes one step. What is fed to its placeholders is the same in each step.

        The operation is named "IterationOp". Anything else fetched together with it is computed once more.

        Raises:
            ValueError: ``train_op`` is not an operation.
        """
        _require_operation(train_op)
        # The inner run has to be fed with their values, which it can't see.
        nodes = compat.walk([train_op], compat.producers)
        placeholders = [node.outputs[0] for node in nodes if node.type.startswith("Placeholder")]

        def steps(*fed: np.ndarray) -> list[np.ndarray]:
            self._failure = None
            try:
                for _step in range(self._steps):
                    self._session.run(train_op, dict(zip(placeholders, fed)))
            except tuple(_RAISED_AS) as error:
                self._failure = _RAISED_AS[type(error)](error.message)
            return [np.array(self._steps, np.int64)]

        def checked(steps_made: np.ndarray) -> np.ndarray:
            if self._failure is not None:
                raise self._failure
            return steps_made

        # Loops that aren't referred to any more need no number of steps.
        _loops.setdefault(train_op.graph, weakref.WeakSet()).add(self)
        with train_op.graph.as_default():
            [steps_made] = call_python(steps, placeholders, [tf.TensorSpec([], tf.int64)])
            # In ``steps`` the dataset around it would make another error of the failure.
            with tf.control_dependencies([tf.numpy_function(checked, [steps_made], tf.int64)]):
                return tf.no_op(name="IterationOp")

    def load_iteration_per_loop_var(self, sess: Any, iterations_per_loop: int = 1) -> None:
        """Set how many steps the operation makes, and in which session.

        Args:
            sess: the session that will run it.
            iterations_per_loop: number of steps, from 1.

        Raises:
            ValueError: another number.
        """
        self._session = sess
        self._steps = _checked(iterations_per_loop)


# Weak on both sides: a loop knows its session, which knows the graph. The operation keeps the loop alive.
_loops: weakref.WeakKeyDictionary[tf.Graph, weakref.WeakSet[IterationPerLoop]] = (
    weakref.WeakKeyDictionary()
)


def set_iteration_per_loop(sess: Any, train_op: Any, iterations_per_loop: int = 1) -> Any:
    """Return an operation "IterationOp" that makes several training steps in one ``session.run``.

    Args:
        sess: the session that will run it.
        train_op: an operation that makes one step, see ``IterationPerLoop``.
        iterations_per_loop: number of steps, from 1, for which ``train_op`` itself is returned.

    Raises:
        ValueError: ``train_op`` is not an operation; another number of steps.

    Source: Ascend TF Adapter 1.15, ``util.set_iteration_per_loop``.
    """
    _require_operation(train_op)
    if _checked(iterations_per_loop) == 1:
        return train_op
    loop = IterationPerLoop()
    iterations = loop.create_iteration_per_loop_var(train_op)
    loop.load_iteration_per_loop_var(sess, iterations_per_loop)
    return iterations


def _require_operation(train_op: Any) -> None:
    if not isinstance(train_op, tf.Operation):
        raise ValueError(
            f"train_op must be a tf.Operation; found type {type(train_op).__name__}: pass tensor.op"
        )


def _checked(iterations_per_loop: int) -> int:
    if not isinstance(iterations_per_loop, numbers.Integral) or iterations_per_loop < 1:
        raise ValueError(
            f"iterations_per_loop must be a whole number from 1; found {iterations_per_loop!r}"
        )
    return int(iterations_per_loop)
