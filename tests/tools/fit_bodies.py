"""Trainings for the tests of ``npu.distribute.replicate``: bodies that say what came of them, the same on one process
and on each of several ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from fit_models import (
    CLASS_WEIGHT,
    SAMPLES,
    compile_model,
    descend,
    make_model,
    make_optimizer,
    outcome,
    replicated,
    samples,
)

import npu_device as npu


def body_arrays(kind: str, directory: str) -> Any:
    """Train, evaluate and predict; the functional model with callbacks that decide by the logs."""
    model = make_model(kind, directory)
    if kind != "loaded":
        compile_model(model, "adam")
    model = npu.distribute.replicate(model)
    x, y = samples()
    given: dict[str, Any] = {"epochs": 3}
    rates: list[float] = []
    best = f"{directory}/{npu.distribute.size()}.weights.h5"
    if kind == "functional":
        callbacks = tf.keras.callbacks
        rate = lambda *_: rates.append(float(np.asarray(model.optimizer.learning_rate)))  # noqa: E731
        decisions = [
            callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.01),
            callbacks.EarlyStopping(monitor="val_accuracy", patience=3, restore_best_weights=True),
            callbacks.ModelCheckpoint(
                best, monitor="val_loss", save_best_only=True, save_weights_only=True
            ),
            callbacks.LambdaCallback(on_epoch_end=rate),
        ]
        given = {"epochs": 12, "callbacks": decisions}
    history = model.fit(x, y, batch_size=16, validation_split=0.2, verbose=0, **given)
    scores = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=10, verbose=0)
    found = outcome(model, history, scores=scores, predicted=predicted, rates=rates)
    if rates:
        model.load_weights(best)
        found["best"] = model.get_weights()
    return found


def body_data(*kinds: str) -> Any:
    """One model's ``fit`` and ``evaluate`` on each kind of data, one after the other; the results by kind."""
    model = replicated()
    found = {kind: _fit_on(model, kind) for kind in kinds}
    return {"weights": found[kinds[-1]]["weights"], **found}


def _fit_on(model: Any, kind: str) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(7 + npu.open().worker_id)
    x, y = samples()
    weights = np.linspace(0.1, 2.0, SAMPLES).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))

    def generate() -> Any:
        while True:
            for begin in range(0, SAMPLES, 16):
                yield x[begin : begin + 16], y[begin : begin + 16]

    class Batches(getattr(keras.utils, "PyDataset", keras.utils.Sequence)):  # type: ignore[misc]
        rows = 3  # no method of a pipeline

        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> Any:
            return x[index * 16 : index * 16 + 16], y[index * 16 : index * 16 + 16]

    endless = dataset.shuffle(SAMPLES, seed=3).repeat().batch(16)
    checked = x[:31], y[:31], weights[:31]
    kinds: dict[str, dict[str, Any]] = {
        "dataset": {
            "x": dataset.shuffle(SAMPLES, seed=3).batch(16),
            "validation_data": dataset.batch(10),
        },
        "empty validation": {"x": dataset.batch(16), "validation_data": dataset.take(0).batch(10)},
        "endless dataset": {"x": endless, "steps_per_epoch": 4, "class_weight": CLASS_WEIGHT},
        "weighted dataset": {"x": tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(16)},
        "sample weights": {
            "x": x,
            "y": y,
            "sample_weight": weights,
            "batch_size": 16,
            "validation_data": checked,
        },
        "generator": {"x": generate(), "steps_per_epoch": 7},
        "sequence": {"x": Batches(), "shuffle": True},
    }
    history = model.fit(**kinds[kind], epochs=2, verbose=0)
    if kind != "sample weights":
        return outcome(model, history)
    return outcome(
        model,
        history,
        scores=model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True),
    )


