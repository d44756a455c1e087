"""Embeddings of Keras 3 on ranks of several threads, among which TensorFlow divides the rows of an update."""

from __future__ import annotations

from pathlib import Path

from tests.tools.launcher import npurun, script

EMBEDDINGS = """
import zlib, keras, numpy as np, tensorflow as tf
import npu_device as npu

tf.config.threading.set_intra_op_parallelism_threads(4)
npu.open(seed=1)
words = np.random.default_rng(0).integers(0, 50, (1024, 64))
wanted = words.mean(1, keepdims=True).astype("float32")

def made():
    layers = [keras.layers.Embedding(50, 32), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([64], dtype="int32"), *layers])
    npu.distribute.broadcast(model.variables)
    return model

for optimizer in (keras.optimizers.SGD(0.5), keras.optimizers.Adagrad(0.1)):
    model = made()
    model.compile(optimizer, "mse")
    npu.distribute.replicate(model).fit(words, wanted, batch_size=256, epochs=2, verbose=0)
    assert "assign_sub" not in vars(optimizer)

def train(optimizer, reduce):
    model = made()
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = reduce(tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    for step in (step, tf.function(step)):
        for first in range(0, 1024, 128):
            part = slice(first + npu.distribute.rank(), first + 128, npu.distribute.size())
            step(words[part], wanted[part])
    digest = tf.constant(zlib.crc32(model.layers[0].embeddings.numpy().tobytes()), tf.int64)
    lowest, highest = (npu.distribute.all_reduce(digest, kind) for kind in ("min", "max"))
    assert lowest == highest

train(npu.distribute.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), lambda gradients: gradients)
train(keras.optimizers.SGD(0.5), lambda gradients: npu.distribute.all_reduce(gradients, "mean"))
"""


def test_updates_by_many_rows_have_the_same_bits_on_ranks_of_several_threads(
    tmp_path: Path,
) -> None:
    run = npurun(
        *("-n", "2", script(tmp_path, EMBEDDINGS)), cwd=tmp_path, limit=240, NPU_DEVICE_AUDIT="1"
    )
    assert run.returncode == 0, run.stderr.decode()[-3000:]
    assert b"drifted" not in run.stderr
