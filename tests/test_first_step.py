"""The first-step check of a replicated model: what can't be divided is named before the first step, with the remedy."""

from __future__ import annotations

import contextlib
import io
import random
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, settings, warnings_of_package
from fit_models import samples
from pool import Pool
from rank_comparison import same_bits

import npu_device as npu

SAMPLES = 12
FUNCTIONAL = (
    "functional", "mixing operation", "mean", "sum", "valid steps", "sorted", "few labels", "added sum", "noise",
    "size in a layer", "optimizer that clips", "codebook", "start by the batch",
)  # fmt: skip


def model_and_data(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a compiled model and the arguments of ``fit``, for one batch; its step is Keras's, or as its kind says."""
    keras = tf.keras
    keras.utils.set_random_seed(3)
    x, y = samples(SAMPLES)
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": SAMPLES, "verbose": 0, "shuffle": False}
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    if kind in FUNCTIONAL:
        model = _functional(kind)
        if kind == "sorted":
            data["y"] = np.sort(y != 0)[::-1].astype(
                np.int32
            )  # the first half of the samples counts
        if kind == "few labels":
            data["y"] = np.where(np.arange(SAMPLES) == 5, 2, 0)
        if kind == "size in a layer":
            data = {"x": whole.batch(SAMPLES, drop_remainder=True), "verbose": 0}
    elif kind == "ragged":
        lengths = [1, 6, 1, 6, 1, 6, 5, 3]
        steps, _ = samples(sum(lengths))
        data["x"], data["y"] = (
            tf.RaggedTensor.from_row_lengths(each, lengths) for each in (steps, steps[:, :1])
        )
        inputs = keras.Input([None, 6], ragged=True)
        model = keras.Model(inputs, keras.layers.TimeDistributed(keras.layers.Dense(1))(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    else:
        model = _with_step(kind)
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=kind == "eager")
        if kind == "own function":
            model.dense.build((None, 6))
            model(x[:2])  # the function keeps what it has been traced to
            data = {"x": whole.batch(SAMPLES), "verbose": 0}
        elif kind.startswith("pairs"):
            pairs = np.stack([x, x + 1])
            spec = tf.TensorSpec([None, 12, 6] if "any number" in kind else [2, 12, 6])
            data = {
                "x": tf.data.Dataset.from_generator(lambda: [pairs], output_signature=spec),
                "verbose": 0,
            }
        elif kind == "valid steps of words":
            words = np.arange(SAMPLES * 4).reshape(SAMPLES, 4) % 5
            data["x"] = words * (np.arange(4) < 1 + np.arange(SAMPLES)[:, None] % 4)
        elif kind.startswith("fixed size"):
            data = {"x": whole.batch(6, drop_remainder=True), "verbose": 0}
    return model, data


def _with_step(kind: str) -> Any:
    keras, layers = tf.keras, tf.keras.layers

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)
            self.words = layers.Embedding(5, 3)
            self.noise = [
                layers.Dropout(0.5),
                layers.GaussianNoise(1.0),
                layers.BatchNormalization(),
            ]
            self.bank = self.add_weight(
                name="bank", shape=(8, 3), initializer="zeros", trainable=False
            )
            self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)
            self.forward = tf.function(lambda x: self.dense(self.noise[0](x, training=True)))

        def call(self, x: Any) -> Any:
            return self.forward(x) if kind == "own function" else self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data if isinstance(data, tuple) else (data, None)
            if kind == "own noise":
                x += tf.random.normal(tf.shape(x)) * tf.random.uniform([tf.shape(x)[0], 1])
                for layer in self.noise:
                    x = layer(x, training=True)
            elif kind == "shuffles":
                x = tf.random.shuffle(x)
            elif kind == "python":
                x = tf.ensure_shape(
                    tf.numpy_function(lambda array: array, [x], tf.float32), [None, 6]
                )
            elif kind == "draws in a branch":
                x = tf.cond(
                    tf.reduce_mean(x) > -9.0, lambda: x + tf.random.normal(tf.shape(x)), lambda: x
                )
            elif kind.startswith("fixed size"):
                x += tf.zeros([x.shape[0], 6])
            elif kind == "sharpness-aware":
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(self(x) ** 2)
                [slope] = tape.gradient(loss, [self.dense.kernel])
                before = tf.identity(tf.convert_to_tensor(self.dense.kernel))
                self.dense.kernel.assign(before + 0.1 * slope / tf.norm(slope))
            with tf.GradientTape() as tape:
                if kind == "valid steps of words":
                    error, valid = (
                        tf.reduce_sum(self.words(x) ** 2, axis=-1),
                        tf.cast(x > 0, tf.float32),
                    )
                    loss = tf.reduce_sum(error * valid) / tf.reduce_sum(valid)  # of words
                elif kind.startswith("pairs"):
                    loss = tf.reduce_mean((self(x[0]) - self(x[1])) ** 2)
                elif kind in ("contrastive", "gathered"):
                    out = self(x)
                    others = npu.distribute.all_gather(out) if kind == "gathered" else out
                    squares = (out[:, None] - others[None]) ** 2  # samples meet here
                    distances = tf.reduce_sum(squares, axis=-1)
                    loss = tf.reduce_mean(tf.sqrt(distances + 0.1))
                else:
                    each = keras.losses.sparse_categorical_crossentropy(
                        y, self(x, training=True), from_logits=True
                    )
                    loss = each if kind.startswith("per sample") else tf.reduce_mean(each)
                    if "penalty" in kind:
                        loss = tf.reduce_sum(loss) + tf.reduce_sum(
                            tf.convert_to_tensor(self.dense.kernel) ** 2
                        )
                    if "all weights" in kind:
                        loss += tf.reduce_sum(tf.convert_to_tensor(self.dense.bias) + 1) ** 2
                    tf.print("not in the check")
            variables = (
                self.words if kind == "valid steps of words" else self.dense
            ).trainable_variables
            gradients = tape.gradient(loss, variables)
            if kind == "sharpness-aware":
                self.dense.kernel.assign(before)
            if kind == "clips reduced":
                gradients = npu.distribute.all_reduce(gradients)
            if kind.startswith("clips"):
                gradients, _ = tf.clip_by_global_norm(gradients, 99.0)  # never that large
            if kind == "by hand":
                for variable, gradient in zip(variables, gradients):
                    variable.assign(tf.convert_to_tensor(variable) - 0.1 * gradient)
            elif kind == "applies in a branch":
                apply = self.optimizer.apply_gradients
                tf.cond(loss > -1.0, lambda: (apply(zip(gradients, variables)), 0)[1], lambda: 0)
            else:
                self.optimizer.apply_gradients(zip(gradients, variables))
            if "bank" in kind:
                out = npu.distribute.all_gather(self(x)) if "gathered" in kind else self(x)
                bank = tf.concat([out, tf.convert_to_tensor(self.bank)], axis=0)[:8]
                self.bank.assign(bank)  # set here
            elif kind == "counter":
                self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
            return {"value": tf.reduce_mean(loss)}

    return Model()


