"""A custom training loop: uneven data, metrics of all ranks, files from rank 0."""

import tempfile

import npu_device as npu

npu.open(seed=1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras
BATCH = 60


def main():
    rank, size = npu.distribute.rank(), npu.distribute.size()
    with npu.distribute.rank_zero_first():
        digits = load_digits()  # rank 0 downloads or prepares; the others then find it done
    x, y = digits.data[:397].astype("float32") / 16, digits.target[:397]

    model = keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    npu.distribute.broadcast(model.weights)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = loss_of(y, scores)
        gradients = tape.gradient(loss, model.trainable_variables)
        # By samples, not by ranks: the last batch is smaller, and divided unevenly.
        loss, *gradients = npu.distribute.weighted_mean([loss, *gradients], tf.shape(x)[0])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(y, scores)
        return loss

    losses = []
    for _ in range(3):
        order = np.random.default_rng(0).permutation(len(x))  # the same on every rank
        accuracy.reset_state()
        for begin in range(0, len(x), BATCH):
            mine = np.array_split(order[begin : begin + BATCH], size)[rank]
            losses.append(float(step(x[mine], y[mine])))
        results = npu.distribute.metric_results([accuracy])
        if npu.distribute.is_main():
            print(f"loss {losses[-1]:.4f} accuracy {results['sparse_categorical_accuracy']:.4f}")
    with tempfile.TemporaryDirectory() as directory:
        if npu.distribute.is_main():
            model.save(f"{directory}/model.keras")
        npu.distribute.barrier()  # the others can read it from here on
    return {
        "losses": losses,
        "accuracy": float(results["sparse_categorical_accuracy"]),
        "weights": model.get_weights(),
    }


if __name__ == "__main__":
    result = main()
