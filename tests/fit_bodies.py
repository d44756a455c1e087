"""Trainings for the tests of ``npu.distribute.replicate``: bodies that say what came of them, the same on one process
and on each of several ranks.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from fit_models import CLASS_WEIGHT, SAMPLES, compile_model, make_model, make_optimizer, outcome, samples
from heard import warnings_of_package

import npu_device as npu


def body_arrays(kind: str, directory: str) -> Any:
    model = make_model(kind, directory)
    if kind != "loaded":
        compile_model(model, "adam")
    model = npu.distribute.replicate(model)
    x, y = samples()
    history = model.fit(x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0)
    scores = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=10, verbose=0)
    return outcome(model, history, scores={key: float(value) for key, value in scores.items()}, predicted=predicted)


def body_data(*kinds: str) -> Any:
    """One model's ``fit`` on each kind of data, one after the other; its weights and metrics by kind."""
    model = make_model("functional")
    compile_model(model)
    model = npu.distribute.replicate(model)
    found = {kind: _fit_on(model, kind) for kind in kinds}
    return {"weights": found[kinds[-1]]["weights"], **found}


def _fit_on(model: Any, kind: str) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(7 + npu.open().worker_id)
    x, y = samples()
    weights = np.linspace(0.1, 2.0, SAMPLES).astype(np.float32)
    fit: dict[str, Any] = {"epochs": 2, "verbose": 0}
    dataset = tf.data.Dataset.from_tensor_slices((x, y))

    if kind == "dataset":
        fit.update(x=dataset.shuffle(SAMPLES, seed=3).batch(16), validation_data=dataset.batch(10))
    elif kind == "empty validation":
        fit.update(x=dataset.batch(16), validation_data=dataset.take(0).batch(10))
    elif kind == "endless dataset":
        fit.update(
            x=dataset.shuffle(SAMPLES, seed=3).repeat().batch(16),
            steps_per_epoch=4,
            class_weight={0: 2.0, 1: 1.0, 2: 0.5},
        )
    elif kind == "weighted dataset":
        fit.update(x=tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(16))
    elif kind == "tensors":
        fit.update(x=tf.constant(x), y=tf.constant(y), batch_size=32, shuffle=False)
    elif kind == "sample weights":
        fit.update(x=x, y=y, sample_weight=weights, batch_size=16, validation_data=(x[:31], y[:31], weights[:31]))
    elif kind == "class weights":
        fit.update(x=x, y=y, class_weight=CLASS_WEIGHT, batch_size=64)
    elif kind == "generator":

        def generate() -> Any:
            while True:
                for begin in range(0, SAMPLES, 16):
                    yield x[begin : begin + 16], y[begin : begin + 16]

        fit.update(x=generate(), steps_per_epoch=7)
    else:
        assert kind == "sequence"
        base = getattr(keras.utils, "PyDataset", keras.utils.Sequence)

        class Batches(base):  # type: ignore[misc, valid-type]
            def __len__(self) -> int:
                return 7

            def __getitem__(self, index: int) -> Any:
                return x[index * 16 : index * 16 + 16], y[index * 16 : index * 16 + 16]

        fit.update(x=Batches(), shuffle=True)
    history = model.fit(**fit)
    if kind not in ("sample weights", "class weights"):
        return outcome(model, history)
    scores = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    return outcome(model, history, scores={key: float(value) for key, value in scores.items()})


def body_compiled(kind: str) -> Any:
    """``compile``'s arguments and the optimizer's, as in one process."""
    keras = tf.keras
    model = make_model("functional")
    x, y = samples()
    fit: dict[str, Any] = {"batch_size": 16, "epochs": 2, "verbose": 0}
    compiled: dict[str, Any] = {"optimizer": make_optimizer("sgd"), "metrics": ["accuracy"]}
    compiled["loss"] = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if kind == "steps per execution":
        compiled["steps_per_execution"] = 3
    elif kind == "clipping":
        compiled["optimizer"] = make_optimizer("clipped")
    elif kind == "eagerly":
        compiled["run_eagerly"] = True
    elif kind == "schedule":
        schedule = keras.optimizers.schedules.CosineDecay(0.3, 10)
        compiled["optimizer"] = keras.optimizers.SGD(schedule)
    elif kind == "average":
        compiled["optimizer"] = keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.5, weight_decay=0.01)
    elif kind == "accumulation":
        compiled["optimizer"] = keras.optimizers.SGD(0.2, gradient_accumulation_steps=2)
    elif kind == "loss scale":
        compiled["optimizer"] = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.2))
    elif kind == "sum":
        compiled["loss"] = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        compiled["optimizer"] = keras.optimizers.SGD(0.01)
    elif kind == "synchronised":
        layers = keras.layers
        inputs = keras.Input([6])
        wide = layers.BatchNormalization(synchronized=True, momentum=0.8)(layers.Dense(8)(inputs))
        model = keras.Model(inputs, layers.Dense(3)(layers.Activation("relu")(wide)))
    elif kind == "words":  # the same word several times in a batch, whose rows Keras 3's Adam squares one by one
        compiled["optimizer"] = make_optimizer("adam")
        x = np.random.default_rng(2).integers(0, 9, x.shape)
        inputs = keras.Input([6], dtype="int32")
        embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(12, 4)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(embedded))
    elif kind == "decides in Python":  # by AutoGraph, which Keras 3 doesn't use

        def loss(y: Any, out: Any) -> Any:
            each = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
            if tf.size(y) > 0:
                each = 2.0 * each
            return each

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
        compiled["loss"] = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        fit["sample_weight"] = np.linspace(0.1, 2.0, SAMPLES).astype(np.float32)
    model.compile(**compiled)
    model = npu.distribute.replicate(model)
    return outcome(model, model.fit(x, y, **fit))