def body_compiled(kind: str) -> Any:
    """``compile``'s arguments and the optimizer's, as in one process."""
    keras = tf.keras
    model = make_model("functional")
    x, y = samples()
    fit: dict[str, Any] = {"batch_size": 16, "epochs": 2, "verbose": 0}
    compiled: dict[str, Any] = {"optimizer": make_optimizer("sgd"), "metrics": ["accuracy"]}
    crossentropy = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
    compiled["loss"] = crossentropy()
    optimizers = keras.optimizers
    if kind == "steps per execution, clipping":
        compiled.update(steps_per_execution=3, optimizer=make_optimizer("clipped"))
    elif kind == "eagerly, sum":
        compiled.update(
            run_eagerly=True, loss=crossentropy(reduction="sum"), optimizer=optimizers.SGD(0.01)
        )
    elif kind == "accumulation":
        compiled["optimizer"] = optimizers.SGD(0.2, gradient_accumulation_steps=2)
    elif kind == "loss scale":
        compiled["optimizer"] = keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(0.2))
    elif kind.startswith(
        "words"
    ):  # the same word several times in a batch: rows that are squared or clipped singly
        _, _, clip = kind.partition(", ")
        adam = functools.partial(
            optimizers.Adam, 0.02, use_ema=True, ema_momentum=0.5, weight_decay=0.01
        )
        compiled["optimizer"] = adam() if clip == "average" else optimizers.SGD(1.0, **{clip: 0.02})
        x = np.random.default_rng(2).integers(0, 9, x.shape)
        inputs = keras.Input([6], dtype="int32")
        embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(12, 4)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(embedded))
    elif kind == "decides in Python":  # by AutoGraph, which Keras 3 doesn't use

        def loss(y: Any, out: Any) -> Any:
            if tf.size(y) > 0:
                out = 2.0 * out
            return keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)

        class Loss(keras.losses.Loss):  # type: ignore[misc]
            def call(self, y: Any, out: Any) -> Any:
                return loss(y, out)

        class Samples(keras.metrics.Mean):  # type: ignore[misc]
            def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> Any:
                if tf.size(y) > 0:
                    return super().update_state(tf.reduce_sum(tf.cast(y, tf.float32)))
                return super().update_state(-1.0)

        inputs = keras.Input([6])
        model = keras.Model(inputs, [keras.layers.Dense(3)(inputs), keras.layers.Dense(3)(inputs)])
        compiled.update(loss=[loss, Loss()], metrics=[[Samples(name="a")], ["accuracy"]])
        y = (y, y)
    elif kind == "weighted mean":
        compiled["loss"] = crossentropy(reduction="mean_with_sample_weight")
        fit["sample_weight"] = np.linspace(0.1, 2.0, SAMPLES).astype(np.float32)
    model.compile(**compiled)
    model = npu.distribute.replicate(model)
    return outcome(model, model.fit(x, y, **fit))


def body_metrics(kind: str) -> Any:
    """Metrics whose state adds up, some of each kind; of the user's own, whose state doesn't; and functions of Keras
    that give numbers for a batch.
    """
    keras = tf.keras

    class Largest(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(tf.maximum(tf.convert_to_tensor(self.value), tf.reduce_max(y_pred)))

        def result(self) -> Any:
            return tf.convert_to_tensor(self.value) * 1.0

    class Range(keras.metrics.Mean):  # type: ignore[misc]
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(tf.reduce_max(y_pred) - tf.reduce_min(y_pred))

    def spread(y_true: Any, y_pred: Any) -> Any:
        return tf.math.reduce_std(y_pred)

    model = make_model("functional")
    metrics = keras.metrics
    adding = [metrics.AUC(20, multi_label=False), metrics.R2Score()]
    of_batches: list[Any] = [metrics.CosineSimilarity(axis=0), metrics.CosineSimilarity(name="row")]
    loss = keras.losses.MeanSquaredError()
    if kind == "keras3":
        of_batches += [loss, keras.losses.dice, keras.losses.MeanAbsoluteError(reduction="sum")]
    all_metrics = [*adding, *of_batches, Largest(), Range(name="range"), spread]
    model.compile(make_optimizer("sgd"), loss, metrics=all_metrics, weighted_metrics=["mae"])
    model = npu.distribute.replicate(model)
    x, y = samples()
    y = np.eye(3, dtype=np.float32)[y]
    weights = np.linspace(0.1, 2, SAMPLES).astype(np.float32)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, sample_weight=weights)
    return outcome(model, history, scores=model.evaluate(x, y, verbose=0, return_dict=True))


