"""Input pipelines: JPEG files of 1200×1200 pixels, which take a core some 5 ms each to decode and resize."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import tensorflow as tf

import npu_device as npu
from benchmarks.cases import READ_SAMPLES

_PIXELS, _RESULT, _FILES, _BATCH = 1200, 96, 16, 32


def model(keras_name: str) -> Any:
    """Return a compiled model that costs next to nothing, of ``keras`` or ``tf_keras``."""
    keras = importlib.import_module(keras_name)
    layers = [
        keras.layers.Input([_RESULT, _RESULT, 3]),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(1),
    ]
    made = keras.Sequential(layers)
    made.compile(keras.optimizers.SGD(1e-9), "mse")
    return made


def batches(kind: str, divides: bool, samples: int = READ_SAMPLES) -> Any:
    """Return the batches of a step: pictures, and a number for each.

    Args:
        kind: ``"images"`` in memory; ``"records"`` in a file, shuffled; or ``"augmented"``, with random numbers.
        divides: each rank decodes its rows only.
        samples: of an epoch.
    """
    generator = tf.random.Generator.from_seed(1)
    coarse = generator.uniform([_FILES, _PIXELS // 16, _PIXELS // 16, 3], maxval=255)
    pictures = tf.cast(tf.image.resize(coarse, [_PIXELS, _PIXELS]), tf.uint8)
    files = tf.stack([tf.io.encode_jpeg(picture) for picture in pictures])
    source = tf.data.Dataset.from_tensor_slices(files)
    if kind == "records":
        path = tempfile.mkdtemp(prefix="npu_images_") + "/records"
        with tf.io.TFRecordWriter(path) as writer:
            for file in files.numpy():
                writer.write(file)
        source = tf.data.TFRecordDataset(path)
    source = source.repeat(samples // _FILES).shuffle(READ_SAMPLES, seed=1)

    def decoded(file: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.image.resize(
            tf.io.decode_jpeg(file, channels=3), [_RESULT, _RESULT]
        ), tf.constant([1.0])

    def flipped(file: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        picture, label = decoded(file)
        return tf.image.stateless_random_flip_left_right(picture, seed), label

    if not divides:  # as with any dataset, of which each rank takes its share later
        one = decoded if kind != "augmented" else lambda file: flipped(file, tf.constant([1, 2]))
        return source.map(one, tf.data.AUTOTUNE).batch(_BATCH).prefetch(tf.data.AUTOTUNE)
    if kind == "augmented":
        return npu.distribute.pipeline(source, flipped, _BATCH, seed=1)
    return npu.distribute.pipeline(source, decoded, _BATCH)