def body_metrics(kind: str) -> Any:
    """Metrics whose state adds up, some of each kind, and of the user's own, whose state doesn't."""
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
    if kind == "of scores":
        adding = [metrics.AUC(multi_label=False), metrics.Precision(), metrics.F1Score(), metrics.OneHotMeanIoU(3)]
    else:
        adding = [metrics.RootMeanSquaredError(), metrics.R2Score(), metrics.CosineSimilarity()]
    model.compile(
        optimizer=make_optimizer("sgd"),
        loss="mse",
        metrics=[*adding, Largest(), Range(name="range"), spread],
        weighted_metrics=["mae"],
    )
    model = npu.distribute.replicate(model)
    x, y = samples()
    y = np.eye(3, dtype=np.float32)[y]
    history = model.fit(
        x, y, batch_size=16, epochs=2, verbose=0, sample_weight=np.linspace(0.1, 2, SAMPLES).astype(np.float32)
    )
    for key, values in history.history.items():
        history.history[key] = [float(np.mean(value)) for value in values]
    scores = model.evaluate(x, y, verbose=0, return_dict=True)
    return outcome(model, history, scores={key: np.asarray(value) for key, value in scores.items()})


def body_decisions(directory: str) -> Any:
    """Callbacks that decide by the logs."""
    keras = tf.keras
    model = make_model("functional")
    compile_model(model)
    model = npu.distribute.replicate(model)
    x, y = samples()
    path = f"{directory}/{npu.open().workers_num}.keras"
    rates: list[float] = []
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.01),
        keras.callbacks.EarlyStopping(monitor="val_accuracy", patience=3, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(float(np.asarray(model.optimizer.learning_rate)))
        ),
    ]
    history = model.fit(
        x, y, batch_size=16, epochs=12, verbose=0, validation_split=0.3, callbacks=callbacks, shuffle=True
    )
    best = keras.models.load_model(path)
    return outcome(model, history, rates=rates, best=best.get_weights(), epochs=len(rates))


def body_files(directory: str) -> Any:
    """Callbacks that write, ``save`` on every rank to one path, and going on from a backup."""
    keras = tf.keras
    place = Path(directory) / str(npu.open().workers_num)
    callbacks = keras.callbacks
    x, y = samples()

    def train(epochs: int, keep: bool) -> Any:
        model = make_model("functional")
        compile_model(model, "adam")
        model = npu.distribute.replicate(model)
        given = [
            callbacks.CSVLogger(str(place / "log.csv"), append=True),
            callbacks.TensorBoard(str(place / "board")),
            callbacks.ModelCheckpoint(str(place / "weights.{epoch}.weights.h5"), save_weights_only=True),
            callbacks.ModelCheckpoint(str(place / "last.keras")),
            callbacks.BackupAndRestore(str(place / "backup"), **({"delete_checkpoint": False} if keep else {})),
        ]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            history = model.fit(x, y, batch_size=16, epochs=epochs, verbose=2, callbacks=given, shuffle=False)
        assert len(given) == 5
        return model, history, printed.getvalue()

    if npu.distribute.is_main():
        place.mkdir()
    npu.distribute.barrier()
    train(2, keep=True)
    model, history, printed = train(4, keep=False)
    assert bool(printed) == npu.distribute.is_main()
    model.save(str(place / "saved.keras"))
    model.save_weights(str(place / "saved.weights.h5"))
    loaded = keras.models.load_model(str(place / "saved.keras"))
    model.load_weights(str(place / "saved.weights.h5"))
    last = keras.models.load_model(str(place / "last.keras"))
    npu.distribute.barrier()
    rows = (place / "log.csv").read_text().splitlines()
    return outcome(
        model,
        history,
        epochs=history.epoch,
        loaded=loaded.get_weights(),
        last=last.get_weights(),
        rows=len(rows),
        boards=len(list((place / "board" / "train").glob("events*"))),
        files=sorted(path.name for path in place.iterdir()),
    )


