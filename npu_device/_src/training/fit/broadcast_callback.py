"""The callback that makes all ranks start ``fit`` from the same weights and the same optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.distribute.variables import broadcast
from npu_device._src.training.fit import xla
from npu_device._src.training.fit.replica import replica_of
from npu_device._src.training.fit.sources import PutBack
from npu_device._src.training.opening import device
from npu_device._src.training.opening.current_world import current_world
from npu_device._src.training.watching import training_state

_logger = logging.getLogger("npu_device")


class NPUBroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Broadcast model weights and optimizer state from one rank to all before the first step of ``fit``.

    Args:
        root_rank: the rank whose values are sent.

    Raises:
        RuntimeError: the model has no weights yet, runs eagerly, and can't be called on its first batch.

    This happens once, after the first ``fit`` has called all ``on_train_begin`` and ``on_epoch_begin``, so that values
    which other callbacks restored on the root are included. Trainable weights, batch-norm statistics, steps, slots,
    moving averages, learning rates and loss scales are sent; random seeds and metrics stay as they are on
    each rank.

    Variables that only the first step would make are made beforehand, by tracing it; a model that runs eagerly is
    called on the first batch. State that only its own ``train_step`` makes is sent after the first step, with the
    weights: with ``steps_per_execution`` above 1, some steps differ between the ranks, and a warning says so.

    State that differs in number or shape between the ranks, as with ``grouping_gradients_apply``, stays as it is, with
    a warning. For a replicated model (``npu.distribute.replicate``), the callback only chooses the rank. It also turns
    ``jit_compile`` off, which Keras 3 turns on by itself on a GPU: XLA can't compile a step that waits for other ranks.
    On a single device nothing happens.

    Source: Ascend TF Adapter 2.x, ``NPUBroadcastGlobalVariablesCallback``, by its documentation: in the released code
        it is never called.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._began = False
        # Each rank's shapes of the optimizer state before the first step; None but during that step.
        self._first_shapes: list | None = None

    def set_model(self, model: Any) -> None:
        """Take the model, before Keras traces its step."""
        super().set_model(model)
        xla.turn_off(model)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Send everything before the first step."""
        if self._began:
            return
        self._began = True
        if device.unless_child() is None:
            return
        replica = replica_of(self.model)
        # The replica sends everything itself, once the first batch has built the model.
        if replica is not None:
            replica.root_rank = self._root_rank
            return
        if not tf.executing_eagerly():
            broadcast_keras_model(self.model, self._root_rank)
            return
        # A step of the script may make variables of its own, which only tracing it shows.
        own_step = training_state.uses_keras_step(self.model)
        if training_state.has_all_layers_built(self.model) and (own_step or self.model.run_eagerly):
            if own_step:
                training_state.build_optimizer(self.model)
            self._send()
        else:
            self._send_at_the_first_batch()

    def _send_at_the_first_batch(self) -> None:
        # The structure of a batch is known where `fit` calls the model's train function, an attribute of the model that
        # Keras reads at each step.
        model = self.model
        train_function = model.train_function

        def send_and_train(iterator: Any) -> Any:
            # The function is put back first, since only the first call sends.
            model.train_function = train_function
            if model.run_eagerly:
                # The batch that is taken to look at is put back, to be trained on.
                batch = next(iterator)
                iterator = PutBack([batch], iterator)
                training_state.call_on(model, batch)
            else:
                training_state.trace_step(model, model.train_step, iterator.element_spec)
            self._send()
            return train_function(iterator)

        model.train_function = send_and_train

    def _send(self) -> None:
        self._first_shapes = _shapes_by_rank(self.model)
        # No optimizer state is sent where optimizers differ, but the weights have to be the same to begin with.
        variables_of = training_state.weights
        if _are_alike(self._first_shapes):
            variables_of = training_state.training_variables
        broadcast(variables_of(self.model), self._root_rank)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Send what the first step has made."""
        if self._first_shapes is None:
            return
        shapes = _shapes_by_rank(self.model)
        is_unchanged = shapes == self._first_shapes
        self._first_shapes = None
        if not _are_alike(shapes):
            _logger.warning(
                "the optimizers of the ranks have different variables (%d on this rank), and each rank continues with "
                "its own. That is right with grouping_gradients_apply; otherwise the weights will differ.\n"
                "What to do: make the same optimizers for the same variables on every rank.",
                len(training_state.optimizer_state(self.model)),
            )
            return
        if is_unchanged:
            return
        broadcast(training_state.training_variables(self.model), self._root_rank)
        steps = compat.steps_per_call(self.model)
        if steps > 1:
            _logger.warning(
                "the state of the optimizer was created in the first %d steps, which every rank made by itself; "
                "from now on, all ranks have the root's.\n"
                "What to do: build the optimizer before fit, or use steps_per_execution=1.",
                steps,
            )


def broadcast_keras_model(model: Any, root_rank: int = 0) -> None:
    """Overwrite all weights of a Keras model, and its optimizers' state, with those of the root; every rank has to call
    it. See ``npu.distribute.broadcast``.

    Args:
        model: a Keras model that is built.
        root_rank: the rank whose values are sent (default 0).

    Raises:
        ValueError: there is no such rank, or the ranks have different variables.
    """
    built = training_state.has_all_layers_built(model)
    if built and tf.executing_eagerly() and training_state.uses_keras_step(model):
        training_state.build_optimizer(model)
    operation = broadcast(training_state.training_variables(model), root_rank)
    # A model of TensorFlow 1 has its weights in Keras's session, which runs the operation.
    if operation is not None:
        compat.session_backend().get_session().run(operation)


def broadcast_helper(variables: Sequence, root_rank: int = 0) -> None:
    """Overwrite variables with those of the root (Ascend's name for ``npu.distribute.broadcast``; here ``root_rank``
    has an effect).

    Args:
        variables: the variables, in the same order on every rank.
        root_rank: the rank whose values are sent (default 0).

    Raises:
        ValueError: there is no such rank, or the ranks have different variables.
    """
    broadcast(list(variables), root_rank)


def _shapes_by_rank(model: Any) -> list:
    """Return the shapes and dtypes of the optimizer state of each rank; every rank has to ask."""
    state = training_state.optimizer_state(model)
    shapes = [(tuple(variable.shape), tf.as_dtype(variable.dtype).name) for variable in state]
    world = current_world()
    assert world is not None
    return world.objects(shapes, "state of the optimizers")


def _are_alike(shapes_by_rank: list) -> bool:
    return all(shapes == shapes_by_rank[0] for shapes in shapes_by_rank)
