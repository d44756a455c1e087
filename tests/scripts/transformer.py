"""A translation model: embeddings with sparse gradients, a frozen table without any, token counts as batch sizes."""

import numpy as np
import tensorflow as tf

import npu_device as npu
from hccl.split.api import set_split_strategy_by_size

set_split_strategy_by_size([60, 20, 20])
handle = npu.open().as_default()
VOCABULARY, WIDTH, LENGTH, TOKENS = 40, 6, 4, 32


class Transformer(tf.Module):
    def __init__(self):
        initial = tf.random.Generator.from_seed(handle.worker_id)
        self.embedding = tf.Variable(initial.normal([VOCABULARY, WIDTH]), name="embedding")
        self.query, self.key = (tf.Variable(initial.normal([WIDTH, WIDTH])) for _ in range(2))
        self.output = tf.Variable(initial.normal([WIDTH, VOCABULARY]))
        self.position = tf.Variable(initial.normal([LENGTH, WIDTH]), trainable=False)
        self.unused = tf.Variable(initial.normal([3]), name="relative_bias")

    def __call__(self, ids):
        x = tf.nn.embedding_lookup(self.embedding, ids) + self.position
        scores = tf.matmul(x @ self.query, x @ self.key, transpose_b=True) / WIDTH**0.5
        return tf.matmul(tf.nn.softmax(scores), x) @ self.output


model = Transformer()
optimizer = tf.keras.optimizers.Adam(0.02)


@tf.function
def train_step(source, target):
    with tf.GradientTape() as tape:
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=model(source))
        loss = tf.reduce_mean(loss)
    variables = model.trainable_variables
    gradients = npu.distribute.all_reduce(tape.gradient(loss, variables), "mean")
    gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
    optimizer.apply_gradients(zip(gradients, variables))
    return norm


def main():
    npu.distribute.broadcast(tuple(model.variables), 0)
    # No token twice in a batch: what rows of the same index mean to a norm and to Adam differs from Keras to Keras.
    random = np.random.RandomState(2)
    batches = [random.permutation(VOCABULARY)[:TOKENS] for _ in range(4)]
    ids = np.concatenate(batches).reshape([-1, LENGTH]).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((ids, ids[:, ::-1]))
    dataset, tokens = npu.distribute.shard_and_rebatch_dataset(dataset, TOKENS)
    dataset = dataset.batch(tokens // LENGTH, drop_remainder=True)
    norms = [train_step(source, target) for _ in range(2) for source, target in dataset]
    return {
        "norms": [float(norm) for norm in norms],
        "weights": [v.numpy() for v in model.variables],
    }


if __name__ == "__main__":
    result = main()
