"""A custom training loop that reduces its gradients itself, and the epoch's loss at its end."""

import argparse
import os

import numpy as np
import tensorflow as tf

import npu_device as npu

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=12)
parser.add_argument("--precision_mode", default="allow_mix_precision")
parser.add_argument("--auto_tune", action="store_true")
args = parser.parse_args()

npu.global_options().precision_mode = args.precision_mode
if args.auto_tune:
    npu.global_options().auto_tune_mode = "RL,GA"
npu.open().as_default()

rank_size = int(os.getenv("RANK_SIZE", "1"))
rank_id = int(os.getenv("RANK_ID", "0"))


def data(batch_size):
    features = np.random.RandomState(0).randn(48, 6).astype(np.float32)
    labels = (features.sum(axis=1) > 0).astype(np.int64)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    if rank_size != 1:
        dataset, batch_size = npu.distribute.shard_and_rebatch_dataset(dataset, batch_size)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.experimental.AUTOTUNE)


class Classifier(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(8, activation="relu")
        self.logits = tf.keras.layers.Dense(2)

    def call(self, x):
        return self.logits(self.hidden(x))


tf.keras.utils.set_random_seed(rank_id)
model = Classifier()
model(tf.zeros([1, 6]))
if rank_size != 1:
    npu.distribute.broadcast(model.trainable_variables, root_rank=0)
optimizer = tf.keras.optimizers.Adam(0.01)
compute_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_loss = tf.keras.metrics.Mean(name="train_loss")


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = compute_loss(labels, model(images))
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = npu.distribute.all_reduce(gradients, "mean")
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss)


for _ in range(2):
    for images, labels in data(args.batch_size):
        train_step(images, labels)
loss = npu.distribute.all_reduce([train_loss.result()], "mean")[0]

result = {"loss": float(loss), "weights": model.get_weights()}
