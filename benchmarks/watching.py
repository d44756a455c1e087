"""What watching costs, and that it raises no false alarm: ``npurun -n 2 python -m benchmarks.watching [cost]``.

Without an argument, small models are trained with gradients reduced by hand and by a wrapped optimizer, in functions
and eagerly, and audited in every step. The gradients of the ranks differ; nothing may be said. With ``cost``, steps
with and without watching alternate in one process.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from statistics import median
from typing import Any, Callable

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


def train(case: str, variables: int, steps: int, how: str) -> list[str]:
    """Train, and return what this rank said.

    Args:
        case: of ``CASES``.
        variables: the number of trainable variables.
        steps: the number of steps, each of them audited.
        how: ``"function"`` or ``"eager"``, with gradients reduced by hand; or ``"wrapped"``, in a function.
    """
    import numpy as np
    import tensorflow as tf

    import npu_device as npu

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("npu_device")
    log.addHandler(handler)
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
        log.removeHandler(handler)
        os.environ.pop("NPU_DEVICE_AUDIT") if before is None else os.environ.update(NPU_DEVICE_AUDIT=before)


def cost(name: str, batch: Any, model: Any, rounds: int, steps: int) -> str:
    """Return a line with the medians of a step's time with and without watching, gradients reduced by hand."""
    import tensorflow as tf

    import npu_device as npu
    from npu_device._src.training.schedule import not_yet

    npu.distribute.broadcast(model.variables)
    weights, optimizer = model.trainable_variables, tf.keras.optimizers.SGD(1e-3)
    optimizer.build(weights)

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = npu.distribute.all_reduce(tape.gradient(loss, weights))
        optimizer.apply_gradients(zip(gradients, weights))

    watched, bare = tf.function(step), tf.function(step)
    with not_yet():
        bare(batch)
    times: dict[Any, list[float]] = {watched: [], bare: []}
    for _ in range(25):
        watched(batch)
    for _ in range(rounds):
        for call, found in times.items():
            began = time.perf_counter()
            for _ in range(steps):
                call(batch)
            found.append((time.perf_counter() - began) / steps)
    differences = [one - other for one, other in zip(times[watched], times[bare])]
    base = median(times[bare])
    return (
        f"{name}, {len(weights)} variables: {1e3 * base:.2f} ms without, {1e3 * median(times[watched]):.2f} ms with; "
        f"in pairs {1e6 * median(differences):+.0f} µs, {100 * median(differences) / base:+.2f} %"
    )


def main() -> None:
    """Run what the arguments ask for."""
    import tensorflow as tf

    import npu_device as npu

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["alarms", "cost"], default="alarms")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--variables", default="12,200")
    parser.add_argument("--how", default="function,wrapped,eager")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    npu.open().as_default()
    rank = npu.distribute.rank()
    if given.what == "cost":
        x = tf.random.stateless_normal([8, 16], [rank, 0])
        images = tf.random.stateless_normal([4, 96, 96, 3], [rank, 0])
        wide = [tf.keras.layers.Dense(512, "relu"), tf.keras.layers.Dense(512, "relu"), tf.keras.layers.Dense(10)]
        digits = tf.random.stateless_normal([128, 784], [rank, 0])
        line = cost("MNIST", digits, tf.keras.Sequential([tf.keras.Input([784]), *wide]), given.rounds, 10)
        print(line if rank == 0 else "", flush=True)
        for variables in map(int, given.variables.split(",")):
            line = cost("MLP", x, model_of(variables, tf.keras), given.rounds, 20)
            print(line if rank == 0 else "", flush=True)
        resnet = tf.keras.applications.ResNet50(weights=None, input_shape=(96, 96, 3))
        line = cost("ResNet-50", images, resnet, given.rounds, 1)
        print(line if rank == 0 else "", flush=True)
        return
    tf_keras = hasattr(tf.keras.optimizers, "legacy") and not hasattr(tf.keras.optimizers, "Lamb")
    for case in given.cases.split(","):
        if case == "garden" and not tf_keras:
            continue
        for variables in map(int, given.variables.split(",")):
            for how in given.how.split(","):
                began = time.perf_counter()
                said = train(case, variables, given.steps, how)
                seconds = time.perf_counter() - began
                print(
                    f"rank {rank}: {case}, {variables} variables, {how}, {given.steps} steps, {seconds:.0f} s: {said}"
                )


if __name__ == "__main__":
    main()
