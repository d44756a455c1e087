"""A GAN: two models, two wrapped optimizers and two tapes in one step."""

import argparse

import numpy as np
import tensorflow as tf

import npu_device as npu

npu_handle = npu.open().as_default()


class GAN:
    def __init__(self):
        layers = tf.keras.layers
        self.generator = tf.keras.Sequential(
            [tf.keras.Input([4]), layers.Dense(8), layers.LeakyReLU(), layers.Dense(6, activation="tanh")]
        )
        self.discriminator = tf.keras.Sequential(
            [tf.keras.Input([6]), layers.Dense(8), layers.LeakyReLU(), layers.Dense(1)]
        )
        wrapper = npu.distribute.npu_distributed_keras_optimizer_wrapper
        self.generator_optimizer = wrapper(tf.keras.optimizers.Adam(1e-2, beta_1=0.5))
        self.discriminator_optimizer = wrapper(tf.keras.optimizers.Adam(1e-2, beta_1=0.5))
        self.cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def train_step(self, real, noise):
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            fake = self.generator(noise, training=True)
            real_output = self.discriminator(real, training=True)
            fake_output = self.discriminator(fake, training=True)
            gen_loss = self.cross_entropy(tf.ones_like(fake_output), fake_output)
            disc_loss = self.cross_entropy(tf.ones_like(real_output), real_output) + self.cross_entropy(
                tf.zeros_like(fake_output), fake_output
            )
        generator_variables = self.generator.trainable_variables
        discriminator_variables = self.discriminator.trainable_variables
        self.generator_optimizer.apply_gradients(
            zip(gen_tape.gradient(gen_loss, generator_variables), generator_variables)
        )
        self.discriminator_optimizer.apply_gradients(
            zip(disc_tape.gradient(disc_loss, discriminator_variables), discriminator_variables)
        )
        return gen_loss, disc_loss


def main(flags):
    tf.keras.utils.set_random_seed(npu_handle.worker_id)
    gan = GAN()
    if npu_handle.is_cluster_worker():
        npu.distribute.broadcast(gan.generator.trainable_variables)
        npu.distribute.broadcast(gan.discriminator.trainable_variables)
    random = np.random.RandomState(7)
    real, noise = (random.randn(24, width).astype(np.float32) for width in (6, 4))
    dataset = tf.data.Dataset.from_tensor_slices((real, noise))
    dataset, batch_size = npu.distribute.shard_and_rebatch_dataset(dataset, flags.batch_size)
    for _ in range(flags.epochs):
        for images, seeds in dataset.batch(batch_size):
            gan.train_step(images, seeds)
    return {"weights": gan.generator.get_weights() + gan.discriminator.get_weights()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    result = main(parser.parse_args())
