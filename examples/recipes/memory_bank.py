"""A memory bank: a queue of the newest embeddings, of all ranks, with which a train step compares its samples."""

import npu_device as npu

npu.open(seed=1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras
SIZE = 128


class MemoryBank(keras.Model):
    def __init__(self):
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential(
            [keras.Input([64]), layers.Dense(32, "relu"), layers.Dense(16)]
        )
        self.bank = self.add_weight(
            name="bank",
            shape=(SIZE, 16),
            trainable=False,
            initializer=keras.initializers.RandomNormal(seed=1),
        )

    def call(self, x):
        return tf.math.l2_normalize(self.encoder(x), axis=1)

    def train_step(self, data):
        anchors, positives = data
        keys = tf.stop_gradient(self(positives))
        with tf.GradientTape() as tape:
            queries = self(anchors)
            right = tf.reduce_sum(queries * keys, axis=1, keepdims=True)
            others = tf.matmul(queries, tf.convert_to_tensor(self.bank), transpose_b=True)
            logits = tf.concat([right, others], axis=1) / 0.1
            first = tf.zeros(tf.shape(logits)[0], tf.int32)
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(first, logits, from_logits=True)
            )
        variables = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        # The bank is the same on all ranks: it takes the keys of all of them, in the order of the batch.
        keys = npu.distribute.all_gather(keys)
        self.bank.assign(tf.concat([keys, tf.convert_to_tensor(self.bank)], axis=0)[:SIZE])
        return {"contrast": loss}


def main():
    keras.utils.set_random_seed(1)
    digits = load_digits().data[:500].astype("float32") / 16
    noise = np.random.default_rng(1).normal(scale=0.1, size=(2, *digits.shape)).astype("float32")
    model = MemoryBank()
    model.compile(keras.optimizers.Adam(0.002))
    model = npu.distribute.replicate(model)
    history = model.fit(digits + noise[0], digits + noise[1], batch_size=64, epochs=2, verbose=0)
    if npu.distribute.is_main():
        print(f"loss {history.history['contrast'][-1]:.4f}")
    return {
        "loss": history.history["contrast"],
        "bank": np.asarray(model.bank),
        "weights": model.get_weights(),
    }


if __name__ == "__main__":
    result = main()
