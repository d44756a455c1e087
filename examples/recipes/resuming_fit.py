"""Interrupted and resumed: ``fit`` ends as if nothing had happened."""

import contextlib
import tempfile

import npu_device as npu

npu.open(seed=1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras
BATCH, EPOCHS = 60, 3  # six steps an epoch


def data():
    with npu.distribute.rank_zero_first():
        digits = load_digits()
    return digits.data[:360].astype("float32") / 16, digits.target[:360]


def make_model():
    keras.utils.set_random_seed(1)  # shuffling and initial weights follow from it
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return npu.distribute.replicate(model)


class Interrupted(Exception):
    """Stands for whatever ends a training."""


class InterruptAfter(keras.callbacks.Callback):
    """End fit with an error after a number of steps."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def train(directory, *callbacks):
    """Train, from the newest checkpoint if there is one; with SIGTERM to any rank, all end here with code 75."""
    model = make_model()
    checkpoint = npu.train.FitCheckpoint(directory, every=4)
    model.fit(
        *data(), batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[checkpoint, *callbacks]
    )
    return model.get_weights()


def main():
    with tempfile.TemporaryDirectory() as mine:
        directory = npu.distribute.broadcast_object(mine)
        whole = train(f"{directory}/whole")
        with contextlib.suppress(Interrupted):
            train(
                f"{directory}/parts", InterruptAfter(9)
            )  # in the second epoch; the newest checkpoint is of step 8
        resumed = train(f"{directory}/parts")
        npu.distribute.barrier()
    equal = all(np.array_equal(one, two) for one, two in zip(whole, resumed))
    if npu.distribute.is_main():
        print("the resumed training ends with the same bits:", equal)
    return {"equal": int(equal)}


if __name__ == "__main__":
    result = main()
