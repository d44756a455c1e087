"""A contrastive loss: each sample is compared with those of all ranks, as one process compares it with its batch."""

import npu_device as npu

npu.open(seed=1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential(
            [keras.Input([64]), layers.Dense(32, "relu"), layers.Dense(16)]
        )

    def call(self, x):
        return tf.math.l2_normalize(self.encoder(x), axis=1)

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            # One process compares all samples of the batch. So do N ranks, if each has those of all.
            first, second = (
                npu.distribute.all_gather(self(first)),
                npu.distribute.all_gather(self(second)),
            )
            similarities = tf.matmul(first, second, transpose_b=True) / 0.1
            own = tf.range(tf.shape(similarities)[0])
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(own, similarities, from_logits=True)
            )
        variables = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"contrast": loss}


def main():
    keras.utils.set_random_seed(1)
    digits = load_digits().data[:500].astype("float32") / 16
    noise = np.random.default_rng(1).normal(scale=0.1, size=(2, *digits.shape)).astype("float32")
    model = Contrastive()
    model.compile(keras.optimizers.Adam(0.002))
    model = npu.distribute.replicate(model)
    history = model.fit(digits + noise[0], digits + noise[1], batch_size=64, epochs=2, verbose=0)
    if npu.distribute.is_main():
        print(f"loss {history.history['contrast'][-1]:.4f}")
    return {"loss": history.history["contrast"], "weights": model.get_weights()}


if __name__ == "__main__":
    result = main()
