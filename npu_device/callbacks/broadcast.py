"""The callback that makes all ranks start ``fit`` from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device import _compat
from npu_device.distribute.variables import broadcast


class NPUBroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Broadcast the model's weights from one rank to all at the first batch of the first ``fit``.

    Args:
        root_rank: the rank whose weights count.

    Trainable weights and batch-norm statistics are sent; random seeds, metrics and the optimizer's state stay each
    rank's own. A model whose weights don't exist before its first step (a Keras 2 subclass that was never built) is
    sent right after that step. On a single device nothing happens.

    Source: Ascend TF Adapter 2.x, ``NPUBroadcastGlobalVariablesCallback``, by its documentation: in the released code
        it is never called.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._sent = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Send the weights if they exist."""
        self._send_once()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Send the weights that the first step has made."""
        self._send_once()

    def _send_once(self) -> None:
        if not self._sent and self.model.weights:
            self._sent = True
            broadcast_keras_model(self.model, self._root_rank)


def broadcast_keras_model(model: Any, root_rank: int = 0) -> None:
    """Overwrite all weights of a Keras model with those of the root; every rank has to call it. See
    ``npu.distribute.broadcast``.
    """
    operation = broadcast(list(model.weights), root_rank)
    if operation is not None:  # a model of TensorFlow 1, whose weights live in Keras's session
        _compat.session_backend().get_session().run(operation)


def broadcast_helper(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Overwrite variables with those of the root (Ascend's name for ``npu.distribute.broadcast``; here ``root_rank``
    counts).
    """
    broadcast(list(variables), root_rank)