def _functional(kind: str) -> Any:
    keras, layers = tf.keras, tf.keras.layers

    class Hidden(layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.kept = self.add_weight(
                name="kept", shape=[4], initializer="ones", trainable=kind != "codebook"
            )

        def call(self, values: Any, training: bool = False) -> Any:
            if kind == "codebook":
                total = tf.reduce_sum(values, axis=0)
                self.kept.assign(0.9 * tf.convert_to_tensor(self.kept) + 0.1 * total)
            elif kind == "start by the batch":
                self.kept.assign(1 / tf.math.reduce_std(values, axis=0))
                return values * tf.convert_to_tensor(self.kept)
            if kind == "added sum":
                self.add_loss(1e-4 * tf.reduce_sum(values**2))
            elif kind == "noise" and training:
                return values * tf.floor(0.8 + tf.random.uniform([tf.shape(values)[0], 1]))
            elif kind == "size in a layer":
                return tf.reshape(values, [SAMPLES, 4])
            return values

    def own_loss(y: Any, out: Any) -> Any:
        y = tf.reshape(y, [-1])  # tf-keras gives it a second axis
        each = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
        valid = tf.cast(y != 0, each.dtype)
        if kind == "few labels":
            return tf.reduce_sum(each * valid) / tf.maximum(tf.reduce_sum(valid), 1.0)
        if kind in ("valid steps", "sorted"):
            return tf.reduce_sum(each * valid) / tf.reduce_sum(valid)
        return tf.reduce_sum(each) if kind == "sum" else tf.reduce_mean(each)

    inputs = keras.Input([6])
    hidden = layers.Dense(4, activation="tanh")(inputs)
    if kind == "noise":
        hidden = layers.Dropout(0.9)(layers.BatchNormalization()(hidden))
    elif kind == "mixing operation":
        mean = keras.ops.mean if hasattr(keras, "ops") else tf.reduce_mean
        hidden = hidden - mean(hidden, axis=0)
    if kind in ("added sum", "noise", "size in a layer", "codebook", "start by the batch"):
        hidden = Hidden()(hidden)
    model = keras.Model(inputs, layers.Dense(3)(hidden))

    class _Clips(keras.optimizers.SGD):  # type: ignore[misc]
        def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
            pairs = super().compute_gradients(*args, **kwargs)
            return [(tf.clip_by_norm(gradient, 99.0), variable) for gradient, variable in pairs]

    built_in = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = _Clips(0.1) if kind == "optimizer that clips" else keras.optimizers.SGD(0.1)
    model.compile(
        optimizer,
        own_loss if kind in ("mean", "sum", "valid steps", "sorted", "few labels") else built_in,
    )
    return model


def body_check(kind: str) -> tuple[str, str, list[str]]:
    """Return the error of a ``fit``, what the statement at the start says of the check, and the warnings."""
    model, data = model_and_data(kind)
    printed = io.StringIO()
    with warnings_of_package() as said, contextlib.redirect_stderr(printed):
        error = error_of(npu.distribute.replicate(model).fit, **data).removeprefix("ValueError: ")
    lines = [
        line[17:]
        for line in printed.getvalue().splitlines()
        if line.startswith(("  first step", "  sums"))
    ]
    return error, "; ".join(lines), said


@pytest.mark.parametrize(
    "kind",
    [
        *("noise", "gathered", "mean", "clips reduced"),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("own noise", "own function")),
    ],
)
def test_what_can_be_divided_is_checked(keras_two_ranks: Pool, kind: str) -> None:
    (error, statement, said), others = keras_two_ranks.run(body_check, kind)
    assert (error, said, others) == ("", [], ("", "", []))
    assert re.fullmatch(
        r"checked: .* of samples 1, \d+, \d+, \d+, 12 of 12, with those of 3 and 2 of them",
        statement,
    )