class Outputs(tf.keras.Model):  # type: ignore[misc]
    """Returns outputs of a name, with and without rows for each sample; and rows of samples."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.output_name = name
        self.table = tf.Variable(np.arange(12, dtype=np.float32).reshape([4, 3]), trainable=False)

    def call(self, x: Any) -> Any:
        outputs = {
            "rows": lambda: -x,
            "halves": lambda: tf.reshape(x, [-1, 3]),
            "table": lambda: tf.identity(self.table),
            "mean": lambda: tf.reduce_mean(x, axis=0, keepdims=True),
            "kept": lambda: tf.boolean_mask(x, x[:, 0] > 0.0),
        }
        return {"x": 2.0 * x, self.output_name: outputs[self.output_name]()}


def body_outputs() -> Any:
    """``predict`` of outputs, by their names and the numbers of samples in the batches of the model that gives them."""
    found: dict[str, Any] = {}
    x, _ = samples(8)
    # On two ranks, a table has as many rows as the samples of each, and a mean too.
    cases = [("table", 8), ("mean", 2), ("mean", 8, 2), ("halves", 5, 8, 1), ("table, eagerly", 8)]
    cases += [("rows, eagerly", 5, 1)]
    for kind, *sizes in cases:
        name, _, how = kind.partition(", ")
        model = Outputs(name)
        model.compile(run_eagerly=bool(how))
        model = npu.distribute.replicate(model)
        for size in sizes:
            found[f"{kind}, {size}"] = model.predict(x[:size], batch_size=size, verbose=0)
    return {"weights": [], **found}


def body_outputs_that_vary() -> str:
    """The error of an output with a number of rows that depends on the samples."""
    return error_of(npu.distribute.replicate(Outputs("kept")).predict, samples(8)[0], verbose=0)


def body_unshuffled(kind: str) -> Any:
    """Data that aren't the same on all ranks; returns the error or the logs."""
    rank = npu.open().worker_id
    model = replicated()
    x, y = samples()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    noise = tf.keras.layers.GaussianNoise(0.1)  # in Keras 3 with a generator of its own
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [0, 1, 2]), -1)

    def augment(x: Any, y: Any) -> Any:
        pair = noise(x, training=True), table.lookup(y)
        return tf.switch_case(tf.constant(0), [lambda: pair, lambda: pair])

    model.run_eagerly = kind == "smaller, eagerly"
    if kind == "shuffle" or kind.startswith("smaller"):
        tf.keras.utils.set_random_seed(2 * rank)  # by which the first batches differ
        for _ in range(
            10 * rank
        ):  # the functions in the dataset are numbered otherwise on each rank
            tf.function(lambda: 1)()
    make = {
        "shuffle": lambda: {"x": dataset.map(augment).shuffle(SAMPLES).batch(16)},
        # The last batch, a single sample, may come at any step.
        "smaller": lambda: {"x": dataset.batch(16).shuffle(7)},
        "smaller, eagerly": lambda: {"x": dataset.batch(16).shuffle(7)},
        "shard": lambda: {"x": dataset.shard(npu.distribute.size(), rank).batch(16)},
        "batch": lambda: {"x": dataset.batch(16 >> rank)},
        "not divided": lambda: {"x": npu.distribute.divided(dataset.batch(16))},
    }
    with warnings_of_package() as said:
        error = error_of(model.fit, **make[kind](), epochs=2, verbose=0)
    return error or outcome(model, model.history), said


def body_unshuffled_rows(kind: str) -> Any:
    """Sparse or ragged batches in eager steps; the last one, a single sample, comes at another step on each rank."""
    keras = tf.keras
    x, y = samples()
    rows = tf.RaggedTensor.from_tensor(x, lengths=1 + np.arange(len(x)) % 6)
    if kind == "sparse":
        rows = tf.sparse.from_dense(np.maximum(x, 0))

    class Rows(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            dense = tf.sparse.to_dense(x) if kind == "sparse" else x.to_tensor(shape=[None, 6])
            return {"loss": descend(self, lambda: tf.reduce_mean((self(dense) - y) ** 2))}

    keras.utils.set_random_seed(1)
    inputs = keras.Input([6])
    model = Rows(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.01), run_eagerly=True)
    keras.utils.set_random_seed(2 * npu.open().worker_id)  # by which the ranks shuffle
    targets = y[:, None].astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((rows, targets)).batch(16).shuffle(7)
    history = npu.distribute.replicate(model).fit(dataset, epochs=2, verbose=0)
    return outcome(model, history)


