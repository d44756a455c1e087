"""Evaluation, summaries and checkpoints on rank 0 only, while the other ranks wait for it in the next epoch."""

import tempfile
import time

import numpy as np
import tensorflow as tf

import npu_device as npu
from hccl.manage.api import get_rank_id

npu.open().as_default()

random = np.random.RandomState(11)
x_train, x_test = random.randn(24, 4).astype(np.float32), random.randn(16, 4).astype(np.float32)
y_train, y_test = x_train.sum(axis=1, keepdims=True), x_test.sum(axis=1, keepdims=True)

tf.keras.utils.set_random_seed(0)
model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper("sgd")
model.compile(optimizer, "mse")
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
dataset, batch_size = npu.distribute.shard_and_rebatch_dataset(dataset, 8)
dataset = dataset.batch(batch_size)

scores, checkpoints = [], 0
with tempfile.TemporaryDirectory() as directory:
    for epoch in range(3):
        model.fit(dataset, verbose=0)
        if get_rank_id() == 0:
            scores.append(float(model.evaluate(x_test, y_test, verbose=0)))
            model.save_weights(f"{directory}/epoch{epoch}.weights.h5")
            checkpoints += 1
            time.sleep(0.3)

result = {"scores": scores, "checkpoints": checkpoints, "weights": model.get_weights()}
