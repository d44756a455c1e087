"""Trainings that the watching must not complain of: gradients of the ranks differ, and nothing may be said."""

from __future__ import annotations

import os
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from heard import hears

import npu_device as npu

CASES = ("sgd", "adamw", "lamb", "ema", "clipped weights", "garden")
"""Kinds of training. ``garden`` is the model garden's AdamWeightDecay, for tf-keras."""


def optimizer_of(case: str, keras: Any) -> Any:
    """Return the optimizer of a case."""
    if case == "garden":
        from official.modeling.optimization.legacy_adamw import AdamWeightDecay

        return AdamWeightDecay(1e-3, weight_decay_rate=0.01)
    if case == "lamb" and not hasattr(keras.optimizers, "Lamb"):
        from official.modeling.optimization.lamb import LAMB

        return LAMB(1e-3)
    if case == "lamb":
        return keras.optimizers.Lamb(1e-3)
    if case == "ema":
        return keras.optimizers.SGD(1e-2, momentum=0.9, use_ema=True, ema_overwrite_frequency=5)
    return keras.optimizers.AdamW(1e-3, weight_decay=0.01) if case == "adamw" else keras.optimizers.SGD(1e-2)


def model_of(variables: int, keras: Any) -> Any:
    """Return a model with so many trainable variables."""
    layers = [keras.layers.Dense(24, "tanh") for _ in range(variables // 2 - 1)]
    return keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(1)])


@hears
def train(said: list[str], case: str, variables: int, steps: int, how: str) -> list[str]:
    """Train, and return what this rank said.

    Args:
        case: of ``CASES``.
        variables: the number of trainable variables.
        steps: the number of steps, each of them audited.
        how: ``"function"`` or ``"eager"``, with gradients reduced by hand; or ``"wrapped"``, in a function.
    """
    before = os.environ.get("NPU_DEVICE_AUDIT")
    os.environ["NPU_DEVICE_AUDIT"] = "1"
    try:
        tf.keras.utils.set_random_seed(1)
        model, optimizer = model_of(variables, tf.keras), optimizer_of(case, tf.keras)
        npu.distribute.broadcast(model.variables)
        if how == "wrapped":
            optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
        weights = model.trainable_variables

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - 1) ** 2)
            gradients = tape.gradient(loss, weights)
            gradients = gradients if how == "wrapped" else npu.distribute.all_reduce(gradients)
            optimizer.apply_gradients(zip(gradients, weights))
            if case == "clipped weights":
                for weight in weights:
                    weight.assign(tf.clip_by_value(weight, -0.2, 0.2))

        call: Callable[[Any], None] = step if how == "eager" else tf.function(step)
        rng = np.random.default_rng(npu.distribute.rank())
        for _ in range(steps):
            call(tf.constant(rng.normal(size=(4, 16)), tf.float32))
        return said
    finally:
        os.environ.pop("NPU_DEVICE_AUDIT") if before is None else os.environ.update(NPU_DEVICE_AUDIT=before)
