"""Keras's ``fit`` with the optimizer wrapper, after ``compile``."""

import argparse

import npu_device
from hccl.manage.api import get_rank_id, get_rank_size
from npu_device.distribute.hccl import npu_callbacks_append

npu_device.global_options().dump_config.enable_dump = False
npu_device.global_options().profiling_config.enable_profiling = False
npu_device.open().as_default()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


def load(batch_size):
    random = np.random.RandomState(3)
    x = random.rand(32, 8, 8, 1).astype(np.float32)
    y = tf.keras.utils.to_categorical(random.randint(0, 3, 32), 3)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset, batch_size = npu_device.distribute.shard_and_rebatch_dataset(dataset, batch_size)
    return dataset.repeat().batch(batch_size)


def build():
    return tf.keras.Sequential(
        [
            tf.keras.Input([8, 8, 1]),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(3, activation="softmax"),
        ]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args()
    tf.keras.utils.set_random_seed(get_rank_id())
    model = build()
    model.compile(loss="categorical_crossentropy", optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9))
    if get_rank_size() > 1:
        npu_device.distribute.npu_distributed_keras_optimizer_wrapper(model.optimizer)
    callbacks = npu_callbacks_append([tf.keras.callbacks.TerminateOnNaN()])
    history = model.fit(load(args.batch_size), epochs=2, steps_per_epoch=4, callbacks=callbacks, verbose=0)
    return {"epochs": len(history.history["loss"]), "weights": model.get_weights()}


if __name__ == "__main__":
    result = main()