SUMS = {
    "per sample": "the gradients of SGD: the ranks add up",
    "sum": "the loss own_loss: the ranks add up",
    "added sum": "self.add_loss(1e-4 * tf.reduce_sum(values**2))): the ranks add up",
}


@pytest.mark.parametrize("kind", list(SUMS))
def test_sums_over_the_samples_are_added_up(keras_two_ranks: Pool, kind: str) -> None:
    (error, statement, said), others = keras_two_ranks.run(body_check, kind)
    assert (error, said, others) == ("", [], ("", "", []))
    assert statement.startswith("checked: ") and statement.endswith(SUMS[kind])


OTHERS_OF_A_KIND = (
    "per sample, penalty on all weights",
    "start by the batch",
    "fixed size, local bank",
    "pairs of any number",
    "valid steps of words",
    "few labels",
)
"""Steps of which another one is of the same kind."""


def _marked(kind: str) -> Any:
    marks = []
    if kind in ("ragged", "optimizer that clips"):
        marks.append(pytest.mark.only_keras("2"))
    if kind in OTHERS_OF_A_KIND:
        marks.append(pytest.mark.full)
    return pytest.param(kind, marks=marks)


ERRORS = {
    "per sample, penalty": [
        "adds up what its samples give",
        "dense/bias",
        "aren't",
        "reduction='sum'",
    ],
    "local bank": [
        "bank",
        "takes values of the samples",
        "# set here",
        "npu.distribute.all_gather",
    ],
    "per sample, penalty on all weights": ["beside what doesn't depend on them", "reduction='sum'"],
    "codebook": [
        "kept",
        "from sums or means",
        "self.kept.assign(0.9",
        "npu.distribute.all_reduce(total, 'sum')",
    ],
    "start by the batch": [
        "kept",
        "from sums or means",
        "self.kept.assign(1 /",
        "npu.distribute.all_reduce(",
    ],
    "by hand": [
        "kernel",
        "without an optimizer",
        "variable.assign(",
        "npu.distribute.all_reduce(gradients)",
    ],
    "pairs": ["first axis", "data: shape (2, 12, 6)", "npu.distribute.divided"],
    "size in a layer": ["fixed batch size", "data[0]: shape (12, 6)", "npu.distribute.divided"],
}


