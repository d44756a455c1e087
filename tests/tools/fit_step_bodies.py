"""Trainings for the tests of ``npu.distribute.replicate`` whose steps don't treat all samples alike: masks, losses and
layers that count the valid steps of sequences; two models with one optimizer; batches that can't be sent; and other
calls than ``fit`` alone: Ascend's callback and wrapper, and ``train_on_batch``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from fit_models import SAMPLES, descend, make_model, make_optimizer, outcome, samples

import npu_device as npu
from npu_device.distribute.hccl import npu_callbacks_append
from npu_device.distribute.npu_callbacks import NPUBroadcastGlobalVariablesCallback

STEPS = 5


def sequences() -> tuple[np.ndarray, np.ndarray]:
    """Words [SAMPLES, STEPS], 0 after the end of each sequence, and their classes.

    In batches of 16, the last rank's share of the first batch has words of no sequence, be it one of 2 ranks or of 3.
    """
    random = np.random.default_rng(5)
    lengths = random.integers(0, STEPS + 1, SAMPLES)
    lengths[8:16] = 0
    words = np.where(
        np.arange(STEPS) < lengths[:, None], random.integers(1, 9, [SAMPLES, STEPS]), 0
    )
    return words.astype(np.int32), np.where(words == 0, 0, words % 3).astype(np.int32)


def body_masked(kind: str) -> Any:
    """Sequences whose valid steps are counted by the loss of ``compile``, that of a train step, or a layer."""
    keras = tf.keras
    keras.utils.set_random_seed(7 + npu.distribute.rank())
    layers = keras.layers

    class OwnStep(keras.Model):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            crossentropy = keras.losses.SparseCategoricalCrossentropy
            self.criteria = [
                crossentropy(from_logits=True),
                crossentropy(from_logits=True, reduction="none"),
            ]

        def train_step(self, data: Any) -> Any:
            x, y = data

            def loss() -> Any:
                scores = self(x, training=True)
                return self.criteria[0](y, scores) + 0.1 * tf.reduce_mean(
                    self.criteria[1](y, scores)
                )

            return {"loss": descend(self, loss)}

    inputs = keras.Input([STEPS], dtype="int32")
    embedded = layers.Embedding(10, 4, mask_zero=kind != "ignored class")(inputs)
    if kind == "synchronised":
        hidden = layers.BatchNormalization(synchronized=True, momentum=0.8)(embedded)
    else:
        hidden = layers.Dense(4, activation="tanh")(embedded)
    model = (OwnStep if kind == "own loss" else keras.Model)(inputs, layers.Dense(3)(hidden))
    ignored = 0 if kind == "ignored class" else None
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)
    model.compile(make_optimizer("sgd"), None if kind == "own loss" else loss)
    model = npu.distribute.replicate(model)
    x, y = sequences()
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False))


def body_one_optimizer(kind: str) -> Any:
    """Two replicated models that share their layers and one optimizer; the second one without ``fit``: batch by batch,
    on numpy's arrays.
    """
    keras = tf.keras
    model = make_model("functional")
    second = keras.Model(model.inputs, model.outputs)
    optimizer = make_optimizer("sgd")
    x, y = samples()
    for one in (model, second):
        one.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        npu.distribute.replicate(one)
    history = model.fit(x, y, batch_size=15, verbose=0)
    batches = [(x[begin : begin + 16], y[begin : begin + 16]) for begin in range(0, SAMPLES, 16)]
    logs = [np.asarray(second.train_on_batch(*batch)) for batch in batches]
    tested = np.asarray(second.test_on_batch(x, y))
    return outcome(second, history, logs=logs, tested=tested, predicted=second.predict_on_batch(x))


def body_logs() -> dict[str, Any]:
    """Return the logs of a train step that returns a Python number, its rank; the errors of two that can't be run; and
    the warnings about one that returns a result, what Python makes of it, and its root.
    """
    keras = tf.keras

    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            if kind == "reset":
                self.metrics[0].reset_state()
            elif kind == "value":
                logs["loss"].numpy()
            elif kind == "computed":
                result = self.mine.result()
                perplexity = tf.ensure_shape(tf.numpy_function(np.exp, [result], tf.float32), [])
                return {**logs, "mine": result, "perplexity": perplexity, "root": tf.sqrt(result)}
            return {**logs, "number": float(npu.distribute.rank())}

    found: dict[str, Any] = {}
    x, y = samples(12)
    for kind in ("number", "reset", "value", "computed"):
        inputs = keras.Input([6])
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        model.mine = keras.metrics.Mean(name="mine")
        model.compile("sgd", "mse", run_eagerly=kind != "computed")
        fit = npu.distribute.replicate(model).fit
        with warnings_of_package() as said:
            found[kind] = error_of(fit, x, y, batch_size=6, verbose=0)
        if kind == "number":
            found[kind] = model.history.history["number"]
        elif kind == "computed":
            found[kind] = said
    return found


def body_sent_as_bytes(kind: str) -> Any:
    """``fit`` on strings, sparse and ragged data that each rank shuffles in another order."""
    keras = tf.keras

    class Dense(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x: Any) -> Any:
            ragged = tf.reshape(x["ragged"].to_tensor(shape=[None, 6]), [-1, 6])
            return self.last(
                tf.strings.to_number(x["strings"])
                + 2 * tf.sparse.to_dense(x["sparse"])
                + 3 * ragged
            )

    keras.utils.set_random_seed(npu.distribute.rank())
    x, y = samples()
    given = {
        "strings": tf.strings.as_string(x),
        "sparse": tf.sparse.from_dense(x),
        "ragged": _ragged(x),
    }
    dataset = tf.data.Dataset.from_tensor_slices((given, y)).shuffle(SAMPLES).batch(16)
    model = Dense()
    model.compile("sgd", "mse")
    return outcome(model, npu.distribute.replicate(model).fit(dataset, verbose=0))


def _ragged(x: Any) -> Any:
    return tf.RaggedTensor.from_row_lengths(x.ravel(), [3, 9] * (len(x) // 2) + [6] * (len(x) % 2))


def body_infinite(how: str) -> Any:
    """Variables that hold inf or NaN before a step: those that it leaves alone, sets, or adds to in a metric."""
    keras = tf.keras

    def raised(x: Any) -> Any:  # inf for some samples
        return tf.where(x[:, 0] > 1.5, np.inf, x[:, 0])

    def mask(shape: Any, dtype: Any = None) -> Any:
        return tf.constant(np.triu(np.full(shape, -np.inf, np.float32), 1))

    class Masked(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            constant = keras.initializers.Constant
            more = {"trainable": False, "dtype": "float32"}
            self.mask = self.add_weight(name="mask", shape=(6, 6), initializer=mask, **more)
            self.lowest = self.add_weight(
                name="lowest", shape=(), initializer=constant(np.inf), **more
            )
            self.newest = self.add_weight(
                name="newest", shape=(), initializer=constant(np.nan), **more
            )

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.lowest.assign(tf.reduce_mean(x))
                self.newest.assign(tf.reduce_mean(raised(x)))
            return tf.matmul(x, tf.nn.softmax(tf.convert_to_tensor(self.mask)), transpose_b=True)

    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            self.highest.update_state(raised(data[0]))
            return {**logs, "highest": self.highest.result()}

    keras.utils.set_random_seed(7)
    inputs = keras.Input([6])
    model = Model(inputs, keras.layers.Dense(1)(Masked()(inputs)))
    model.highest = keras.metrics.Mean(name="highest")
    model.best, model.unset = tf.Variable(np.inf), tf.Variable(np.nan)
    model.compile(make_optimizer("sgd"), "mse", run_eagerly=how == "eagerly")
    model = npu.distribute.replicate(model)
    x, y = samples()
    x[-1, 0] = 2.0  # in a batch that one rank has alone
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    return outcome(model, history, loose=[model.best.numpy(), model.unset.numpy()])


def body_with_the_callback(kind: str) -> Any:
    """Ascend's callback in the ``fit`` of a replicated model, and its wrapped optimizer: as on one process."""
    keras = tf.keras
    model = make_model(kind)
    optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(keras.optimizers.Adam(0.02))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=optimizer, loss=loss, metrics=["accuracy"], run_eagerly=kind == "subclassed"
    )
    model = npu.distribute.replicate(model)
    x, y = samples()
    return outcome(
        model,
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=npu_callbacks_append([])),
    )


