"""Batch normalization with the samples of all ranks."""

import npu_device as npu

npu.open(seed=1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras


def main():
    keras.utils.set_random_seed(1)
    digits = load_digits()
    x, y = digits.images[..., None].astype("float32") / 16, digits.target
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9, synchronized=True),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.005), loss=loss, metrics=["accuracy"])
    model = npu.distribute.replicate(model)
    model.fit(x, y, batch_size=96, epochs=3, verbose=0)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    if npu.distribute.is_main():
        print(f"loss {loss:.4f} accuracy {accuracy:.4f}")
    statistics = [np.asarray(value) for value in model.layers[1].non_trainable_variables]
    return {"accuracy": accuracy, "statistics": statistics, "weights": model.get_weights()}


if __name__ == "__main__":
    result = main()