@pytest.mark.parametrize(
    "kind", list(map(_marked, [*ERRORS, "fixed size, local bank", "pairs of any number"]))
)
def test_steps_that_are_trained_wrongly_are_errors_on_each_rank(
    keras_two_ranks: Pool, kind: str
) -> None:
    for rank, (error, _, said) in enumerate(keras_two_ranks.run(body_check, kind)):
        assert error.startswith(f"rank {rank}: ")
        for part in ERRORS[kind.removeprefix("fixed size, ").removesuffix(" of any number")]:
            assert part in error
        assert said == []


WARNINGS = {
    "contrastive": [
        "gradient of 5 samples",
        "# samples meet here",
        "dense",
        "npu.distribute.all_gather",
    ],
    "mixing operation": [
        "gradient of 5 samples",
        "Samples first meet in",
        "npu.distribute.all_gather",
    ],
    "valid steps": [
        "isn't a mean",
        "tf.reduce_sum(each * valid) / tf.reduce_sum(valid)",
        "all_reduce(total, 'sum')",
    ],
    "valid steps of words": ["isn't a mean", "# of words", "ignore_class"],
    "sharpness-aware": ["self.dense.kernel.assign(before + 0.1", "before the move"],
    "sorted": ["isn't a mean", "ignore_class"],
    "few labels": ["isn't a mean", "ignore_class"],
    "clips": [
        "gradients, _ = tf.clip_by_global_norm(gradients, 99.0)",
        "npu.distribute.all_reduce(gradients)",
    ],
    "ragged": ["isn't a mean", "time_distributed"],
    "optimizer that clips": [
        "tf.clip_by_norm(gradient, 99.0)",
        "apply_gradients, which gets those of all ranks",
    ],
    "counter": ["seen", "count steps, not samples", "self.seen.assign_add("],
}


@pytest.mark.parametrize("kind", list(map(_marked, WARNINGS)))
def test_doubtful_steps_are_named_in_one_warning(keras_two_ranks: Pool, kind: str) -> None:
    (error, statement, [warning]), others = keras_two_ranks.run(body_check, kind)
    assert (error, others) == ("", ("", "", []))
    assert statement.startswith("checked, with a warning: ")
    for part in WARNINGS[kind]:
        assert part in warning


STATEMENTS = {
    "functional": "not compared: layers, loss, step and optimizer are Keras's own",
    "eager": "not checked: the step runs eagerly",
    "python": "not checked: the step runs PyFunc",
    "shuffles": "not checked: the step draws random numbers",
    "draws in a branch": "not checked: the step draws random numbers in a branch or a loop",
    "fixed size, gathered bank": "not checked: the step can't run on a few samples",
    "applies in a branch": "not checked: the step applies gradients in a branch or a loop",
}


@pytest.mark.parametrize("kind", list(STATEMENTS))
def test_steps_that_cannot_be_checked_are_named_with_the_reason(
    keras_two_ranks: Pool, kind: str
) -> None:
    error, statement, said = keras_two_ranks.run(body_check, kind)[0]
    assert (error, said) == ("", [])
    assert statement.startswith(STATEMENTS[kind])


def body_with_and_without(kind: str) -> Any:
    """Return the random states and the weights after trainings with the check, and without."""
    found = []
    for setting in ("on", "off"):
        with settings(NPU_DEVICE_FIRST_STEP_CHECK=setting):
            model, data = model_and_data(kind)
            npu.distribute.replicate(model).fit(**data, epochs=2)
        states = (random.random(), float(np.random.random()))
        found.append([*states, *(np.asarray(value) for value in model.variables)])
    return found


@pytest.mark.parametrize("kind", ["own noise", "own function"])
def test_the_check_changes_nothing(keras_two_ranks: Pool, kind: str) -> None:
    for with_check, without in keras_two_ranks.run(body_with_and_without, kind):
        same_bits(with_check, without)