def body_from_another_rank() -> Any:
    """The last rank's initial weights, as a callback asks for them: returned as they were and after two trainings."""
    model = make_model("functional")
    initial = [np.asarray(value) for value in model.get_weights()]
    model.compile(optimizer=tf.keras.optimizers.SGD(0.0), loss="mse")
    model = npu.distribute.replicate(model)
    callbacks = [NPUBroadcastGlobalVariablesCallback(npu.distribute.size() - 1)]
    for _ in range(2):
        model.fit(
            np.ones([6, 6], np.float32), np.ones([6, 3], np.float32), verbose=0, callbacks=callbacks
        )
    return initial, [np.asarray(value) for value in model.get_weights()]


def body_replaced() -> tuple[list[str], str]:
    """Return the methods that are replaced on a model and its parts while a step is traced, and ``replica``'s list."""
    from npu_device._src import compat
    from npu_device._src.training.fit import replica

    keras = tf.keras
    found: set[str] = set()

    class Noise(keras.layers.Layer):  # type: ignore[misc]
        def call(self, values: Any) -> Any:
            self.add_loss(tf.reduce_mean(values**2))
            return values

    def replaced(model: Any) -> set[str]:
        losses = [model.loss_object, *compat.compiled_losses(model)]
        parts = [
            *compat.all_layers(model),
            *model.metrics,
            *losses,
            model.optimizer,
            model.generator,
            *seeds,
        ]
        held = [
            (part, name) for part in parts for name, value in vars(part).items() if callable(value)
        ]
        return {name for part, name in held if callable(getattr(type(part), name, None))}

    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            found.update(replaced(self))
            return super().train_step(data)

    inputs = keras.Input([6])
    normalised = keras.layers.BatchNormalization(synchronized=True)(
        keras.layers.Dropout(0.1)(Noise()(inputs))
    )
    model = Model(inputs, keras.layers.Dense(1, activity_regularizer="l2")(normalised))
    seeds = [layer.seed_generator for layer in model.layers if hasattr(layer, "seed_generator")]
    model.loss_object, model.generator = (
        keras.losses.MeanSquaredError(),
        tf.random.Generator.from_seed(1),
    )
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.AUC()])
    x, before = np.ones([6, 6], np.float32), replaced(model)
    npu.distribute.replicate(model).fit(x, x[:, :1], verbose=0)
    return sorted(found - before), str(replica.__doc__)


