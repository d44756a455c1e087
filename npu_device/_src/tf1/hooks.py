"""Hooks for ``MonitoredTrainingSession`` and estimators."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from npu_device._src.tf1.iterations import load_all
from npu_device._src.training.groups import get_rank_size
from npu_device._src.training.sharded import VARIABLES_OF_ONE_RANK
from npu_device._src.training.variables import broadcast

_Arguments = tf.compat.v1.train.SessionRunArgs


class NpuEmptyHook(tf.compat.v1.train.SessionRunHook):
    """Does nothing. Source: Ascend TF Adapter 1.15, ``NpuEmptyHook``."""


def broadcast_global_variables(root_rank: int = 0, index: Any = None) -> Any:
    """Return the operation that overwrites the graph's global variables with those of the root; all ranks run it.

    Args:
        root_rank: the rank whose values are sent.
        index: without effect.

    Source: Ascend TF Adapter 1.15, ``broadcast_global_variables``. There it takes only the trainable ones, so that a
    job in which only the root restores a checkpoint continues with different steps and optimizer states. State that a
    sharded optimizer keeps on one rank only stays as it is.
    """
    of_one_rank = {id(variable) for variable in tf.compat.v1.get_collection(VARIABLES_OF_ONE_RANK)}
    return broadcast([one for one in tf.compat.v1.global_variables() if id(one) not in of_one_rank], root_rank)


class NPUBroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks the root's global variables, among them the step and the optimizer's state, when the session has
    been made or restored.

    Args:
        root_rank: the rank whose values are sent; default 0.
        index: without effect.

    On a single device nothing happens.

    Source: Ascend TF Adapter 1.15, ``NPUBroadcastGlobalVariablesHook``.
    """

    def __init__(self, root_rank: int | None = None, index: Any = None) -> None:
        self._root_rank = root_rank or 0
        self._index = index
        self._broadcast: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph."""
        self._broadcast = broadcast_global_variables(self._root_rank, self._index) if get_rank_size() > 1 else None

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        if self._broadcast is not None:
            session.run(self._broadcast)


def npu_hooks_append(hooks_list: Any = ()) -> list[Any]:
    """Add ``NPUBroadcastGlobalVariablesHook(0)`` to a list of hooks.

    Args:
        hooks_list: the list to append to, in place; anything that isn't a list gives a new one, as on Ascend.

    Returns:
        The list.

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
    """Collects the values of tensors, and hands them to a function.

    Args:
        tensors: a dict of names and tensors, or a list of tensors, which are called by their own names.
        dependencies: without effect.
        output_fn: called with a list of dicts, one per step; None collects nothing.
        output_every_n_steps: how often it is called; 0 (default) at the end only.

    Source: Ascend TF Adapter 1.15, ``NPUOutputTensorHook``.
    """

    def __init__(
        self,
        tensors: Any,
        dependencies: Any = None,
        output_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
        output_every_n_steps: int = 0,
    ) -> None:
        self._tensors = dict(tensors) if isinstance(tensors, dict) else {tensor.name: tensor for tensor in tensors}
        self._output = output_fn
        self._every = output_every_n_steps
        self._values: list[dict[str, Any]] = []

    def before_run(self, run_context: Any) -> Any:
        """Fetch the tensors."""
        return _Arguments(self._tensors) if self._output else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Keep the values, and hand them over when it is time."""
        if self._output:
            self._values.append(run_values.results)
            if len(self._values) == self._every:
                self._hand_over()

    def end(self, session: Any) -> None:
        """Hand over the rest."""
        if self._values:
            self._hand_over()

    def _hand_over(self) -> None:
        values, self._values = self._values, []
        if self._output:
            self._output(values)


class SetIterationsVarHook(tf.compat.v1.train.SessionRunHook):
    """Tells the operations of ``util.IterationPerLoop`` in the session's graph how many steps to make.

    Args:
        iterations_per_loop: number of steps; default 1.

    Source: Ascend TF Adapter 1.15, ``SetIterationsVarHook``.
    """

    def __init__(self, iterations_per_loop: int | None = None) -> None:
        self._iterations_per_loop = iterations_per_loop or 1

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Load the number of steps."""
        load_all(session, self._iterations_per_loop)


class TellMeStepOrLossHook(tf.compat.v1.train.SessionRunHook):
    """Writes the progress of training into the process's environment after each step.

    Args:
        step: tensor of the current step, for ``STEP_NOW``.
        total_step: the last step, for ``TOTAL_STEP``.
        loss: tensor of the loss, for ``LOSS_NOW``.
        final_loss: the loss to reach, for ``TARGET_LOSS``.

    Raises:
        ValueError: neither ``step`` nor ``loss``.

    Source: Ascend TF Adapter 1.15, ``TellMeStepOrLossHook``.
    """

    def __init__(self, step: Any = None, total_step: Any = None, loss: Any = None, final_loss: Any = None) -> None:
        if step is None and loss is None:
            raise ValueError("TellMeStepOrLossHook needs step or loss, and was given neither")
        given = {"STEP_NOW": step, "TOTAL_STEP": total_step, "LOSS_NOW": loss, "TARGET_LOSS": final_loss}
        self._fetched = {name: value for name, value in given.items() if value is not None and tf.is_tensor(value)}
        self._fixed = {name: value for name, value in given.items() if value is not None and not tf.is_tensor(value)}

    def before_run(self, run_context: Any) -> Any:
        """Fetch the tensors."""
        return _Arguments(self._fetched)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Write everything."""
        for name, value in {**self._fixed, **run_values.results}.items():
            os.environ[name] = str(value)
