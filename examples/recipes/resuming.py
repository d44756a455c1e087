"""Interrupted and resumed: a custom loop ends as if nothing had happened."""

import tempfile

import npu_device as npu

npu.open(seed=1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras
BATCH, STEPS = 60, 12


def data():
    with npu.distribute.rank_zero_first():
        digits = load_digits()
    return digits.data[:360].astype("float32") / 16, digits.target[:360]


def make_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)]
    )


def loop(directory, steps):
    """Train up to a number of steps, from the newest checkpoint if there is one."""
    model, optimizer = make_model(), keras.optimizers.Adam(0.01)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(
        tf.data.Dataset.from_tensor_slices(data()).shuffle(100), BATCH
    )
    iterator = iter(dataset.repeat().batch(batch))
    npu.distribute.broadcast(model.weights)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = npu.distribute.all_reduce(tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    with npu.train.JobCheckpoint(
        directory, every=4, model=model, optimizer=optimizer, per_rank={"iterator": iterator}
    ) as checkpoint:
        for done in range(checkpoint.restore(), steps):
            step(*next(iterator))
            checkpoint.step_done(done + 1)  # with SIGTERM to any rank, all end here with code 75
    return model.get_weights()


def main():
    with tempfile.TemporaryDirectory() as mine:
        directory = npu.distribute.broadcast_object(mine)
        whole = loop(f"{directory}/whole", STEPS)
        loop(f"{directory}/parts", 6)  # the newest checkpoint is that of step 4
        resumed = loop(f"{directory}/parts", STEPS)
        npu.distribute.barrier()
    equal = all(np.array_equal(one, two) for one, two in zip(whole, resumed))
    if npu.distribute.is_main():
        print("the resumed training ends with the same bits:", equal)
    return {"equal": int(equal)}


if __name__ == "__main__":
    result = main()
