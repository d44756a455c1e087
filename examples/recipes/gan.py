"""A GAN: a custom train step with two optimizers, each of which updates its own variables."""

import npu_device as npu

npu.open(seed=1)

import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

keras = tf.keras
NOISE = 8


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        layers = keras.layers
        self.generator = keras.Sequential(
            [keras.Input([NOISE]), layers.Dense(32, "relu"), layers.Dense(64)]
        )
        self.critic = keras.Sequential(
            [keras.Input([64]), layers.Dense(32, "relu"), layers.Dense(1)]
        )
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.critic_loss, self.generator_loss]

    def train_step(self, data):
        real, noise = data
        with tf.GradientTape() as tape:
            right, wrong = self.critic(real), self.critic(self.generator(noise))
            loss = self.loss_of(tf.ones_like(right), right) + self.loss_of(
                tf.zeros_like(wrong), wrong
            )
        variables = self.critic.trainable_variables
        self.critic_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            wrong = self.critic(self.generator(noise))
            loss = self.loss_of(tf.ones_like(wrong), wrong)
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.generator_loss.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def main():
    keras.utils.set_random_seed(1)
    real = load_digits().data[:500].astype("float32") / 16
    noise = tf.random.stateless_normal(
        [500, NOISE], seed=[1, 2]
    )  # with the data, so that each rank gets its share
    model = Gan()
    model.compile(keras.optimizers.Adam(0.001), keras.optimizers.Adam(0.001))
    model = npu.distribute.replicate(model)
    history = model.fit(real, noise, batch_size=64, epochs=3, verbose=0)
    losses = {name: values[-1] for name, values in history.history.items()}
    if npu.distribute.is_main():
        print(losses)
    return {"losses": losses, "weights": model.get_weights()}


if __name__ == "__main__":
    result = main()
