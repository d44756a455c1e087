"""Bodies of ``test_files.py``: what a replicated model writes. Each returns what its test compares."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from heard import error_of, warnings_of_package

import npu_device as npu


def make(value: float = 0.0) -> Any:
    """Return a replicated model whose weights all have a value, and the paths for which this rank's own methods are
    called; these take a while.
    """
    keras = tf.keras
    part = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="tanh")], name="part")
    model = keras.Sequential([keras.Input((3,)), part])
    model.compile("sgd", keras.losses.MeanSquaredError())
    fill(model, value)
    written: list[str] = []

    def slow(own: Any) -> Any:
        def write(path: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.2)
            written.append(os.path.basename(path))
            return own(path, *args, **kwargs)

        return write

    for name in ("save", "save_weights", "export"):
        for each in (model, part):
            object.__setattr__(each, name, slow(getattr(each, name)))
    return npu.distribute.replicate(model), written


def fill(model: Any, value: float) -> None:
    model.set_weights([np.full_like(weight, value) for weight in model.get_weights()])


def value_in(weights: Any) -> float:
    [value] = {float(entry) for weight in weights for entry in np.ravel(weight)}
    return value


def body_next_line(keras_version: str, directory: str) -> Any:
    """The next line reads each kind of file, on every rank."""
    kinds = [
        ("save", "model.keras"),
        ("save", "model.h5"),
        ("save_weights", "a.weights.h5"),
        ("export", "exported"),
        ("export", "exported"),  # over the old one
        ("save", "part.keras"),
        ("save", "saved_model"),  # a directory
        ("save_weights", "prefix"),  # in TensorFlow's format
    ]
    found = []
    for number, (method, name) in enumerate(kinds[: 8 if keras_version == "2" else 6]):
        model, written = make(number)
        path = f"{directory}/{name}"
        getattr(model.get_layer("part") if name == "part.keras" else model, method)(path)
        if method == "export":
            weights = [variable.numpy() for variable in tf.saved_model.load(path).variables]
        elif method == "save":
            weights = tf.keras.models.load_model(path).get_weights()
        else:
            fill(model, -1)
            model.load_weights(path)
            weights = model.get_weights()
        found.append((name, value_in(weights), len(written)))
    return found


def body_other_numbers_of_saves(directory: str) -> Any:
    """Rank 0 saves alone and more often; each rank reads what its own save stands for."""
    main, rank = npu.distribute.is_main(), npu.distribute.rank()
    model, written = make(0)
    path = f"{directory}/model.keras"

    def value() -> float:
        return value_in(tf.keras.models.load_model(path).get_weights())

    found = {}
    if main:
        began = time.monotonic()
        model.save(path)
        found["seconds"] = time.monotonic() - began
    npu.distribute.barrier()
    fill(model, 1)
    model.save(path)
    found["after one of rank 0"] = value()
    for number in (2, 3):  # nothing in between, but that they differ
        npu.distribute.barrier()
        fill(model, number)
        model.save(path)
        fill(model, number + 0.5)
        model.save(path)
        found[f"second of {number}"] = value()
    with npu.distribute.rank_zero_first():
        model.save(f"{directory}/first.keras")
    if not main:
        model.save(f"{directory}/other{rank}.keras")
    model.save(Path(directory) / f"own{rank}.keras")
    npu.distribute.barrier()
    found["written"] = written
    return found


def body_fails_and_apart(directory: str) -> Any:
    """Return each rank's error when rank 0 can't write, and the value that is read after another try; what is said when
    the model is saved twice by a function, to a path of each rank; then the value, what has been written, and the files
    of each rank in a directory of its own, as on hosts without a common file system.
    """
    model, written = make(4)
    (Path(directory) / "file").touch()
    error = error_of(model.save, f"{directory}/file/model.keras")
    path = f"{directory}/model.keras"
    with warnings_of_package() as said:
        model.save(path)
        assert said == []
        for _ in range(2):
            tf.keras.models.save_model(model, f"{directory}/{npu.distribute.rank()}.keras")
    value = value_in(tf.keras.models.load_model(path).get_weights())
    here, mine = os.getcwd(), Path(directory) / str(npu.distribute.rank())
    mine.mkdir()
    os.chdir(mine)
    try:
        written.clear()
        model.save("model.keras")
        apart = value_in(tf.keras.models.load_model("model.keras").get_weights()), written, os.listdir()
    finally:
        os.chdir(here)
    return error, value, said, apart


def body_in_fit(keras_version: str, directory: str) -> Any:
    """Callbacks: files in a new directory, read in the same call; what is printed; callbacks that write."""
    keras = tf.keras
    model, written = make(0)
    x = np.linspace(0, 1, 24).reshape(8, 3).astype(np.float32)
    read = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.predict(x)
            self.model.evaluate(x, x[:, :2])
            path = f"{directory}/look.keras"
            self.model.save(path)
            same = map(np.array_equal, keras.models.load_model(path).get_weights(), self.model.get_weights())
            read.append(all(same))

    kinds = keras.callbacks
    given = [
        kinds.ModelCheckpoint(f"{directory}/new/best.keras", monitor="loss", save_best_only=True, verbose=1),
        kinds.ModelCheckpoint(f"{directory}/new/{{epoch}}.weights.h5", save_weights_only=True, save_freq=1),
        kinds.ReduceLROnPlateau(monitor="loss", min_delta=100.0, patience=1, verbose=1),
        kinds.EarlyStopping(monitor="loss", min_delta=100.0, patience=5, verbose=1),
        kinds.LearningRateScheduler(lambda epoch, rate: rate, verbose=1),
        kinds.CSVLogger(f"{directory}/log.csv", append=True),
        kinds.TensorBoard(f"{directory}/board"),
        Look(),
    ]
    if keras_version == "2":
        given.append(kinds.ModelCheckpoint(f"{directory}/new/prefix", save_weights_only=True))
        given.append(kinds.ModelCheckpoint(f"{directory}/new/saved_model"))
    elif hasattr(kinds, "SwapEMAWeights"):
        model.compile(keras.optimizers.SGD(use_ema=True, ema_momentum=0.5), "mse")
        given.insert(0, kinds.SwapEMAWeights(swap_on_epoch=True))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model.fit(x, x[:, :2], batch_size=4, epochs=2, verbose=2, callbacks=given)
    assert all(callback.verbose == 1 for callback in given if hasattr(callback, "verbose") and callback.verbose)
    speaking = sum(bool(getattr(callback, "verbose", 0)) for callback in given)
    rows = len(Path(f"{directory}/log.csv").read_text().splitlines())
    files = sorted(path.name for path in Path(directory, "new").iterdir())
    npu.distribute.barrier()
    boards = len(list(Path(directory, "board", "train").glob("events*")))
    return bool(printed.getvalue()), written, read, speaking, rows, boards, files


def body_own_list(directory: str) -> Any:
    """Keras's own list of callbacks, twice."""
    keras = tf.keras
    model, _ = make(0)
    x = np.ones((8, 3), np.float32)
    stops = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", npu.distribute.is_main())
    )
    logger = keras.callbacks.CSVLogger(f"{directory}/log.csv", append=True)
    given = keras.callbacks.CallbackList([logger, stops], model=model, add_history=True)
    for _ in range(2):
        history = model.fit(x, x[:, :2], batch_size=4, epochs=3, verbose=0, callbacks=given)
    npu.distribute.barrier()
    assert any(isinstance(callback, keras.callbacks.CSVLogger) for callback in given.callbacks)
    return history.epoch, len(Path(f"{directory}/log.csv").read_text().splitlines())