def body_failing_start() -> tuple[str, set[str], set[str]]:
    """The error of a step that fails as it starts, and what it leaves replaced, and a further step after it."""
    keras = tf.keras

    class Fragile(keras.layers.Layer):  # type: ignore[misc]
        is_broken = False

        @property
        def synchronized(self) -> bool:
            if self.is_broken:
                raise RuntimeError("broken")
            return False

        def call(self, values: Any) -> Any:
            return values

    model = keras.Sequential([keras.Input([6]), Fragile(), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae"], run_eagerly=True)
    model = npu.distribute.replicate(model)
    x = np.ones([6, 6], np.float32)

    def methods() -> set[str]:
        parts = [model, *model.layers, *model.metrics, model.loss]
        return {f"{part.name}.{name}" for part in parts for name in vars(part)}

    model.fit(x, x[:, :1], verbose=0)
    before = methods()
    vars(model.layers[0])["is_broken"] = True
    error = error_of(model.fit, x, x[:, :1], verbose=0)
    del vars(model.layers[0])["is_broken"]
    after_error = methods() - before
    model.fit(x, x[:, :1], verbose=0)
    return error, after_error, methods() - before


def body_failing_replication() -> tuple[list[str], set[str], str, set[str]]:
    """The errors of two calls of ``replicate`` that fail late, and what they leave replaced; the same once it can."""
    keras = tf.keras

    class Fragile(keras.layers.Layer):  # type: ignore[misc]
        is_broken = True

        @property
        def save(self) -> bool:
            if self.is_broken:
                raise RuntimeError("broken")
            return False

        def call(self, values: Any) -> Any:
            return values

    inner = keras.Sequential([keras.Input([6]), keras.layers.Dense(6)])
    model = keras.Sequential([keras.Input([6]), inner, Fragile(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    *_, fragile, _ = model.layers

    def attributes() -> set[str]:
        return {f"{part.name}.{name}" for part in (model, inner, fragile) for name in vars(part)}

    before = attributes()
    errors = [error_of(npu.distribute.replicate, model) for _ in range(2)]
    left = attributes() - before
    vars(fragile)["is_broken"] = False
    error = error_of(npu.distribute.replicate, model)
    replaced = {name.rpartition(".")[2] for name in attributes() - before}
    x = np.ones([6, 6], np.float32)
    model.fit(x, x[:, :1], verbose=0)
    return errors, left, error, replaced
