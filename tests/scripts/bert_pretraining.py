"""Pretraining in the manner of BERT: several small batches a step, loss scaling, averaged gradients, LAMB."""

import argparse
import os

import numpy as np
import tensorflow as tf

import npu_device as npu
from npu_device import gen_npu_ops

parser = argparse.ArgumentParser()
parser.add_argument(
    "--overflow_at", type=int, default=-1, help="the step whose loss overflows on the last rank"
)
FLAGS, _ = parser.parse_known_args()

npu.global_options().precision_mode = "allow_mix_precision"
npu.global_options().modify_mixlist = "./ops_info.json"
npu.open().as_default()

RANK_SIZE = int(os.getenv("RANK_SIZE", "1"))
RANK_ID = int(os.getenv("RANK_ID", "0"))
VOCABULARY, LENGTH, WIDTH = 24, 6, 8
BATCH, ACCUMULATED = 4, 2


class LAMB(tf.keras.optimizers.SGD):
    """LAMB by the NPU's fused operators."""

    def build(self, variables):
        if hasattr(self, "moments"):
            return
        super().build(variables)
        with tf.init_scope():
            self.moments = {
                v.ref(): [tf.Variable(tf.zeros(v.shape)) for _ in range(2)] for v in variables
            }

    def update_step(self, gradient, variable, *_):
        second, first = self.moments[variable.ref()]
        step = tf.cast(self.iterations, tf.float32) + 1
        update, _, _ = gen_npu_ops.lamb_apply_optimizer_assign(
            gradient, second, first, variable, 0.9, 0.1, 0.999, 0.001, 1e-6, step, 1.0, 0.01
        )
        norms = tf.norm(variable), tf.norm(update)
        gen_npu_ops.lamb_apply_weight_assign(
            *norms, tf.cast(self.learning_rate, tf.float32), update, variable
        )


class Encoder(tf.Module):
    def __init__(self):
        initial = np.random.RandomState(RANK_ID)

        def variable(*shape):
            return tf.Variable(initial.randn(*shape).astype(np.float32) * 0.3)

        self.table, self.hidden, self.output = (
            variable(VOCABULARY, WIDTH),
            variable(WIDTH, WIDTH),
            variable(WIDTH),
        )
        self.pooler = variable(WIDTH, 2)  # its task has no labels here: no gradient

    def __call__(self, ids):
        x = tf.nn.embedding_lookup(self.table, ids)
        x = gen_npu_ops.fast_gelu(x @ self.hidden) + self.output
        return tf.matmul(x, self.table, transpose_b=True)


def main():
    encoder = Encoder()
    ids = np.random.RandomState(5).randint(0, VOCABULARY, [48, LENGTH]).astype(np.int32)
    dataset, batch_size = tf.data.Dataset.from_tensor_slices(ids), BATCH
    if RANK_SIZE > 1:
        npu.distribute.broadcast(encoder.trainable_variables, root_rank=0)
        dataset, batch_size = npu.distribute.shard_and_rebatch_dataset(dataset, batch_size)
    variables = [encoder.table, encoder.hidden, encoder.output]
    optimizer = npu.train.optimizer.NpuLossScaleOptimizer(LAMB(0.02))
    accumulated = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in variables]

    @tf.function
    def forward_backward(ids, factor):
        with tf.GradientTape() as tape:
            logits = encoder(ids)
            loss = (
                tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits)
                )
                * factor
            )
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
        for total, gradient in zip(accumulated, gradients):
            total.assign_add(tf.convert_to_tensor(gradient) / ACCUMULATED)

    @tf.function
    def update():
        gradients = npu.distribute.all_reduce(
            [tf.convert_to_tensor(total) for total in accumulated]
        )
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, variables))
        for total in accumulated:
            total.assign(tf.zeros_like(total))

    skipped = []
    iterator = iter(dataset.batch(batch_size, drop_remainder=True).repeat())
    for step in range(1, 5):
        for _ in range(ACCUMULATED):
            overflow = step == FLAGS.overflow_at and RANK_ID == RANK_SIZE - 1
            forward_backward(next(iterator), tf.constant(float("inf") if overflow else 1.0))
        update()
        if not optimizer.last_step_finite.numpy():
            skipped.append(step)
    weights = [v.numpy() for v in encoder.trainable_variables]
    return {"skipped": skipped, "loss_scale": float(optimizer.loss_scale), "weights": weights}


if __name__ == "__main__":
    result = main()