def body_unshuffled(kind: str) -> Any:
    """Data that aren't the same on all ranks; returns the error or the logs."""
    rank = npu.open().worker_id
    model = make_model("functional")
    compile_model(model)
    model = npu.distribute.replicate(model)
    x, y = samples()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    try:
        with warnings_of_package() as said:
            if kind == "shuffle":
                tf.keras.utils.set_random_seed(rank)
                for _ in range(10 * rank):  # the functions in the dataset are numbered otherwise on each rank
                    tf.function(lambda: 1)()
                noise = tf.keras.layers.GaussianNoise(0.1)  # in Keras 3 with a generator of its own
                table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [0, 1, 2]), -1)

                def augment(x: Any, y: Any) -> Any:
                    pair = noise(x, training=True), table.lookup(y)
                    return tf.switch_case(tf.constant(0), [lambda: pair, lambda: pair])

                data: Any = dataset.map(augment).shuffle(SAMPLES).batch(16)
            elif kind == "shard":
                data = dataset.shard(npu.distribute.size(), rank).batch(16)
            elif kind == "batch":
                data = dataset.batch(16 >> rank)
            elif kind == "parts":
                part = slice(rank, None, npu.distribute.size())
                model.fit(x[part], y[part], batch_size=16, verbose=0)
                return "", said
            else:
                assert kind == "not divided"
                data = npu.distribute.divided(dataset.batch(16))
            history = model.fit(data, epochs=2, verbose=0)
            return outcome(model, history), said
    except ValueError as error:
        return str(error), said


def body_later_batches(wanted: str, steps: int) -> tuple[str, list[str], Any]:
    """Return the error and warnings of calls whose data differ from the third batch on, and the weights.

    Args:
        wanted: which data: those of ``"train"``, ``"validation"``, ``"evaluate"``, ``"predict"`` or none.
        steps: ``steps_per_execution``.
    """

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
    error = ""
    with warnings_of_package() as said:
        if wanted in ("train", "validation", "none"):
            model.fit(data("train"), validation_data=data("validation"), epochs=3, verbose=0)
        try:
            if wanted in ("evaluate", "none"):
                model.evaluate(data("evaluate"), verbose=0)
            if wanted in ("predict", "none"):
                model.predict(data("predict"), verbose=0)
        except ValueError as found:
            error = str(found)
    return error, said, [weight.tolist() for weight in model.get_weights()]


def body_alone(method: str) -> str:
    """Return the error of a callback that calls a method of the model on rank 0 only."""

    class Alone(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if npu.distribute.is_main():
                getattr(self.model, method)(np.ones([8, 2]), verbose=0)

    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        npu.distribute.replicate(model).fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0, callbacks=[Alone()])
    except RuntimeError as error:
        return str(error)
    return ""


def body_callback_of_rank_0(kind: str, directory: str) -> tuple[str, Any]:
    """Return the error of a fit with a callback on rank 0 only, and the weights."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    steps: Any = "auto" if kind == "auto" else 1
    model.compile("sgd", "mse", steps_per_execution=steps)
    callbacks: list[Any] = []
    if npu.distribute.is_main() and kind == "rate":
        callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch == 0 else 0.001)]
    if npu.distribute.is_main() and kind == "backup":
        callbacks = [keras.callbacks.BackupAndRestore(f"{directory}/backup")]
    try:
        npu.distribute.replicate(model).fit(
            np.ones([8, 2]), np.ones([8, 1]), batch_size=8, epochs=3, verbose=0, callbacks=callbacks
        )
    except RuntimeError as error:
        return str(error), None
    assert not getattr(model, "autotune_steps_per_execution", False)
    return "", [weight.tolist() for weight in model.get_weights()]


def body_divided() -> Any:
    """Each rank reads its own part; the parts of a step together are one process's batch."""
    rank, size = npu.distribute.rank(), npu.distribute.size()
    model = make_model("functional")
    compile_model(model)
    model = npu.distribute.replicate(model)
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
    return outcome(model, history, scores={key: float(value) for key, value in scores.items()})


def body_random_layers() -> Any:
    """Dropout and batch normalisation: not what one process does, but the same on all ranks."""
    keras = tf.keras
    rank = npu.distribute.rank()
    keras.utils.set_random_seed(rank)
    layers = keras.layers
    model = keras.Sequential([keras.Input([6]), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)])
    compile_model(model, "adam")
    model = npu.distribute.replicate(model)
    x, y = samples()
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_split=0.2)
    compile_model(model, "sgd")
    one_more = model.train_on_batch(x[:5], y[:5], return_dict=True)
    return outcome(model, history, one_more={key: float(value) for key, value in one_more.items()})
