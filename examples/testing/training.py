"""A small training on any number of ranks: data, a model, a metric, and a loop that resumes from its checkpoints."""

import numpy as np
import tensorflow as tf

import npu_device as npu

keras = tf.keras


def make_samples(count=48):
    random = np.random.default_rng(1)
    x = random.normal(size=[count, 4]).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)


def make_dataset(samples, global_batch=12):
    """Return this rank's share of the samples, in batches."""
    dataset = tf.data.Dataset.from_tensor_slices(samples)
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, global_batch)
    return dataset.batch(batch)


def make_model():
    model = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=["mae"],
    )
    return model


def accuracy(model, dataset):
    """Return the share of all ranks' samples that the model is right about."""
    right = total = 0.0
    for x, y in dataset:
        right += float(tf.reduce_sum(tf.cast((model(x) > 0) == (y > 0), tf.float32)))
        total += len(x)
    right, total = npu.distribute.all_reduce([right, total], "sum")
    return float(right) / float(total)


def train(directory, steps=8, step_done=lambda step: None):
    """Train until some steps are done, from the newest checkpoint in the directory; return the weights."""
    keras.utils.set_random_seed(1)
    model, optimizer = make_model(), keras.optimizers.Adam(0.01)
    batches = iter(make_dataset(make_samples()).repeat())
    npu.distribute.broadcast(model.weights)
    checkpoint = npu.train.JobCheckpoint(
        directory, model=model, optimizer=optimizer, per_rank={"batches": batches}, every=2
    )
    with checkpoint:
        for step in range(checkpoint.restore() + 1, steps + 1):
            x, y = next(batches)
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x))
            gradients = npu.distribute.all_reduce(tape.gradient(loss, model.trainable_variables))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            checkpoint.step_done(step)
            step_done(step)
    return model.get_weights()
