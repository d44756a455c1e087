"""Trainings for the tests of ``npu.distribute.replicate`` by other calls than ``fit`` alone: Ascend's callback and
wrapper, and ``train_on_batch``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from fit_models import SAMPLES, compile_model, make_model, outcome, samples

import npu_device as npu


def body_with_the_callback(kind: str, directory: str) -> Any:
    """Ascend's callback in the ``fit`` of a replicated model, and its wrapped optimizer: as on one process."""
    from npu_device.distribute.hccl import npu_callbacks_append

    keras = tf.keras
    model = make_model(kind, directory)
    optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(keras.optimizers.Adam(0.02))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], run_eagerly=kind == "subclassed")
    model = npu.distribute.replicate(model)
    x, y = samples()
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=npu_callbacks_append([])))


def body_from_another_rank() -> Any:
    """The last rank's initial weights, as a callback asks for them: returned as they were and after two trainings."""
    from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

    model = make_model("functional")
    initial = [np.asarray(value) for value in model.get_weights()]
    model.compile(optimizer=tf.keras.optimizers.SGD(0.0), loss="mse")
    model = npu.distribute.replicate(model)
    callbacks = [NPUBroadcastGlobalVariablesCallback(npu.distribute.size() - 1)]
    for _ in range(2):
        model.fit(np.ones([6, 6], np.float32), np.ones([6, 3], np.float32), verbose=0, callbacks=callbacks)
    return initial, [np.asarray(value) for value in model.get_weights()]


def body_batch_by_batch(directory: str) -> Any:
    """``train_on_batch`` and the like, without ``fit``, on numpy's arrays."""
    model = make_model("functional", directory)
    compile_model(model)
    model = npu.distribute.replicate(model)
    x, y = samples()
    batches = [(x[begin : begin + 16], y[begin : begin + 16]) for begin in range(0, SAMPLES, 16)]
    logs = [np.asarray(model.train_on_batch(*batch)) for batch in batches]
    tested = np.asarray(model.test_on_batch(x, y))
    return {"weights": model.get_weights(), "logs": logs, "tested": tested, "predicted": model.predict_on_batch(x)}