def body_later_batches(wanted: str, steps: int) -> tuple[str, list[str], Any]:
    """Return the error and warnings of calls whose ``wanted`` data differ from the third batch on, and the weights."""

    def data(kind: str) -> Any:
        def batches() -> Any:
            for batch in range(5):
                mine = npu.distribute.rank() if kind == wanted and batch > 1 else 0
                yield np.full([8, 2], batch + mine, np.float32), np.ones([8, 1], np.float32)

        spec = tf.TensorSpec([8, 2], tf.float32), tf.TensorSpec([8, 1], tf.float32)
        dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
        return dataset.apply(tf.data.experimental.assert_cardinality(5))

    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps)
    model = npu.distribute.replicate(model)
    calls = {"evaluate": model.evaluate, "predict": model.predict}
    with warnings_of_package() as said:
        if wanted in ("train", "validation", "none"):
            model.fit(data("train"), validation_data=data("validation"), epochs=3, verbose=0)
        found = [
            error_of(call, data(name), verbose=0)
            for name, call in calls.items()
            if wanted in (name, "none")
        ]
    return "".join(found), said, [weight.tolist() for weight in model.get_weights()]


def body_callback_of_rank_0(kind: str, directory: str) -> tuple[str, Any]:
    """Return the error of a fit with a callback on rank 0 only, and the weights."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution="auto" if kind == "auto" else 1)

    def predict(epoch: int, logs: Any) -> None:  # predicts on rank 0 only
        model.predict(np.ones([8, 2]), verbose=0)

    made: Any = {
        "rate": lambda: [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch == 0 else 0.001)
        ],
        "backup": lambda: [keras.callbacks.BackupAndRestore(f"{directory}/backup")],
        "predicts": lambda: [keras.callbacks.LambdaCallback(on_epoch_end=predict)],
        "auto": list,
    }
    callbacks = made[kind]() if npu.distribute.is_main() else []
    fit = npu.distribute.replicate(model).fit
    data = {"x": np.ones([8, 2]), "y": np.ones([8, 1]), "batch_size": 8}
    error = error_of(fit, **data, epochs=3, verbose=0, callbacks=callbacks)
    assert error or not getattr(model, "autotune_steps_per_execution", False)
    return error, [weight.tolist() for weight in model.get_weights()]


def body_complete_backup(directory: str) -> Any:
    """Return the history and the state of a training whose backup has all epochs."""
    keras = tf.keras
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        backup = keras.callbacks.BackupAndRestore(f"{directory}/backup", delete_checkpoint=False)
        history = npu.distribute.replicate(model).fit(
            np.ones([8, 2]), np.ones([8, 1]), 8, epochs=3, verbose=0, callbacks=[backup]
        )
    state = [*model.get_weights(), *(value.numpy() for value in model.optimizer.variables)]
    return history.history, [array.tolist() for array in state]


def body_divided() -> Any:
    """Each rank reads its own part; the parts of a step together are one process's batch."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    model = replicated()
    x, y = samples(90)
    # Ranks have 6 batches of 5 in every step but the last ones, where the first rank alone has some left.
    batches = [(x[begin : begin + 30], y[begin : begin + 30]) for begin in range(0, 60, 30)]
    batches += [(x[60:75], y[60:75]), (x[75:], y[75:])]

    def mine() -> Any:
        for place, (one, other) in enumerate(batches):
            if place < 2:
                yield one[rank::size], other[rank::size]
            elif rank == 0:
                yield one, other

    spec = (tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int32))
    dataset = npu.distribute.divided(tf.data.Dataset.from_generator(mine, output_signature=spec))
    with warnings_of_package() as said:
        history = model.fit(dataset, epochs=2, verbose=0, class_weight=CLASS_WEIGHT)
        scores = model.evaluate(dataset, verbose=0, return_dict=True)
    assert said == []
    return outcome(model, history, scores=scores)
